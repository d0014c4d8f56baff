"""New tokens attend to cached and new ones spread over devices: results are dense attention's, transfers as stated."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.kernels.flash_attention import flash_attention
from scalejax.kernels.paged_attention import paged_attention
from scalejax.parallel import context_inference as inference
from scalejax.parallel.context import context_attention, merge
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan.compiled import collectives, hlo

NO_QUERY, NO_KEY = inference.NO_QUERY, inference.NO_KEY
PREFILLS = {"pass_kv": inference.sharded_pass_kv, "pass_q": inference.sharded_pass_q}
ROWS = ((0, 21), (36, 1), (5, 7), (0, 0), (18, 3), (0, 1))
"""(cached, new) tokens: a full prefill, T = 1, T < 2 N, an empty slot; 37 keys and 21 queries divide by no N but 1."""
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (2, 1)}
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}


def mesh_of(ranks, **axes):
    shape = MeshShape(**{"fsdp": 1, "context": ranks} | axes)
    return make_mesh(shape, jax.devices()[: ranks * int(np.prod([*axes.values(), 1]))])


class Spread:
    """Tokens of rows put anywhere: `places[b]` has the place of each token of row b along the axis that is cut."""

    def __init__(self, counts, ranks, rng, devices_of=None):
        drawn = [rng.integers(ranks, size=n) if devices_of is None else devices_of(n) for n in counts]
        room = max([1, *(int(np.bincount(d, minlength=ranks).max()) for d in drawn if d.size)])
        self.size = ranks * room
        self.places = []
        for devices in drawn:
            places = np.zeros(devices.size, int)
            for rank in range(ranks):
                mine = np.flatnonzero(devices == rank)
                places[mine] = rank * room + rng.permutation(room)[: mine.size]
            self.places.append(places)

    def put(self, rows, fill=0.0):
        out = np.full((len(rows), self.size, *np.asarray(rows[0]).shape[1:]), fill)
        for b, (row, places) in enumerate(zip(rows, self.places, strict=True)):
            out[b, places] = row
        return out


def problem(ranks, heads=(4, 2), width=64, dtype=jnp.float32, rows=ROWS, seed=0, devices_of=None):
    """(arguments of a prefill by name, where its queries lie, what dense attention takes of the same tokens)"""
    rng = np.random.default_rng(seed)
    queries, kv_heads = heads

    def tokens(counts, heads):
        return [np.asarray(jnp.asarray(rng.normal(size=(n, heads, width)), dtype), np.float64) for n in counts]

    new, total = [t for _, t in rows], [p + t for p, t in rows]
    q, k, v = tokens(new, queries), tokens(total, kv_heads), tokens(total, kv_heads)
    by_query, by_key = Spread(new, ranks, rng, devices_of), Spread(total, ranks, rng)
    arrays = {
        "q": jnp.asarray(by_query.put(q), dtype),
        "k": jnp.asarray(by_key.put(k, fill=3.0), dtype),  # what lies in an empty place must not matter
        "v": jnp.asarray(by_key.put(v, fill=1e3), dtype),
        "query_positions": jnp.asarray(by_query.put([p + np.arange(t) for p, t in rows], NO_QUERY), jnp.int32),
        "key_positions": jnp.asarray(by_key.put([np.arange(n) for n in total], NO_KEY), jnp.int32),
    }
    return arrays, by_query, (q, k, v)


def dense(q, k, v, window=None):
    """Row by row: softmax of all visible scores, in float64."""
    outs = []
    for queries, keys, values in zip(q, k, v, strict=True):
        share = queries.shape[1] // keys.shape[1]
        keys, values = (np.repeat(x, share, axis=1) for x in (keys, values))
        place = np.arange(len(keys))
        distance = place[len(keys) - len(queries) :, None] - place[None]
        hidden = (distance < 0) | (False if window is None else distance >= window)
        scores = np.einsum("shd,thd->hst", queries, keys) / np.sqrt(queries.shape[-1])
        weights = np.where(hidden, 0, np.exp(scores - scores.max(initial=0)))
        weights /= weights.sum(axis=-1, keepdims=True)
        outs.append(np.einsum("hst,thd->shd", weights, values))
    return outs


def assert_dense(got, by_query, parts, tolerance, window=None):
    want = by_query.put(dense(*parts, window=window))
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance)
    padding = np.ones(want.shape[:2], bool)
    for row, places in enumerate(by_query.places):
        padding[row, places] = False
    assert not np.asarray(got, np.float64)[padding].any()


def run(method, mesh, arrays, **options):
    with jax.set_mesh(mesh):
        return jax.jit(functools.partial(method, **options))(**arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ranks", "heads", "window"), covering([*itertools.product(PREFILLS, (2, 8), HEADS, (None, 6))])
)
def test_a_prefill_of_tokens_anywhere_is_dense_attention(method, ranks, heads, window):
    arrays, by_query, parts = problem(ranks, HEADS[heads])
    got = run(PREFILLS[method], mesh_of(ranks), arrays, window=window)
    assert_dense(got, by_query, parts, 1e-5, window)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "width", "dtype"), covering([*itertools.product(PREFILLS, (64, 128), TOLERANCE)]))
def test_both_methods_in_both_dtypes_and_widths(method, width, dtype):
    ranks = 4
    arrays, by_query, parts = problem(ranks, width=width, dtype=dtype)
    got = run(PREFILLS[method], mesh_of(ranks), arrays)
    assert got.dtype == dtype
    assert_dense(got, by_query, parts, TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("method", PREFILLS)
def test_random_ragged_batches(method, seed):
    rng = np.random.default_rng(100 + seed)
    rows = [(int(rng.integers(60)) * int(rng.integers(2)), int(rng.integers(1, 40))) for _ in range(5)]
    arrays, by_query, parts = problem(4, rows=[*rows, (0, 0)], seed=seed)
    assert_dense(run(PREFILLS[method], mesh_of(4), arrays), by_query, parts, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "kv_heads"), [*((method, 1) for method in (*PREFILLS, "decode")), ("pass_kv", 2)])
def test_heads_over_tensor_and_rows_over_fsdp_beside_context(method, kv_heads):
    """Lengths and rows that do not divide are filled up; one key head is fewer than devices along `tensor`."""
    if method == "decode":
        check_decode(2, mesh_of(2, fsdp=2, tensor=2), heads=(4, kv_heads), rows=[(11, 1), (3, 1), (0, 1)])
        return
    arrays, by_query, parts = problem(1, (4, kv_heads))
    got = run(PREFILLS[method], mesh_of(2, fsdp=2, tensor=2), arrays)
    assert_dense(got, by_query, parts, 1e-5)


def check_decode(ranks, mesh, rows, heads=(4, 2), spread=None, **options):
    """One new token a row; its queries lie in one place, its keys where `spread` puts them."""
    rng = np.random.default_rng(7)
    arrays, by_query, (q, k, v) = problem(1, heads, rows=rows)
    by_key = Spread([len(row) for row in k], ranks, rng, spread)
    arrays["k"], arrays["v"] = (jnp.asarray(by_key.put(x, fill=9.0), jnp.float32) for x in (k, v))
    arrays["key_positions"] = jnp.asarray(by_key.put([np.arange(len(row)) for row in k], NO_KEY), jnp.int32)
    got = run(inference.sharded_decode, mesh, arrays, **options)
    assert_dense(got, by_query, (q, k, v), 1e-5, **options)


DECODED = [(30, 1), (0, 1), (0, 0), (7, 1), (64, 1), (1, 1), (2, 1), (19, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["even", "last", "window"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_decode_asks_each_device_for_the_keys_of_its_rows(ranks, case):
    """Keys spread by chance, or all on the last device; a row that is empty."""
    spread = (lambda n: np.full(n, ranks - 1)) if case == "last" else None
    options = {"window": 5} if case == "window" else {}
    check_decode(ranks, mesh_of(ranks), DECODED, spread=spread, **options)


def parts_of(count, rng, rows=3):
    """Attention of one set of queries to several sets of keys, and to all of them; a row of the first sees nothing."""
    q = jnp.asarray(rng.normal(size=(2, rows, 2, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.normal(size=(2, 4 * count, 2, 8)), jnp.float32) for _ in range(2))
    segments, keys = jnp.ones((2, rows), jnp.int32), np.ones((2, 4 * count), np.int32)
    keys[0, :4] = 0
    attend = functools.partial(flash_attention, q, mask="full", segment_ids=segments)
    each = [
        attend(k[:, i : i + 4], v[:, i : i + 4], kv_segment_ids=jnp.asarray(keys[:, i : i + 4]))
        for i in range(0, 4 * count, 4)
    ]
    return each, attend(k, v, kv_segment_ids=jnp.asarray(keys))


@pytest.mark.slow
def test_merging_is_associative_and_commutative_and_what_sees_nothing_is_neutral():
    (a, b, c), whole = parts_of(3, np.random.default_rng(3))
    assert np.isneginf(a[1][0]).all()  # which row 0 of `a` is
    nothing = jnp.zeros_like(a[0]), jnp.full_like(a[1], -jnp.inf)
    same = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6))
    same(merge(merge(a, b), c), whole)
    same(merge(a, merge(b, c)), whole)
    same(merge(merge(c, a), b), whole)
    for part in (a, b, whole):
        jax.tree.map(np.testing.assert_array_equal, merge(part, nothing), part)
        jax.tree.map(np.testing.assert_array_equal, merge(nothing, part), part)
    jax.tree.map(np.testing.assert_array_equal, merge(nothing, nothing), nothing)


def test_merging_does_not_overflow_where_one_part_outweighs_the_other_by_far():
    one = jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1), 3e4)
    other = 2 * jnp.ones((1, 1, 1, 2)), jnp.full((1, 1, 1), -3e4)
    jax.tree.map(np.testing.assert_array_equal, merge(one, other), one)


def program(method, ranks):
    """The lowered program of a prefill or a decode over `ranks` devices, all rows and tokens dividing evenly."""
    mesh = mesh_of(ranks)
    arrays, *_ = problem(1, rows=[(3 * ranks, 2 * ranks)] * ranks)
    if method == "decode":
        arrays |= {name: arrays[name][:, :1] for name in ("q", "query_positions")}
    attend = inference.sharded_decode if method == "decode" else PREFILLS[method]
    with jax.set_mesh(mesh):
        return jax.jit(attend).lower(**arrays), mesh


def travelling(method):
    """Arrays that go round: keys, values and positions, or queries and positions."""
    return 3 if method == "pass_kv" else 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("method", [*PREFILLS, "decode"])
def test_a_compiled_program_has_one_transfer_less_than_devices_of_each_array(method, ranks):
    """None of them waits for attention: each sends what the device had, or what just arrived."""
    lowered, mesh = program(method, ranks)
    with jax.set_mesh(mesh):
        module = hlo.parse(lowered.compile().as_text())
    count = {}
    for c in collectives.of_module(module, mesh):
        assert c.axis == "context"
        count[c.kind] = count.get(c.kind, 0) + c.count
    permutes = {"collective-permute": travelling(method) * (ranks - 1)}
    assert count == (permutes if method == "pass_kv" else permutes | {"all-to-all": 1})

    entry = module.computations[module.entry]
    for instruction in entry.instructions:
        sent = instruction
        while sent.opcode in ("collective-permute", "copy", "bitcast"):
            sent = entry.by_name[sent.operands[0]]
        if instruction.opcode == "collective-permute":
            assert sent.opcode == "parameter"


def stated(module, name="main"):
    """Transfers and calls of attention in the order of a lowered program."""
    functions = {f.attributes["sym_name"].value: f for f in module.body.operations}
    kinds = {"stablehlo.collective_permute": "send", "stablehlo.all_to_all": "return"}

    def walk(operation):
        for region in operation.regions:
            for inner in (op for block in region.blocks for op in block.operations):
                kind = inner.operation.name
                if kind == "func.call":
                    callee = str(inner.attributes["callee"]).lstrip("@")
                    yield from ["attend"] if callee.startswith("_run") else walk(functions[callee])
                elif kind in kinds:
                    yield kinds[kind]
                else:
                    yield from walk(inner)

    return list(walk(functions[name]))


@pytest.mark.parametrize("method", [*PREFILLS, "decode"])
def test_every_transfer_is_stated_before_the_attention_behind_which_it_hides(method):
    lowered, _ = program(method, 4)
    rounds = (["send"] * travelling(method) + ["attend"]) * 3 + ["attend"]
    assert stated(lowered.compiler_ir("stablehlo")) == (rounds if method == "pass_kv" else [*rounds, "return"])


def work(devices, cached):
    """Pairs that a causal mask shows, by the device of the query."""
    seen = cached + 1 + np.arange(devices.size, dtype=np.int64)
    return np.bincount(devices, weights=seen)


def even(tokens, ranks):
    """Counts within one."""
    return [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]


def test_work_of_a_zigzag_is_even_and_that_of_neighbours_is_not():
    for ranks, cached in itertools.product((2, 4, 8), (0, 1_000, 10**6)):
        for new in [*range(1_000, 1_100), 4_096, 10_001, 128_000]:
            devices = inference.zigzag_devices(even(new, ranks))
            assert np.bincount(devices).tolist() == even(new, ranks)
            each = work(devices, cached)
            assert each.max() / each.min() <= 1.01, (ranks, cached, new)
    for ranks in (2, 4, 8):
        neighbours = work(np.repeat(np.arange(ranks), 128_000 // ranks), 0)
        ratio = neighbours.max() / work(inference.zigzag_devices(even(128_000, ranks)), 0).max()
        np.testing.assert_allclose(ratio, (2 * ranks - 1) / ranks, rtol=1e-4)


def test_what_a_device_has_too_few_of_is_levelled():
    assert inference.zigzag_devices([2, 5, 3]).tolist() == [1, 1, 1, 2, 0, 1, 2, 2, 1, 0]
    assert inference.zigzag_devices([0, 0]).size == 0


@pytest.mark.slow
def test_a_ring_of_many_devices_is_a_loop_and_gives_the_same(monkeypatch):
    monkeypatch.setattr("scalejax.parallel.context._UNROLLED", 2)
    arrays, by_query, parts = problem(4)
    assert_dense(run(inference.sharded_pass_q, mesh_of(4), arrays), by_query, parts, 1e-5)


@pytest.mark.slow
def test_for_a_shard_map_of_ones_own():
    """As an engine calls it: `context` is manual already, and arrays are those of a device."""
    mesh = mesh_of(4)
    arrays, by_query, parts = problem(4)
    cut = P(None, "context")

    def local(q, k, v, query_positions, key_positions):
        return inference.pass_q(q, lambda source: (k, v, key_positions), query_positions=query_positions)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(cut,) * 5, out_specs=cut, check_vma=False)
    assert_dense(jax.jit(sharded)(*arrays.values()), by_query, parts, 1e-5)


@pytest.mark.slow
def test_a_decode_over_pages_of_each_device():
    """With a kernel that gives a log-sum-exp, each device has a table of its own pages for all rows."""
    ranks, page, kv_heads = 4, 16, 2
    mesh = mesh_of(ranks)
    arrays, by_query, (q, k, v) = problem(1, (4, kv_heads), rows=DECODED)
    by_key = Spread([len(row) for row in k], ranks, np.random.default_rng(2))
    room = -(-by_key.size // ranks // page) * page

    def cut(rows, fill):
        """[B, devices * room, ...]"""
        held = by_key.put(rows, fill)
        held = held.reshape(len(rows), ranks, -1, *held.shape[2:])
        widths = [(0, 0), (0, 0), (0, room - held.shape[2]), *[(0, 0)] * (held.ndim - 3)]
        return np.pad(held, widths, constant_values=fill).reshape(len(rows), ranks * room, *held.shape[3:])

    pages = cut([interleaved(*pair) for pair in zip(k, v, strict=True)], 9.0)
    positions = cut([np.arange(len(row)) for row in k], NO_KEY)

    def local(q, query_positions, pages, positions):
        table = jnp.arange(pages.shape[0] * room // page, dtype=jnp.int32).reshape(pages.shape[0], -1)
        pages, positions = pages.reshape(-1, page, *pages.shape[2:]), positions.reshape(-1, page)

        def attend(q, query_positions, source):
            mine = jax.lax.dynamic_slice_in_dim(table, source * len(q), len(q))
            out, lse = paged_attention(q[:, 0], pages, mine, positions, query_positions[:, 0])
            return out[:, None], lse[..., None]

        return inference.pass_q_to(attend, q, query_positions=query_positions)

    by_row, by_token = P("context"), P(None, "context")
    sharded = jax.shard_map(
        local, mesh=mesh, in_specs=(by_row, by_row, by_token, by_token), out_specs=by_row, check_vma=False
    )
    got = jax.jit(sharded)(
        arrays["q"], arrays["query_positions"], jnp.asarray(pages, jnp.float32), jnp.asarray(positions, jnp.int32)
    )
    assert_dense(got, by_query, (q, k, v), 1e-5)


def interleaved(k, v):
    """[T, K, D] twice -> [T, 2 K, D]: keys and values of each head in turn."""
    return np.stack([k, v], axis=2).reshape(len(k), 2 * k.shape[1], k.shape[2])


def test_positions_of_keys_do_not_mix_with_segments():
    x, ids = jnp.zeros((1, 2, 2, 8)), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match="key_positions and segment_ids exclude each other; got both"):
        context_attention(x, x, x, positions=ids, key_positions=ids, segment_ids=ids)


@pytest.mark.slow
def test_no_mesh_is_a_mistake_of_the_caller():
    arrays, *_ = problem(1, rows=[(0, 1)])
    with pytest.raises(UserError, match=r"mesh in force must have the axis context; got no mesh\. Call under"):
        inference.sharded_pass_kv(**arrays)
