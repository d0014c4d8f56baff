"""Decode over pages: implementations equal dense attention of the gathered keys, whatever lies in other pages."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.experimental.pallas import tpu as pltpu

from scalejax.errors import UnsupportedError
from scalejax.kernels.paged_attention import blocks, paged_attention, reference

NO_KEY = np.iinfo(np.int32).max
LENGTHS = (70, 1, 0, 33, 16)
"""Keys of each row: several pages, one key, none, an open page, exactly one page."""
KERNELS = ("pallas_tpu", "pallas_gpu")
HEADS = {"mha": (4, 4), "gqa": (8, 4), "mqa": (4, 1)}


def problem(heads=(8, 4), width=128, page=16, dtype=jnp.float32, extra=2, seed=0):
    """(arguments by name, dense keys and values of each row). Pages lie anywhere, tokens anywhere in their page."""
    rng = np.random.default_rng(seed)
    queries, kv_heads = heads
    pages_of = [-(-n // page) for n in LENGTHS]
    total = sum(pages_of) + extra
    pages = rng.normal(size=(total, page, 2 * kv_heads, width)) + 5  # what is in other places must not matter
    pages = np.array(jnp.asarray(pages, dtype), np.float64)
    positions = np.full((total, page), NO_KEY, np.int64)
    table = np.full((len(LENGTHS), max(pages_of) + 1), total - 1)
    free = iter(rng.permutation(total - extra))
    dense = []
    for row, (length, count) in enumerate(zip(LENGTHS, pages_of, strict=True)):
        mine = [next(free) for _ in range(count)]
        table[row, :count] = mine
        places = rng.permutation(count * page)[:length]
        at = np.asarray(mine, int)[places // page], places % page
        positions[at] = np.arange(length)
        kv = np.array(jnp.asarray(rng.normal(size=(length, kv_heads, 2, width)), dtype), np.float64)
        pages[at] = kv.reshape(length, 2 * kv_heads, width)
        dense.append(kv)
    q = rng.normal(size=(len(LENGTHS), queries, width))
    arrays = {
        "q": jnp.asarray(q, dtype),
        "pages": jnp.asarray(pages, dtype),
        "table": jnp.asarray(table, jnp.int32),
        "key_positions": jnp.asarray(positions, jnp.int32),
        "query_positions": jnp.asarray([n - 1 for n in LENGTHS], jnp.int32),
    }
    return arrays, dense, jnp.asarray(pages_of, jnp.int32)


def expected(q, dense, window=None):
    """(out, lse) by the definition, in float64."""
    q = np.asarray(q, np.float64)
    out, lse = np.zeros_like(q), np.full(q.shape[:2], -np.inf)
    for row, kv in enumerate(dense):
        kv = kv[-window:] if window else kv
        if not len(kv):
            continue
        k, v = np.repeat(kv, q.shape[1] // kv.shape[1], axis=1).transpose(2, 1, 0, 3)  # H T D
        scores = np.einsum("hd,htd->ht", q[row], k) / np.sqrt(q.shape[2])
        highest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - highest)
        out[row] = np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), v)
        lse[row] = np.log(weights.sum(axis=1)) + highest[:, 0]
    return out, lse


def check(implementation, arrays, dense, tolerance=1e-5, **options):
    call = functools.partial(paged_attention, implementation=implementation, **options)
    out, lse = jax.jit(call)(**arrays)
    want_out, want_lse = expected(arrays["q"], dense, options.get("window"))
    assert out.dtype == arrays["q"].dtype
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(out, np.float64), want_out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse, want_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.default_cases(first=3)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("implementation", ["reference", "xla", None])
def test_gathered_pages_are_dense_attention(implementation, window):
    arrays, dense, _ = problem()
    check(implementation, arrays, dense, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "heads", "page", "dtype", "window"),
    covering(
        [
            (implementation, heads, 16 if heads == "gqa" else 64, dtype, window)
            for implementation, heads, dtype, window in itertools.product(
                KERNELS, HEADS, (jnp.float32, jnp.bfloat16), (None, 20)
            )
        ]
    ),
)
def test_kernels_are_dense_attention(implementation, heads, page, dtype, window):
    width = 64 if implementation == "pallas_gpu" and heads == "mha" else 128
    arrays, dense, _ = problem(HEADS[heads], width, page, dtype)
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    check(implementation, arrays, dense, tolerance, window=window, interpret=True)


def heads_first(arrays):
    """[P, page, 2 K, ...] -> [P, 2, K, page, ...] of pages and scales."""

    def turned(x):
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, 2, *x.shape[3:]), (3, 2), (1, 2))

    return arrays | {name: turned(arrays[name]) for name in ("pages", "scales") if name in arrays}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "stored", "turned"),
    covering([*itertools.product(("xla", *KERNELS), (None, "int8", "float8"), (False, True))]),
)
def test_pages_with_heads_first_and_in_8_bits(implementation, stored, turned):
    """Dense attention of what the stored numbers stand for. Float8 has no scales where one is left to others."""
    arrays, dense, used = problem(page=32)
    if stored is not None:
        page = arrays["pages"]
        most = 127.0 if stored == "int8" else 448.0
        scales = jnp.abs(page).max(axis=-1) / most if stored == "int8" else jnp.ones(page.shape[:-1])
        code = page / scales[..., None]
        arrays["pages"] = jnp.round(code).astype(jnp.int8) if stored == "int8" else code.astype(jnp.float8_e4m3fn)
        if stored == "int8":
            arrays["scales"] = scales
        back = np.asarray(arrays["pages"].astype(jnp.float32) * scales[..., None], np.float64)
        dense = []
        for row, length in enumerate(LENGTHS):
            kv = np.zeros((length, *page.shape[2:]))
            for entry in np.asarray(arrays["table"][row, : used[row]]):
                for place, position in enumerate(np.asarray(arrays["key_positions"][entry])):
                    if position != NO_KEY:
                        kv[position] = back[entry, place]
            dense.append(kv.reshape(length, page.shape[2] // 2, 2, page.shape[3]))
    interpret = {} if implementation == "xla" else {"interpret": True}
    check(implementation, heads_first(arrays) if turned else arrays, dense, 2e-5, **interpret)


@pytest.mark.parametrize("implementation", KERNELS)
def test_splits_of_the_keys_change_nothing(implementation, monkeypatch):
    """Small blocks: steps of one page, and more splits than some rows have pages."""
    monkeypatch.setitem(blocks.TPU, "", blocks.TpuBlocks(rows=128, splits=3, vmem_bytes=2**25))
    monkeypatch.setitem(blocks.GPU, "", blocks.GpuBlocks(programs=5 * 4 * 4, warps=4, stages=2))
    arrays, dense, _ = problem()
    check(implementation, arrays, dense, interpret=True)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_entries_that_a_row_does_not_use_are_not_seen(implementation):
    """They name a page of another row, whose keys have positions that the row would see."""
    arrays, dense, used = problem()
    full = arrays["table"][0, 0]
    beyond = jnp.arange(arrays["table"].shape[1])[None] >= used[:, None]
    arrays["table"] = jnp.where(beyond, full, arrays["table"])
    interpret = {} if implementation == "xla" else {"interpret": True}
    check(implementation, arrays | {"used": used}, dense, **interpret)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", *KERNELS])
def test_padding_sees_nothing(implementation):
    arrays, dense, _ = problem()
    arrays["query_positions"] = jnp.full_like(arrays["query_positions"], -1)
    interpret = {} if implementation == "xla" else {"interpret": True}
    check(implementation, arrays, [kv[:0] for kv in dense], **interpret)


@pytest.mark.slow
def test_the_tpu_kernel_reads_no_memory_that_is_not_its_own():
    """Interpreted with memories and copies of a TPU, in which what was not written is NaN."""
    arrays, dense, used = problem(page=16)
    check("pallas_tpu", arrays | {"used": used}, dense, interpret=pltpu.InterpretParams(detect_races=True))


@pytest.mark.slow
def test_parts_of_the_keys_merge_by_their_log_sum_exps():
    arrays, *_ = problem()
    whole = paged_attention(**arrays)
    halves = []
    for start, stop in itertools.pairwise((0, 3, arrays["table"].shape[1])):
        halves.append(paged_attention(**arrays | {"table": arrays["table"][:, start:stop]}))
    merged = reference.merge_splits(*(jnp.stack(parts, axis=1) for parts in zip(*halves, strict=True)))
    for got, want in zip(merged, whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_name_never_falls_back():
    arrays, *_ = problem(page=16)
    small = arrays | {"pages": arrays["pages"][:, :12], "key_positions": arrays["key_positions"][:, :12]}
    narrow = arrays | {name: arrays[name][..., :64] for name in ("q", "pages")}
    with pytest.raises(UnsupportedError, match="takes heads that 128 divides, as memory is laid out"):
        paged_attention(**narrow, implementation="pallas_tpu")
    for name, message in (
        ("pallas_gpu", r'implementation="pallas_gpu" takes pages of 16, 32, 64 or 128 tokens; got 12\. Take'),
        (
            "pallas_tpu",
            r'implementation="pallas_tpu" takes pages of at most 8,192 tokens times 2 K, which 128 divides; got 12 x',
        ),
    ):
        with pytest.raises(UnsupportedError, match=message):
            paged_attention(**small, implementation=name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"pages": jnp.zeros((3, 16, 7, 128))},
            r"pages must have shape \(P, page, 2 K, D\) or \(P, 2, K, page, D\); got",
        ),
        ({"pages": jnp.zeros((3, 16, 6, 128))}, r"pages must have K heads that divide H = 8; got K = 3"),
        ({"pages": jnp.zeros((3, 16, 8, 128), jnp.int8)}, r"scales must be given for pages of int8; got None"),
        ({"pages": jnp.zeros((3, 16, 8, 128), jnp.int32)}, r"pages must have the dtype of q, float32, or be int8 or"),
        ({"scales": jnp.zeros((3, 16, 8))}, r"scales must be float32 of shape \(\d+, 16, 8\); got float32\[3, 16, 8\]"),
        ({"pages": jnp.zeros((3, 16, 8, 32))}, "pages must have the head dim of q, D = 128; got 32"),
        ({"table": jnp.zeros((5, 2))}, r"table must be integers of shape \(5, 2\); got float32"),
        ({"query_positions": jnp.zeros((4,), jnp.int32)}, r"query_positions must be integers of shape \(5,\); got int"),
        ({"used": jnp.zeros((5, 1), jnp.int32)}, r"used must be integers of shape \(5,\); got int32\[5, 1\]"),
        ({"window": 0}, "window must be an int >= 1"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"implementation": "cudnn"}, 'implementation must be None or one of "reference"'),
    ],
)
def test_mistakes_name_the_argument(changed, message):
    arrays, *_ = problem()
    with pytest.raises(ValueError, match=message):
        paged_attention(**arrays | changed)
