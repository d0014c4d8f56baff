"""Mesh-free forms: bits move and nothing else. The placement oracle is spelled out in `embedding_cases`."""

import jax
import numpy as np
import pytest
from embedding_cases import numpy_stack, numpy_unstack, plan_of, random_logical

from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Adam, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import KINDS
from scalejax.parallel.embedding.stored import logical as stored
from scalejax.parallel.mesh import MeshShape

TABLES = (
    TableConfig(name="few", rows=3, dim=2, features=("a",)),  # fewer rows than devices
    TableConfig(name="some", rows=1021, dim=2, features=("b",)),  # less than a granule
    TableConfig(name="many", rows=3079, dim=2, features=("c",), optimizer=RowwiseAdagrad()),  # divides by nothing
    TableConfig(name="even", rows=2048, dim=3, features=("d",), dtype="bfloat16", optimizer=Sgd()),  # no tail
)


def on(devices, **shape):
    return EmbeddingCollection(tables=TABLES, mesh=meshes.make_mesh(MeshShape(**shape), jax.devices()[:devices]))


def equal(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


@pytest.fixture(scope="module")
def collections():
    return {"8": on(8), "1": on(1), "2x4": on(8, replica=2, tensor=4), "3": on(3)}


@pytest.mark.slow
def test_a_state_moves_from_8_devices_to_1_to_2x4_bit_for_bit(collections):
    logical = random_logical(collections["8"])
    for leaves in logical.values():
        leaves["rows"][0] = -0.0  # a sum over devices would lose the sign
    state = numpy_stack(collections["8"], logical)
    for name in ("1", "2x4"):
        before, after = collections["8" if name == "1" else "1"], collections[name]
        tree = before.to_stored(state)
        abstract = after.abstract_stored()
        # What a checkpoint does: the same arrays, placed as the new mesh wants them.
        placed = jax.tree.map(lambda array, leaf: jax.device_put(np.asarray(array), leaf.sharding), tree, abstract)
        assert jax.tree.map(lambda a: (a.shape, a.dtype), tree) == jax.tree.map(lambda a: (a.shape, a.dtype), abstract)
        state = after.from_stored(placed)
        equal(numpy_unstack(after, state), logical)
    assert np.signbit(numpy_unstack(collections["2x4"], state)["many"]["rows"][0]).all()


def test_bodies_are_sharded_where_devices_divide_a_granule_and_tails_are_whole(collections):
    abstract = collections["8"].abstract_stored()
    assert {name: leaf.shape for name, leaf in abstract["many"].items()} == {
        "rows_body": (3072, 2),
        "rows_tail": (7, 2),
        "accumulator_body": (3072,),
        "accumulator_tail": (7,),
    }
    assert [*abstract["even"]] == ["rows_body"]
    assert [*abstract["few"]] == ["rows_tail", "accumulator_tail"]
    assert abstract["many"]["rows_body"].sharding.shard_shape((3072, 2)) == (384, 2)
    tree = collections["8"].to_stored(numpy_stack(collections["8"], random_logical(collections["8"])))
    assert tree["many"]["rows_body"].sharding.shard_shape((3072, 2)) == (384, 2)


def test_the_body_moves_without_gathering_the_table(collections):
    lowered = (
        collections["8"]
        .stored.tables_to_stored(collections["8"].tables)
        .lower(collections["8"].abstract_state()["stacks"])
    )
    for line in lowered.compile().as_text().splitlines():
        if " all-gather(" in line:
            shape = line.split("=")[1].split("[")[1].split("]")[0]
            assert np.prod([int(n) for n in shape.split(",")]) <= 8 * stored.GRANULE * 2, line


@pytest.mark.default_cases("8")
@pytest.mark.parametrize("name", ["8", "1", "3"])
def test_logical_form_is_the_table_itself(collections, name):
    each = collections[name]
    logical = random_logical(each)
    state = each.from_logical(logical)
    equal(state["stacks"], numpy_stack(each, logical)["stacks"])
    equal(each.to_logical(state), logical)


PLANNED = (
    TableConfig(name="few", rows=3, dim=32, features=("a",)),
    TableConfig(name="some", rows=1021, dim=32, features=("b",), optimizer=Adam()),
    TableConfig(name="many", rows=3079, dim=32, features=("c",)),
    TableConfig(name="even", rows=2048, dim=32, features=("d",), dtype="bfloat16", optimizer=Sgd()),
)


def planned(devices, kind, replicas, replica):
    mesh = meshes.make_mesh(MeshShape(replica=replica), jax.devices()[:devices])
    return EmbeddingCollection(tables=PLANNED, mesh=mesh, plan=plan_of(kind, PLANNED, replicas))


@pytest.mark.slow
def test_a_state_moves_from_plan_to_plan_bit_for_bit():
    stops = [(8, kind, "copy" if number % 2 else "shard", 2) for number, kind in enumerate(KINDS)]
    stops += [(1, "row_wise", "shard", 1), (4, "grid", "copy", 2), (3, "table_wise", "shard", 1)]
    each = planned(*stops[0])
    logical = random_logical(each)
    state = numpy_stack(each, logical, updates=7)
    for stop in stops[1:]:
        tree, each = each.to_stored(state), planned(*stop)
        placed = jax.tree.map(
            lambda array, leaf: jax.device_put(np.asarray(array), leaf.sharding), tree, each.abstract_stored()
        )
        state = each.from_stored(placed)
        equal(numpy_unstack(each, state), logical)
        assert int(state["updates"]) == 7
        for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(each.abstract_state()), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)


# By default those that cut rows, columns, both, and nothing.
FRESH = ("table_row_wise", "column_wise", "grid", "data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FRESH)
def test_fresh_rows_are_the_same_under_every_plan(kind):
    one = planned(1, "row_wise", "shard", 1)
    expected = numpy_unstack(one, one.init(jax.random.key(3)))
    each = planned(8, kind, "copy" if kind == "grid" else "shard", 2)
    equal(numpy_unstack(each, each.init(jax.random.key(3))), expected)


@pytest.mark.slow
def test_counts_of_faults_go_along():
    each = planned(8, "row_wise", "shard", 2)
    state = numpy_stack(each, random_logical(each))
    state["faults"] = jax.device_put(np.arange(16, dtype=np.int32).reshape(8, 2), state["faults"].sharding)
    again = each.from_stored(each.to_stored(state))
    assert np.asarray(each.faults(again)).tolist() == [56, 64]
