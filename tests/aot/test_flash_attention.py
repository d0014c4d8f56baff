"""Attention compiled for every chip, forward and backward: alone, and in a model's step on eight chips."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels.flash_attention import flash_attention
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
EIGHT = ["v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"]

INT = jnp.int32
FORMS = {
    "causal": {"dtype": jnp.bfloat16},
    "float32, heads of 64": {"dtype": jnp.float32, "width": 64},
    "heads of 96": {"dtype": jnp.bfloat16, "width": 96},
    "heads of 256": {"dtype": jnp.bfloat16, "width": 256},
    "offset by row, documents, window": {
        "dtype": jnp.bfloat16,
        "window": 1000,
        "arrays": {"query_offset": (2,), "segment_ids": (2, 2048), "kv_segment_ids": (2, 3000)},
        "queries": 2048,
        "keys": 3000,
    },
    "permuted": {
        "dtype": jnp.bfloat16,
        "arrays": {"query_positions": (2, 2048), "key_positions": (2, 2048)},
        "queries": 2048,
        "keys": 2048,
    },
    "one query": {"dtype": jnp.bfloat16, "queries": 1, "keys": 1000, "arrays": {"query_offset": (2,)}},
    "odd lengths": {"dtype": jnp.bfloat16, "queries": 100, "keys": 1300, "mask": "full"},
}


def program(
    implementation, *, dtype, width=128, queries=2048, keys=2048, mask="causal", window=None, arrays=None, batch=2
):
    """(forward and backward, shapes of its arguments)."""
    q = jax.ShapeDtypeStruct((batch, queries, 8, width), dtype)
    k = jax.ShapeDtypeStruct((batch, keys, 2, width), dtype)
    lse = jax.ShapeDtypeStruct((batch, 8, queries), jnp.float32)
    said = {name: jax.ShapeDtypeStruct(shape, INT) for name, shape in (arrays or {}).items()}

    def run(q, k, v, d_out, d_lse, said):
        attention = functools.partial(flash_attention, **said, mask=mask, window=window, implementation=implementation)
        value, pull = jax.vjp(attention, q, k, v)
        return value, pull((d_out, d_lse))

    return run, (q, k, k, q, lse, said)


def tpus(name, devices):
    found = topology.make_mesh(topology.parse(name), None)[0].devices.reshape(-1)[:devices]
    assert found.size == devices
    return Mesh(found, ("x",), axis_types=(AxisType.Auto,))


def compile_whole(mesh, run, shapes):
    place = NamedSharding(mesh, P())
    return cuda_topology.compile_for(
        mesh, run, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    )


@pytest.mark.parametrize("name", CHIPS)
@pytest.mark.parametrize("form", FORMS)
def test_kernels_compile_for_a_tpu(name, form):
    compiled = compile_whole(tpus(name, 1), *program("pallas_tpu", **FORMS[form]))
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", FORMS)
def test_kernels_compile_for_hopper(form):
    compiled = compile_whole(cuda_topology.mesh(1), *program("pallas_gpu", **FORMS[form]))
    text = compiled.as_text()
    for name in ("forward", "query_gradient", "key_gradients"):
        assert f"flash_attention_{name}" in text
