"""The embedding kernels compiled for every chip: alone, on eight chips, and for a table of more than 2^31 elements."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels import embedding_bag as ops
from scalejax.kernels.embedding_bag import pallas_tpu
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
LARGE = 2**24 + 8  # rows; times 128 columns is beyond 2^31
REPLICATED = P()
IDS, BAGS, TOUCHED = 2**13, 2**10, 2**12


def _tpus(name, devices):
    machine = topology.parse(name)
    found = topology.make_mesh(machine, None)[0].devices.reshape(-1)[:devices]
    assert found.size == devices
    return Mesh(found, ("x",), axis_types=(AxisType.Auto,))


def _rowwise_adagrad(rate):
    def step(arrays, grads):
        accumulator = arrays[1] + (grads * grads).sum(axis=1) * (1.0 / grads.shape[1])
        return arrays[0] - (rate / (jnp.sqrt(accumulator) + 1e-8))[:, None] * grads, accumulator

    return step


def _adagrad(rate):
    def step(arrays, grads):
        accumulator = arrays[1] + grads * grads
        return arrays[0] - rate * grads / (jnp.sqrt(accumulator) + 1e-8), accumulator

    return step


def _programs(implementation, rows, width=128, dtype=jnp.float32, shards=1):
    """{name: (function, shapes of arguments, donated arguments)}; sizes per shard."""
    dim = 2 * width if dtype == jnp.uint32 else width

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct((dims[0] * shards, *dims[1:]), dtype)

    table, ids, lengths = shape(rows, width, dtype=dtype), shape(IDS, dtype=jnp.int32), shape(BAGS, dtype=jnp.int32)
    plan = ops.RowPlan(ids, ids, shape(TOUCHED, dtype=jnp.int32))
    rate = jax.ShapeDtypeStruct((), jnp.float32)

    def lookup(table, ids, lengths, weights):
        return ops.embedding_bag(table, ids, lengths, weights=weights, pooling="mean", implementation=implementation)

    def update_by_sums(table, state, plan, sums, rate):
        step = _rowwise_adagrad(rate) if state.ndim == 1 else _adagrad(rate)
        return ops.update_rows((table, state), plan, sums, step, implementation=implementation)

    def update(table, state, plan, grads, rate):
        sums = ops.sum_by_row(grads, plan, implementation="pallas_gpu" if implementation == "pallas_gpu" else "xla")
        return update_by_sums(table, state, plan, sums, rate)

    grads, sums = shape(IDS, dim), shape(TOUCHED, dim)
    return {
        "lookup": (lookup, (table, ids, lengths, shape(IDS)), ()),
        "gather": (lambda t, i: ops.gather_rows(t, i, implementation=implementation), (table, ids), ()),
        "row-wise adagrad": (update_by_sums, (table, shape(rows), plan, sums, rate), (0, 1)),
        "adagrad": (update_by_sums, (table, shape(rows, dim), plan, sums, rate), (0, 1)),
        "sums and row-wise adagrad": (update, (table, shape(rows), plan, grads, rate), (0, 1)),
    }


def _compile(mesh, program, spec=REPLICATED):
    function, shapes, donated = program

    def place(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec if a.shape else P()))

    return cuda_topology.compile_for(mesh, function, *jax.tree.map(place, shapes), donate_argnums=donated)


def _assert_in_place(compiled, program, bytes_of_table, shards=1):
    """Nothing near the size of the table is allocated, and what is donated is updated where it is."""
    memory = compiled.memory_analysis()
    # Gradients of all occurrences, sorted, are the largest thing that a step holds beside its arguments.
    assert memory.temp_size_in_bytes < bytes_of_table / 10
    _, shapes, donated = program
    leaves = jax.tree.leaves([shapes[n] for n in donated])
    assert memory.alias_size_in_bytes >= sum(a.size * a.dtype.itemsize for a in leaves) // shards


@pytest.mark.parametrize(
    ("what", "dtype", "name"),
    [
        *itertools.product(("lookup", "gather", "row-wise adagrad", "adagrad"), (jnp.float32, jnp.uint32), CHIPS[:1]),
        *itertools.product(("adagrad",), [jnp.float32], CHIPS[1:]),
    ],
)
def test_kernels_compile_for_a_tpu_without_a_copy_of_the_table(name, dtype, what):
    mesh, rows = _tpus(name, 1), 2**20
    program = _programs("pallas_tpu", rows, dtype=dtype)[what]
    compiled = _compile(mesh, program)
    assert "tpu_custom_call" in compiled.as_text()
    _assert_in_place(compiled, program, rows * 128 * 4)


@pytest.mark.parametrize("name", ["v5e:2x2", "tpu7x:2x2x1"])
def test_a_table_of_narrow_rows_is_refused_because_it_would_be_copied(name, monkeypatch):
    mesh, rows = _tpus(name, 1), 2**20
    program = _programs("pallas_tpu", rows, width=64)["gather"]
    with pytest.raises(ValueError, match="multiple of 128"):
        _compile(mesh, program)
    monkeypatch.setattr(pallas_tpu, "_check_rows", lambda *_: None)
    assert _compile(mesh, program).memory_analysis().temp_size_in_bytes >= rows * 64 * 4


@pytest.mark.parametrize("what", ["lookup", "gather", "row-wise adagrad"])
def test_a_tpu_addresses_more_than_2_31_elements(what):
    program = _programs("pallas_tpu", LARGE)[what]
    _assert_in_place(_compile(_tpus("v5e:2x2", 1), program), program, LARGE * 128 * 4)


@pytest.mark.parametrize("name", ["v5e:2x4", "tpu7x:2x2x1"])
def test_a_step_with_kernels_forced_compiles_on_eight_tpus(name):
    mesh, rows = _tpus(name, 8), 2**20
    program = _step_on_shards(mesh, "pallas_tpu", rows)
    compiled = _compile(mesh, program, P("x"))
    text = compiled.as_text()
    assert text.count("tpu_custom_call") >= 2
    assert "all-gather" not in text
    _assert_in_place(compiled, program, rows * 128 * 4, shards=8)


def _step_on_shards(mesh, implementation, rows):
    """Lookup, gradient and update on every device's own rows."""
    programs = _programs(implementation, rows, shards=8)
    lookup, (_, ids, lengths, weights), _ = programs["lookup"]
    update, (table, state, plan, _, rate), _ = programs["sums and row-wise adagrad"]

    def step(table, state, ids, lengths, weights, plan, rate):
        pooled, pull = jax.vjp(lambda w: lookup(table, ids, lengths, w), weights)
        (weight_grads,) = pull(pooled)
        grads = pooled[ops.slot_bags(lengths, ids.shape[0])] * weight_grads[:, None]
        return update(table, state, plan, grads, rate)

    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(P("x"),) * 6 + (P(),), out_specs=(P("x"), P("x")), check_vma=False
    )
    return sharded, (table, state, ids, lengths, weights, plan, rate), (0, 1)


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize("what", ["lookup", "gather", "sums and row-wise adagrad", "adagrad"])
def test_kernels_compile_for_hopper(what):
    program = _programs("pallas_gpu", LARGE)[what]
    _assert_in_place(_compile(cuda_topology.mesh(1), program), program, LARGE * 128 * 4)


@cuda_topology.needs_cuda_compiler
def test_a_step_with_kernels_forced_compiles_on_eight_gpus():
    mesh, rows = cuda_topology.mesh(8), 2**20
    program = _step_on_shards(mesh, "pallas_gpu", rows)
    _assert_in_place(_compile(mesh, program, P("x")), program, rows * 128 * 4, shards=8)
