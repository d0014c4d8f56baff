"""Gated MLPs of groups compiled for every chip, forward and with their gradients, and beside those of others."""

import functools

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels.grouped_matmul import grouped_gated_mlp, grouped_matmul
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"]
TPU = 'custom_call_target="tpu_custom_call"'
SMALL = (4096, 1024, 2048, 8)
FORMS = {
    "whole sums": ((4096, 1024, 2048, 8), jnp.bfloat16),
    "sums in parts": ((2048, 5120, 1536, 4), jnp.float32),
    "tiles that do not divide": ((1000, 5000, 1000, 3), jnp.bfloat16),
    "few rows": ((8, 1024, 2048, 8), jnp.bfloat16),
    "an expert of Mixtral 8x7B": ((8192, 4096, 14336, 8), jnp.bfloat16),
}


def tpu(name):
    found = topology.make_mesh(topology.parse(name), None)[0].devices.reshape(-1)[:1]
    return Mesh(found, ("x",), axis_types=(AxisType.Auto,))


def forward(run, *operands):
    return run(*operands)


def gradients(run, *operands):
    y, back = jax.vjp(run, *operands)
    return y, back(y)


def compile_mlp(mesh, implementation, what, sizes=SMALL, dtype=jnp.bfloat16):
    """A gated MLP of groups, (rows, width, hidden, groups)."""
    rows, width, hidden, groups = sizes

    def on(shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def program(sizes, *operands):
        return what(functools.partial(grouped_gated_mlp, sizes=sizes, implementation=implementation), *operands)

    weights = [on((groups, width, hidden))] * 2 + [on((groups, hidden, width))]
    return cuda_topology.compile_for(mesh, program, on((groups,), jnp.int32), on((rows, width)), *weights)


# Each form for one chip, and one for every chip.
COVERED = [
    pytest.param(form, chip, marks=() if (form, chip) == ("few rows", "v5e:2x2") else pytest.mark.slow)
    for n, form in enumerate(FORMS)
    for chip in (CHIPS if form == "whole sums" else [CHIPS[n % 3]])
]


@pytest.mark.parametrize(("form", "chip"), COVERED)
def test_kernels_compile_for_a_tpu_forward_and_with_both_gradients(form, chip):
    sizes, dtype = FORMS[form]
    counts = [compile_mlp(tpu(chip), None, what, sizes, dtype).as_text().count(TPU) for what in (forward, gradients)]
    assert counts == [2, 6]


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("form", FORMS)
def test_kernels_compile_for_hopper_forward_and_with_both_gradients(form):
    text = compile_mlp(cuda_topology.mesh(1), None, gradients, *FORMS[form]).as_text()
    for name in ("", "_gated", "_gate_gradients", "_transposed", "_weight_gradients"):
        assert f"grouped_matmul{name}" in text


@pytest.mark.slow
def test_a_tpu_moves_fewer_bytes_with_ours_than_with_those_of_others_and_keeps_no_more():
    sizes = (32768, 1024, 2048, 8)
    ideal = 3 * 6 * sizes[0] * sizes[1] * sizes[2]
    flops, moved, kept = {}, {}, {}
    for name in ("pallas_tpu", "megablox", "ragged_dot"):
        compiled = compile_mlp(tpu(CHIPS[0]), name, gradients, sizes)
        cost = compiled.cost_analysis()
        flops[name], moved[name] = cost["flops"] / ideal, cost["bytes accessed"]
        kept[name] = compiled.memory_analysis().temp_size_in_bytes
    assert flops["pallas_tpu"] == pytest.approx(1, abs=0.02)
    # XLA makes the gradients of weights of dense products of all rows, one a group: 8 times the work of a third of all.
    assert flops["ragged_dot"] == pytest.approx(2 / 3 + 8 / 3, abs=0.05)
    assert 1.8 * moved["pallas_tpu"] < min(moved["megablox"], moved["ragged_dot"])
    assert kept["pallas_tpu"] < min(kept["megablox"], kept["ragged_dot"])


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("name", "kernels"), [("megablox", 3), ("ragged_dot", 2)])
def test_products_of_others_compile_for_a_tpu(name, kernels, chip):
    mesh = tpu(chip)

    def on(shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def program(sizes, *operands):
        return gradients(lambda x, w: grouped_matmul(x, w, sizes, implementation=name), *operands)

    compiled = cuda_topology.compile_for(mesh, program, on((8,), jnp.int32), on((4096, 1024)), on((8, 1024, 2048)))
    assert compiled.as_text().count(TPU) >= kernels


@cuda_topology.needs_cuda_compiler
def test_a_gpu_keeps_a_fraction_of_what_xla_keeps():
    kept = {
        name: compile_mlp(cuda_topology.mesh(1), name, gradients).memory_analysis().temp_size_in_bytes
        for name in ("pallas_gpu", "ragged_dot")
    }
    # XLA copies the rows beside each other for every group, and multiplies all of that.
    assert 8 * kept["pallas_gpu"] < kept["ragged_dot"]
