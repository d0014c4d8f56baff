"""Decode over pages compiled for chips that are not here: no form copies the pool of pages."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology, test_flash_attention

from scalejax.kernels.paged_attention import paged_attention

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

B, W, PAGES = 8, 32, 4_096
FORMS = {
    "8B": (32, 8, 128, 64, jnp.bfloat16),
    "8B over tensor=8": (4, 1, 128, 64, jnp.bfloat16),
    "pages of 16, float32": (16, 4, 128, 16, jnp.float32),
    "pages of 128": (64, 8, 128, 128, jnp.bfloat16),
}
"""H, K, D, tokens of a page, dtype."""


def program(implementation, heads, kv_heads, width, page, dtype, pages=PAGES):
    """(decode of a token a row, shapes of its arguments)."""

    def array(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    shapes = (
        array(B, heads, width, dtype=dtype), array(pages, page, 2 * kv_heads, width, dtype=dtype), array(B, W),
        array(pages, page), array(B), array(B),
    )  # fmt: skip

    def run(q, pages, table, key_positions, query_positions, used):
        return paged_attention(
            q, pages, table, key_positions, query_positions, used=used, window=4_096, implementation=implementation
        )

    return run, shapes


def check(mesh, implementation, form):
    run, shapes = program(implementation, *form)
    compiled = test_flash_attention.compile_whole(mesh, run, shapes)
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * shapes[1].size * shapes[1].dtype.itemsize
    return compiled


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_tpu_compiles_it(chip, form):
    assert "tpu_custom_call" in check(test_flash_attention.tpus(chip, 1), "pallas_tpu", FORMS[form]).as_text()


@functools.cache
def hopper():
    return cuda_topology.mesh(1)


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", [*FORMS, "heads of 64", "2^32 elements"])
def test_hopper_compiles_it(form):
    if form == "2^32 elements":
        run, shapes = program("pallas_gpu", 32, 8, 128, 64, jnp.bfloat16, pages=2**15)
        assert shapes[1].size == 2**32
        test_flash_attention.compile_whole(hopper(), run, shapes)
        return
    check(hopper(), "pallas_gpu", FORMS.get(form, (32, 8, 64, 64, jnp.bfloat16)))
