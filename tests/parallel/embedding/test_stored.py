"""Mesh-free forms: bits move and nothing else. The placement oracle is spelled out in `embedding_cases`."""

import jax
import numpy as np
import pytest
from embedding_cases import numpy_stack, numpy_unstack, random_logical

from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding import stored
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, Sgd, TableConfig
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
    lowered = collections["8"]._to_stored.lower(collections["8"].abstract_state()["stacks"])
    for line in lowered.compile().as_text().splitlines():
        if " all-gather(" in line:
            shape = line.split("=")[1].split("[")[1].split("]")[0]
            assert np.prod([int(n) for n in shape.split(",")]) <= 8 * stored.GRANULE * 2, line


@pytest.mark.parametrize("name", ["8", "1", "3"])
def test_logical_form_is_the_table_itself(collections, name):
    each = collections[name]
    logical = random_logical(each)
    state = each.from_logical(logical)
    equal(state["stacks"], numpy_stack(each, logical)["stacks"])
    equal(each.to_logical(state), logical)
