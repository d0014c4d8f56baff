"""Attention compiled for every chip, forward and backward: alone, and in a model's step on eight chips."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels.flash_attention import flash_attention
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.rules import Rules
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]

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
    "nothing hidden, heads of 40": {"dtype": jnp.bfloat16, "width": 40, "mask": "full"},
    "nothing hidden, heads of 160": {
        "dtype": jnp.bfloat16,
        "width": 160,
        "queries": 256,
        "keys": 256,
        "mask": "full",
    },
    "odd lengths, heads of 80": {"dtype": jnp.bfloat16, "width": 80, "queries": 1000, "keys": 1000, "window": 300},
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


# Each form for one chip: Mosaic takes seconds for each.
COVERED = [(form, CHIPS[n % 4]) for n, form in enumerate(FORMS)]


@pytest.mark.parametrize(("form", "name"), COVERED)
def test_kernels_compile_for_a_tpu(form, name):
    compiled = compile_whole(tpus(name, 1), *program("pallas_tpu", **FORMS[form]))
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", ["heads of 96", "offset by row, documents, window", "one query"])
def test_kernels_compile_for_hopper(form):
    compiled = compile_whole(cuda_topology.mesh(1), *program("pallas_gpu", **FORMS[form]))
    text = compiled.as_text()
    for name in ("forward", "query_gradient", "key_gradients"):
        assert f"flash_attention_{name}" in text


@pytest.mark.parametrize("name", CHIPS[:1] + CHIPS[3:])
def test_splash_compiles_for_a_tpu(name):
    form = {
        "dtype": jnp.bfloat16,
        "window": 1000,
        "arrays": {"segment_ids": (2, 2048), "kv_segment_ids": (2, 4096)},
        "keys": 4096,
    }
    compiled = compile_whole(tpus(name, 1), *program("splash", **form))
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3


def _layer(mesh, implementation):
    """Projections around attention, rows of the batch over "fsdp" and heads over "tensor", with its gradients."""
    rules = Rules(axes=(("batch", ("fsdp",)), ("heads", ("tensor",)), ("kv_heads", ("tensor",))))

    def attend(q, k, v, segments):
        return flash_attention(q, k, v, segment_ids=segments, implementation=implementation)[0]

    def loss(w, x, segments):
        q, k = (jnp.einsum("bse,ehd->bshd", x, w[name]) for name in ("query", "key"))
        keys = ("batch", None, "kv_heads", None)
        sharded = shard_kernel(
            attend,
            in_axes=(("batch", None, "heads", None), keys, keys, ("batch", None)),
            out_axes=("batch", None, "heads", None),
            rules=rules,
            mesh=mesh,
        )
        return jnp.square(sharded(q, k, k, segments).astype(jnp.float32)).sum()

    def placed(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    weights = {
        "query": placed((256, 8, 128), jnp.bfloat16, None, "tensor"),
        "key": placed((256, 2, 128), jnp.bfloat16, None, "tensor"),
    }
    x = placed((8, 256, 256), jnp.bfloat16, "fsdp")
    return jax.grad(loss), (weights, x, placed((8, 256), INT, "fsdp"))


def _lines_of_kernels(mesh, implementation, mark):
    """Lines of the compiled layer that call kernels; its projections are left to the partitioner."""
    mesh = Mesh(mesh.devices.reshape(4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    step, shapes = _layer(mesh, implementation)
    lines = cuda_topology.compile_for(mesh, step, *shapes).as_text().splitlines()
    return [line for line in lines if "custom-call(" in line and mark in line]


@pytest.mark.parametrize("name", ["v5e:2x4", "tpu7x:2x2x1"])
def test_a_layer_with_kernels_forced_compiles_on_eight_tpus(name):
    lines = _lines_of_kernels(tpus(name, 8), "pallas_tpu", "tpu_custom_call")
    assert len(lines) == 3
    assert all("bf16[2,4,256,128]" in line for line in lines)  # 8 / 4 rows, 8 / 2 heads


@cuda_topology.needs_cuda_compiler
def test_a_layer_with_kernels_forced_compiles_on_eight_gpus():
    lines = _lines_of_kernels(cuda_topology.mesh(8), "pallas_gpu", "flash_attention")
    assert len(lines) == 3
    assert all("bf16[512,512]" in line for line in lines)  # 8 / 4 rows of 256, 8 / 2 heads of 128
