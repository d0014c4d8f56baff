"""GPU kernels lowered to Triton's intermediate form, where there is no GPU and no compiler for one."""

import re

import jax
import jax.numpy as jnp
import jaxlib.triton.dialect
import pytest
from jax._src.interpreters import mlir
from jaxlib.mlir import ir

from scalejax.kernels import embedding_bag as ops
from scalejax.numerics import rounding
from scalejax.parallel.embedding import config
from scalejax.parallel.embedding.update import optimizers

# jax 0.12 means to drop Triton from Pallas in some later version; until then it lowers these kernels.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

HOPPER = jax.sharding.AbstractMesh(
    (),
    (),
    abstract_device=jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="cuda"),
)
SMALL, LARGE = 2**20, 2**24 + 8  # the latter times 128 columns is beyond 2^31


def triton_kernels(function, *args):
    """{name: text} of the Triton kernels of a program."""
    with jax.sharding.use_abstract_mesh(HOPPER):
        lowered = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    context = mlir.make_ir_context()
    jaxlib.triton.dialect.register_dialect(context)
    found = {}
    for quoted in re.findall(r'ir = "((?:[^"\\]|\\.)*)"', lowered):
        # MLIR prints a byte as \XX or, where it can, as itself; a quote or backslash is escaped.
        code = re.sub(
            rb"\\([0-9A-F]{2}|.)",
            lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1],
            quoted.encode("latin1"),
        )
        with context:
            text = str(ir.Module.parse(code))
        found[re.search(r"func public @(\w+)", text)[1]] = text
    return found


def _array(shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _programs(rows):
    table, ids, lengths = _array((rows, 128)), _array((1024,), jnp.int32), _array((256,), jnp.int32)
    plan = ops.RowPlan(ids, ids, _array((512,), jnp.int32))

    def update(table, state, plan, sums, rate):
        def step(arrays, grads):
            return arrays[0] - rate * grads, arrays[1] + grads.sum(axis=1)

        return ops.update_rows((table, state), plan, sums, step, implementation="pallas_gpu")

    return {
        "lookup": (lambda t, i, n: ops.embedding_bag(t, i, n, implementation="pallas_gpu"), (table, ids, lengths)),
        "gather": (lambda t, i: ops.gather_rows(t, i, implementation="pallas_gpu"), (table, ids)),
        "sums": (lambda g, p: ops.sum_by_row(g, p, implementation="pallas_gpu"), (_array((1024, 128)), plan)),
        "update": (update, (table, _array((rows,)), plan, _array((512, 128)), _array(()))),
    }


@pytest.mark.default_cases("lookup")
@pytest.mark.parametrize("name", ["lookup", "gather", "update"])
def test_offsets_into_tables_beyond_32_bits_have_64_bits(name):
    # A tile of 8 rows of 128 columns is addressed at once.
    wide = "tensor<8x128x!tt.ptr<f32>>, tensor<8x128xi64>"
    kernel = {"lookup": "embedding_bag", "gather": "embedding_gather_rows", "update": "embedding_update_rows"}[name]
    small, large = (triton_kernels(*_flat(_programs(rows)[name]))[kernel] for rows in (SMALL, LARGE))
    assert wide not in small
    assert wide in large
    # The row is widened before it is multiplied by the width.
    assert "arith.extui" in large or "arith.extsi" in large


@pytest.mark.default_cases(first=6)
@pytest.mark.parametrize("dim", [4, 128])
@pytest.mark.parametrize("name", ["Sgd", "RowwiseAdagrad", "Adam", "PartialRowwiseLamb", "LarsSgd"])
def test_steps_of_the_embedding_engine_are_lowered(name, dim):
    """An interpreted kernel may use primitives that Triton lacks."""
    each, row = _array((1000, dim)), _array((1000,))
    states = {"RowwiseAdagrad": [row], "Adam": [each, each], "PartialRowwiseLamb": [each, row], "LarsSgd": [each]}
    ids = _array((64,), jnp.int32)

    def update(arrays, plan, sums, count):
        optimizer = getattr(config, name)(learning_rate=0.1)
        step = optimizers.step(optimizer, jnp.float32(1), jnp.int32(0), rounding.runtime_zero(count))
        return ops.update_rows(arrays, plan, sums, step, implementation="pallas_gpu")

    arrays, plan = (each, *states.get(name, [])), ops.RowPlan(ids, ids, _array((32,), jnp.int32))
    kernels = triton_kernels(update, arrays, plan, _array((32, dim)), _array((), jnp.int32))
    assert set(kernels) == {"embedding_update_rows"}


def test_a_step_of_one_s_own_may_call_functions_with_derivatives_of_their_own():
    @jax.custom_vjp
    def halves(x):
        return x[:, :64] + x[:, 64:]

    halves.defvjp(lambda x: (halves(x), None), lambda _, g: (jnp.tile(g, (1, 2)),))

    def update(table, plan, sums):
        def step(arrays, grads):
            return (arrays[0] - jax.nn.relu(grads) * halves(grads).sum(axis=1, keepdims=True),)

        return ops.update_rows((table,), plan, sums, step, implementation="pallas_gpu")

    ids = _array((64,), jnp.int32)
    plan = ops.RowPlan(ids, ids, _array((32,), jnp.int32))
    assert triton_kernels(update, _array((1000, 128)), plan, _array((32, 128)))


def _flat(program):
    function, args = program
    return function, *args


def test_no_kernel_adds_to_what_another_program_writes():
    for function, args in _programs(SMALL).values():
        for text in triton_kernels(function, *args).values():
            assert "atomic" not in text
            assert "tt.store" in text


def test_a_program_loops_over_what_its_segments_hold_and_hot_rows_are_summed_before():
    # 1024 occurrences: runs of 64 first, then the rows that had several.
    assert set(triton_kernels(*_flat(_programs(SMALL)["sums"]))) == {"embedding_sum_runs", "embedding_sum_by_row"}


def test_cost_estimates_follow_the_bytes():
    function, args = _programs(SMALL)["gather"]
    with jax.sharding.use_abstract_mesh(HOPPER):
        jaxpr = jax.make_jaxpr(function)(*args)
    estimates = [e.params["cost_estimate"] for e in _equations(jaxpr.jaxpr) if e.primitive.name == "pallas_call"]
    assert [e.bytes_accessed for e in estimates] == [1024 * (2 * 128 * 4 + 4)]


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns") and equation.primitive.name != "pallas_call":
                yield from _equations(inner)
