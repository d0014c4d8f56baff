"""Decode over pages compiled for chips that are not here: no form copies the pool of pages."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology, test_flash_attention

from scalejax.kernels.paged_attention import paged_attention, ragged

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

B, W, PAGES = 8, 32, 4_096
FORMS = {
    "8B": {},
    "8B over tensor=8": {"heads": 4, "kv_heads": 1},
    "pages of 16, float32": {"heads": 16, "kv_heads": 4, "page": 16, "dtype": jnp.float32},
    "pages of 128": {"heads": 64, "page": 128},
    "heads first": {"order": "heads"},
    "heads first, tensor=8": {"order": "heads", "heads": 4, "kv_heads": 1},
    "int8": {"stored": jnp.int8},
    "int8, heads first, tensor=8": {"stored": jnp.int8, "order": "heads", "heads": 4, "kv_heads": 1},
    "float8, heads first": {"stored": jnp.float8_e4m3fn, "order": "heads"},
}


def program(
    implementation, heads=32, kv_heads=8, width=128, page=64, dtype=jnp.bfloat16, pages=PAGES, order="tokens",
    stored=None,
):  # fmt: skip
    """(decode of a token a row, shapes of its arguments)."""

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = (pages, page, 2 * kv_heads) if order == "tokens" else (pages, 2, kv_heads, page)
    shapes = (
        array(B, heads, width, dtype=dtype), array(*rows, width, dtype=stored or dtype), array(B, W),
        array(pages, page), array(B), array(B), array(*rows, dtype=jnp.float32) if stored == jnp.int8 else None,
    )  # fmt: skip

    def run(q, pages, table, key_positions, query_positions, used, scales):
        return paged_attention(
            q,
            pages,
            table,
            key_positions,
            query_positions,
            used=used,
            scales=scales,
            window=4_096,
            implementation=implementation,
        )

    return run, shapes


def check(mesh, implementation, form):
    run, shapes = program(implementation, **form)
    compiled = test_flash_attention.compile_whole(mesh, run, shapes)
    # For v5p XLA copies scales and positions of all pages before it takes those of the table.
    assert compiled.memory_analysis().temp_size_in_bytes < 0.1 * shapes[1].size * shapes[1].dtype.itemsize
    return compiled


IN_TURN = [(form, ("v5e:2x2", "v5p:2x2x1", "v6e:2x2")[n % 3]) for n, form in enumerate(FORMS)]


@pytest.mark.parametrize(("form", "chip"), IN_TURN)
def test_a_tpu_compiles_it(chip, form):
    assert "tpu_custom_call" in check(test_flash_attention.tpus(chip, 1), "pallas_tpu", FORMS[form]).as_text()


@pytest.mark.parametrize(
    ("chip", "rows", "heads", "kv_heads", "page", "dtype"),
    [
        ("v6e:2x2", 1, 32, 8, 64, jnp.bfloat16),
        ("v5e:2x2", 4, 4, 1, 64, jnp.bfloat16),
        ("v6e:2x2", 2, 16, 8, 16, jnp.float32),
        ("v6e:2x2", 1, 16, 16, 16, jnp.bfloat16),
        ("v5p:2x2x1", 1, 128, 8, 128, jnp.bfloat16),
    ],
)
def test_a_tpu_reads_pages_of_a_piece_where_they_lie(chip, rows, heads, kv_heads, page, dtype):
    """No copy of the keys and values of the rows is made, beside one of the queries where there are several rows."""

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    q = array(rows, 512, heads, 128, dtype=dtype)
    pages = array(PAGES, page, 2 * kv_heads, 128, dtype=dtype)
    assert ragged.lacks(q, pages) is None
    run = functools.partial(ragged.attention, window=4_096, scale=0.1)
    shapes = (q, pages, array(rows, W), array(rows, 512), array(rows))
    compiled = test_flash_attention.compile_whole(test_flash_attention.tpus(chip, 1), run, shapes)
    assert "ragged_paged_attention" in compiled.as_text()
    of_queries = 0 if rows == 1 else 2 * q.size * q.dtype.itemsize
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**18 + of_queries


@functools.cache
def hopper():
    return cuda_topology.mesh(1)


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", [*FORMS, "heads of 64", "2^32 elements"])
def test_hopper_compiles_it(form):
    if form == "2^32 elements":
        run, shapes = program("pallas_gpu", pages=2**15)
        assert shapes[1].size == 2**32
        test_flash_attention.compile_whole(hopper(), run, shapes)
        return
    check(hopper(), "pallas_gpu", FORMS.get(form, {"width": 64}))
