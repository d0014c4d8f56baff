import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys

import bucket_program
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import residual_stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import ddp, fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.mesh import MeshShape

SPECS = {path: P() for path in residual_stack.axes()}


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(MeshShape(replica=2, fsdp=4))


def on_devices(mesh, tree):
    return jax.device_put(tree, NamedSharding(mesh, P()))


@functools.cache
def expected():
    """Sum, weight and gradients by jax on one device."""
    run = jax.jit(jax.value_and_grad(lambda p, b: residual_stack.loss(p, b, None)[0]))
    batch = residual_stack.batch(rows=32)
    return *run(residual_stack.params(), batch), batch["weights"].sum()


@pytest.mark.default_cases
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("bucket_bytes", "accumulate", "parts"),
    [(1, "communicate", 1), (2000, "communicate", 2), (1, "local", 4), (2000, "local", 2), (2**20, "local", 1)],
)
def test_any_buckets_and_parts_give_the_gradients_of_one_device(mesh, bucket_bytes, accumulate, parts):
    strategy = Ddp(bucket_bytes=bucket_bytes, accumulate=accumulate)
    run = jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=SPECS, parts=parts))
    batch = jax.device_put(residual_stack.batch(rows=32), meshes.batch_sharding(mesh))
    total, weight, _, grads = run(on_devices(mesh, residual_stack.params()), batch)
    value, gradients, weights = expected()
    np.testing.assert_allclose(total, value, rtol=1e-13)
    assert weight == weights
    for path, g in grads.items():
        np.testing.assert_allclose(g, gradients[path], rtol=1e-10, atol=1e-13, err_msg=path)


SIZES = st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["float32", "bfloat16"])), min_size=1, max_size=12)


@hypothesis.given(SIZES, st.integers(1, 300))
def test_buckets_are_a_reversed_partition_within_the_cap(sizes, cap):
    arrays = {f"p{i}": jax.ShapeDtypeStruct((n,), jnp.dtype(dtype)) for i, (n, dtype) in enumerate(sizes)}
    size = {path: a.size * a.dtype.itemsize for path, a in arrays.items()}
    found = ddp.buckets(arrays, cap)
    assert sorted(path for bucket in found for path in bucket) == sorted(arrays)
    for bucket in found:
        assert len({arrays[path].dtype for path in bucket}) == 1
        assert len(bucket) == 1 or sum(size[path] for path in bucket) <= cap
    for dtype in {a.dtype for a in arrays.values()}:
        order = [path for bucket in found for path in bucket if arrays[path].dtype == dtype]
        assert order == [path for path in reversed(arrays) if arrays[path].dtype == dtype]
        # No two neighbours would have fitted into one.
        filled = [sum(size[p] for p in bucket) for bucket in found if arrays[bucket[0]].dtype == dtype]
        members = [bucket for bucket in found if arrays[bucket[0]].dtype == dtype]
        for (a, b), before in zip(itertools.pairwise(members), filled, strict=False):
            assert before + size[b[0]] > cap or before >= cap, (a, b)


def test_sums_of_integers_do_not_depend_on_the_cap(mesh):
    # Gradients that are small whole numbers add without rounding, so any cut must give the same bits.
    def loss(params, batch, key, gather):
        params = gather(params)
        return sum((p * batch["x"].sum()).sum() for p in params.values()), batch["x"].sum(), {}

    params = {"a": np.ones(5, np.float32), "b": np.ones((3, 2), np.float32)}
    batch = {"x": jax.device_put(np.arange(8, dtype=np.float32), meshes.batch_sharding(mesh))}
    for cap in (1, 24, 100):
        run = fsdp.gradients(loss, Ddp(bucket_bytes=cap), mesh=mesh, specs={"a": P(), "b": P()})
        *_, grads = jax.jit(run)(on_devices(mesh, params), batch)
        np.testing.assert_array_equal(grads["a"], np.full(5, 28.0))
        np.testing.assert_array_equal(grads["b"], np.full((3, 2), 28.0))


def parameter_bytes():
    return {path: 4 * int(np.prod(shape)) for path, (_, shape) in residual_stack.axes().items()}


def reductions(rows):
    """[(bytes, executions)] of the gradients; sum, weight and aux are scalars."""
    return sorted((size // count, count) for kind, size, count in rows if kind == "all-reduce" and size > 4 * count)


CAP = 1024
# Reverse order of fetching: head 512, final norm 32 and the norms of three layers 96, then their matrices, then embed.
TREE = sorted([(512 + 32 + 96, 1), (3072, 1), (3072, 1), (512, 1)])
# Norm 32, up 1024, down 1024 of each of three layers, inside the backward scan.
BLOCKS = sorted([(512 + 32, 1), (32, 3), (1024, 3), (1024, 3), (512, 1)])


@pytest.mark.slow
def test_buckets_are_stated_one_all_reduce_each():
    assert reductions(bucket_program.collectives(CAP, "local", 2)["stated"]) == TREE
    assert reductions(bucket_program.collectives(CAP, "communicate", 1)["stated"]) == BLOCKS
    assert sum(size * count for size, count in TREE) == sum(parameter_bytes().values())
    assert sum(size * count for size, count in BLOCKS) == sum(parameter_bytes().values())


@pytest.mark.slow
def test_gradients_of_all_parts_are_reduced_once_or_in_each():
    once = reductions(bucket_program.collectives(CAP, "local", 4)["stated"])
    each = reductions(bucket_program.collectives(CAP, "communicate", 4)["stated"])
    assert once == TREE
    assert each == sorted((size, 4 * count) for size, count in BLOCKS)


def test_one_bucket_for_everything_is_one_all_reduce():
    assert reductions(bucket_program.collectives(2**20, "local", 1)["stated"]) == [(sum(parameter_bytes().values()), 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accumulate", "parts", "expected"),
    [("local", 2, TREE), ("communicate", 1, BLOCKS)],
)
def test_buckets_stay_apart_when_compiled_without_the_combiner(accumulate, parts, expected):
    tests = pathlib.Path(__file__).parent.parent
    found = subprocess.run(
        [sys.executable, bucket_program.__file__, str(CAP), accumulate, str(parts)],
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_disable_hlo_passes=cpu-all-reduce-combiner",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": "8",
            "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert reductions(json.loads(found.stdout)["compiled"]) == expected


def needs(eqns, eqn):
    """What an equation is computed from, of all equations of a program."""
    made = {id(out): e for e in eqns for out in e.outvars}
    found, todo = {}, [eqn]
    while todo:
        for e in (made[id(x)] for x in todo.pop().invars if id(x) in made):
            if id(e) not in found:
                found[id(e)] = e
                todo.append(e)
    return found


@pytest.mark.parametrize(("accumulate", "waits"), [("communicate", False), ("local", True)])
def test_the_first_bucket_waits_for_the_layers_only_where_it_holds_gradients_of_theirs(mesh, accumulate, waits):
    # What overlap needs: the sum of the head's gradients can start before the backward pass of the layers.
    strategy = Ddp(bucket_bytes=CAP, accumulate=accumulate)
    gradients = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=SPECS)
    jaxpr = jax.make_jaxpr(gradients)(residual_stack.params(np.float32), residual_stack.batch(rows=8)).jaxpr
    eqns = next(e for e in jaxpr.eqns if e.primitive.name == "shard_map").params["jaxpr"].eqns
    backward = [e for e in eqns if e.primitive.name == "scan"][-1]
    sums = {e.invars[0].aval.size: e for e in eqns if "psum" in e.primitive.name and e.invars[0].aval.ndim == 1}
    first = 160 if waits else 136  # the head and its norm; with "local" the norms of three layers besides
    assert (id(backward) in needs(eqns, sums[first])) == waits
    assert id(backward) in needs(eqns, sums[128])  # the embedding comes last


@pytest.mark.usefixtures("x64")
def test_branches_that_only_some_devices_take_neither_hang_nor_differ(mesh):
    def loss(params, batch, key, gather):
        params = gather(params)
        x = batch["x"]
        total = jax.lax.cond(x[0] > 3, lambda: (x * params["a"]).sum(), lambda: (x * params["b"]).sum())
        return total, jnp.float64(x.size), {}

    x = np.arange(8.0)
    run = fsdp.gradients(loss, Ddp(), mesh=mesh, specs={"a": P(), "b": P()})
    params = on_devices(mesh, {"a": np.float64(2), "b": np.float64(3)})
    *_, grads = jax.jit(run)(params, {"x": jax.device_put(x, meshes.batch_sharding(mesh))})
    assert (grads["a"], grads["b"]) == (4 + 5 + 6 + 7, 0 + 1 + 2 + 3)


def copies(mesh, values):
    """An array that is said to be whole on every device, whatever each device holds."""
    sharding = NamedSharding(mesh, P())
    arrays = [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    return jax.make_array_from_single_device_arrays(values[0].shape, sharding, arrays)


DTYPES = [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_gives_all_devices_the_bits_of_the_first(mesh, dtype):
    rng = np.random.default_rng(0)
    values = [np.asarray(rng.normal(size=(3, 2)) * 9).astype(dtype) for _ in range(8)]
    if dtype == np.float32:
        values[0][0] = [-0.0, np.nan]
        values[5][0] = [np.inf, np.nan]
    found = ddp.broadcast({"w": copies(mesh, values)}, mesh)["w"]
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == values[0].tobytes()


def test_broadcast_takes_keys(mesh):
    key = on_devices(mesh, jax.random.key(3))
    assert jax.random.key_data(ddp.broadcast(key, mesh)).tolist() == jax.random.key_data(key).tolist()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16], ids=str)
def test_a_checksum_is_what_it_says(dtype):
    with jax.enable_x64(True):
        x = np.random.default_rng(1).normal(size=(5, 7)).astype(dtype)
        words = np.frombuffer(x.tobytes(), np.uint16 if x.dtype.itemsize == 2 else np.uint32).astype(np.uint64)
        expected = int((words * (2 * np.arange(len(words), dtype=np.uint64) + 1)).sum() % 2**32)
        assert int(ddp.checksum(jnp.asarray(x))) == expected


def test_a_replica_that_differs_in_one_bit_is_found_by_name(mesh):
    same = [np.arange(6, dtype=np.float32)] * 8
    other = [x.copy() for x in same]
    other[5].view(np.uint32)[3] ^= 1
    params = {"good": copies(mesh, same), "bad": copies(mesh, other)}
    found = jax.jit(lambda p: ddp.differing(p, {"good": P(), "bad": P()}, mesh))(params)
    assert {path: bool(d) for path, d in found.items()} == {"good": False, "bad": True}


@pytest.mark.slow
def test_shards_are_compared_with_their_copies_alone(mesh):
    x = np.arange(8, dtype=np.float32)
    sharding = NamedSharding(mesh, P("fsdp"))
    parts = {d: x[i] for d, i in sharding.devices_indices_map((8,)).items()}
    sound = jax.make_array_from_single_device_arrays((8,), sharding, [jax.device_put(v, d) for d, v in parts.items()])
    parts[mesh.devices.flat[6]] = parts[mesh.devices.flat[6]] + 1
    broken = jax.make_array_from_single_device_arrays((8,), sharding, [jax.device_put(v, d) for d, v in parts.items()])
    for array, differs in ((sound, False), (broken, True)):
        assert bool(ddp.differing({"w": array}, {"w": P("fsdp")}, mesh)["w"]) == differs


@pytest.mark.slow
@pytest.mark.parametrize("divisor", ["global", "local"])
def test_replicas_stay_equal_unless_each_divides_by_its_own_count(mesh, divisor):
    # The mistake of a mean of means: devices divide the same sum by different counts.
    optimizer = optax.sgd(0.1, momentum=0.9)

    @dataclasses.dataclass(frozen=True, eq=False)
    class OwnCount(ddp.Bucketed):
        def reduce(self, gradients, state, kept):
            reduced, state = super().reduce(gradients, state, kept)
            count = 1 + jax.lax.axis_index(self.axes)
            return {path: g / count for path, g in reduced.items()}, state

    class WrongDdp(Ddp):
        def exchange(self, layouts, axes):
            return OwnCount(layouts=layouts, axes=axes, bucket_bytes=self.bucket_bytes)

    strategy = Ddp() if divisor == "global" else WrongDdp()
    gradients = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=SPECS)

    @jax.jit
    def step(params, state, batch):
        _, weight, _, grads = gradients(params, batch)
        updates, state = optimizer.update(jax.tree.map(lambda g: g / weight, grads), state)
        params = optax.apply_updates(params, updates)
        return params, state, ddp.differing(params, SPECS, mesh)

    params = on_devices(mesh, residual_stack.params(np.float32))
    state = jax.jit(optimizer.init)(params)
    batch = jax.device_put(residual_stack.batch(rows=32), meshes.batch_sharding(mesh))
    for _ in range(3):
        params, state, differ = step(params, state, batch)
        assert {bool(d) for d in differ.values()} == {divisor == "local"}


def test_refuses_parameters_that_are_sharded(mesh):
    with pytest.raises(UserError, match="'w' is sharded over fsdp, but buckets need whole parameters"):
        fsdp.gradients(residual_stack.loss, Ddp(), mesh=mesh, specs={"w": P("fsdp")})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1; got 0"),
        ({"accumulate": "never"}, "got 'never'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype must be one of .*; got 'int8'"),
    ],
)
def test_refuses_what_it_does_not_know(fields, message):
    with pytest.raises(UserError, match=message):
        Ddp(**fields)
