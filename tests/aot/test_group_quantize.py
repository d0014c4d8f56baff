"""Kernels of integer groups compiled for every chip, and a step of SDP4Bit that contains them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import cuda_topology
from aot.test_mx import CHIPS, compiled, like, tpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels import group_quantize
from scalejax.kernels.group_quantize import IntGroups, QuantizedGroups
from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.gradients.blocks import StepContext
from scalejax.parallel.gradients.compute import Loss, gradients
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.plan import topology
from scalejax.plan.compiled import hlo

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

TPU, TRITON = 'custom_call_target="tpu_custom_call"', 'custom_call_target="__gpu$xla.gpu.triton"'
FORMATS = {
    "int4:128": IntGroups(bits=4, size=128),
    "int4:512": IntGroups(bits=4, size=512),
    "int4:2048": IntGroups(bits=4, size=2048),
    "int8:128": IntGroups(bits=8, size=128),
    "int8:512": IntGroups(bits=8, size=512),
}
ONE = "int4:128"
"""What the default run compiles for one chip of each kind."""
SEED = like((2,), jnp.uint32)


def quantized(shape, format):
    made = jax.eval_shape(lambda x: group_quantize.quantize(x, format, implementation="xla"), like(shape, jnp.float32))
    assert isinstance(made, QuantizedGroups)
    return made


def programs(name, implementation):
    """What -> (function, shapes)."""
    format, how, n = FORMATS[name], {"implementation": implementation}, 2**18 + 3 * 2048

    def quantize(x, seed):
        return group_quantize.quantize(x, format, seed, transform="hadamard", **how)

    def total(groups):
        return group_quantize.dequantize_sum(groups, format, transform="hadamard", **how)

    def again(groups, seed):
        return group_quantize.requantize(groups, format, FORMATS[ONE], seed, **how)

    def add(base, groups):
        return group_quantize.dequantize_add(base, groups, format, **how)

    return {
        "quantize": (quantize, like((n,), jnp.float32), SEED),
        "sum": (total, quantized((4, n), format)),
        "requantize": (again, quantized((4, n), format), SEED),
        "add": (add, like((n,), jnp.bfloat16), quantized((n,), format)),
    }


def kernels_compile(mesh, name, implementation, mark):
    for what, program in programs(name, implementation).items():
        assert compiled(mesh, *program).count(mark) == 1, what


@pytest.mark.parametrize(("name", "chip"), [*((name, CHIPS[0]) for name in FORMATS), *((ONE, c) for c in CHIPS[1:])])
def test_they_compile_for_a_tpu(name, chip):
    kernels_compile(tpu(chip), name, "pallas_tpu", TPU)


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("name", FORMATS)
def test_they_compile_for_hopper(name):
    kernels_compile(cuda_topology.mesh(1), name, "pallas_gpu", TRITON)


SHAPES = {"a": (512, 64), "b": (64, 1024), "c": (8, 4)}


def step_of(mesh):
    """A step of SDP4Bit for a loss of two products, and what it takes."""
    strategy = Sdp4Bit()
    described = {path: ((None,) * len(shape), shape) for path, shape in SHAPES.items()}
    specs = {p.name: p.spec for p in fsdp.place(described, strategy, mesh=mesh)}

    def loss(given):
        params = given.gather(given.params)
        x = jnp.tanh(given.batch @ params["a"].astype(jnp.float32)) @ params["b"].astype(jnp.float32)
        return Loss((x**2).sum() + params["c"].astype(jnp.float32).sum(), jnp.float32(1)), {}

    run = gradients(loss, strategy, mesh=mesh, specs=specs, parts=1)

    def step(params, state, batch, key):
        context = StepContext(jnp.int32(0), jax.random.wrap_key_data(key))
        found = run(params, batch, exchange=state, context=context)
        moved = {path: p - found.params[path] for path, p in params.items()}
        return moved, run.after_update(moved, found.exchange, context)

    params = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, specs[path]))
        for path, shape in SHAPES.items()
    }
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P())),
        jax.eval_shape(run.init_exchange, params),
    )
    batch = jax.ShapeDtypeStruct((16, 512), jnp.float32, sharding=meshes.batch_sharding(mesh))
    key = jax.ShapeDtypeStruct((2,), np.uint32, sharding=NamedSharding(mesh, P()))
    return step, (params, state, batch, key)


def kernels_of(text):
    """Names of the kernels of a program for TPUs."""
    found = (i for computation in hlo.parse(text).computations.values() for i in computation.instructions)
    return sorted(i.name.partition(".")[0] for i in found if TPU in i.attributes)


def test_a_step_of_sdp4bit_runs_them_on_a_tpu():
    mesh, _ = topology.make_mesh(topology.parse("v5e:2x4"), meshes.parse_mesh("replica=2,fsdp=4"))
    step, given = step_of(mesh)
    text = cuda_topology.compile_for(mesh, step, *given).as_text()
    # Gradients in two hops, then differences of weights: to bytes, from bytes to bytes, from bytes.
    sent = ["group_quantize"] * 2
    assert kernels_of(text) == ["group_dequantize"] * 2 + sent + ["group_requantize"]
