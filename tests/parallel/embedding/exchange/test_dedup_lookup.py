"""Deduplicated lookups: the same vectors to the bit, fewer bytes, and updates that differ by reassociation at most."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from embedding_cases import (
    SCHEMA,
    batch,
    device_features,
    given_grads,
    numpy_update,
    placed,
    plan_of,
    random_logical,
    schema_of,
    two_steps,
    wide_tables,
)

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

SIZE = 64
GROUPS = (
    DedupGroup(features=("bag", "mean_bag"), rows_per_example=0.75),
    DedupGroup(features=("sequence", "history"), rows_per_example=0.5),
)


def collection(tables, devices, kind="row_wise", **more):
    mesh = meshes.make_mesh(MeshShape(replica=2 if devices > 1 else 1), jax.devices()[:devices])
    room = Exchange(capacity_factor=8.0)
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan_of(kind, tables), **{"exchange": room, **more})


def repetitive(weighted, seed=0):
    """A batch whose examples repeat those before them: half of them distinct."""
    whole = batch(SIZE, weighted=weighted, seed=seed)
    return whole.take(np.repeat(np.arange(SIZE // 2), 2))


def deduplicated(on, host, groups=GROUPS):
    layout = on.layout(SCHEMA, SIZE, groups)
    packed = on.pack_deduplicated(deduplicate(host, tuple(g.features for g in groups)), on.mesh.size, layout, groups)
    assert packed is not None
    return placed(on, packed)


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


@functools.cache
def plainly(accumulate, weighted):
    tables, host = wide_tables(RowwiseAdagrad(learning_rate=0.1)), repetitive(weighted)
    on = collection(tables, 1, accumulate=accumulate)
    return two_steps(on, device_features(on, host, SIZE), given_grads(tables, host))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "kind", "weighted"),
    [
        (8, "row_wise", False),
        (8, "table_wise", True),
    ],
)
def test_forward_is_equal_to_the_bit_and_updates_to_reassociation(devices, kind, weighted):
    tables, host = wide_tables(RowwiseAdagrad(learning_rate=0.1)), repetitive(weighted)
    grads, on = given_grads(tables, host), collection(tables, devices, kind)
    embedded, after = two_steps(on, deduplicated(on, host), grads)
    expected, _ = plainly("ordered", weighted)
    equal(embedded, expected)
    wide = random_logical(on)
    for _ in range(2):
        wide, touched = numpy_update(tables, wide, host, grads)
    before = random_logical(on)
    for table in tables:
        for leaf, value in after[table.name].items():
            np.testing.assert_allclose(value, wide[table.name][leaf], rtol=2e-4, atol=5e-5, err_msg=table.name)
            untouched = np.setdiff1d(np.arange(table.rows), [*touched[table.name]])
            np.testing.assert_array_equal(value[untouched], before[table.name][leaf][untouched])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "kind", "weighted"),
    [
        (8, "row_wise", True),
        (4, "grid", False),
    ],
)
def test_training_is_equal_to_the_bit_where_sums_are_exact(devices, kind, weighted):
    tables, host = wide_tables(RowwiseAdagrad(learning_rate=0.1)), repetitive(weighted)
    grads, on = given_grads(tables, host), collection(tables, devices, kind, accumulate="exact")
    embedded, after = two_steps(on, deduplicated(on, host), grads)
    expected, state = plainly("exact", weighted)
    equal(embedded, expected)
    equal(after, state)


@pytest.mark.slow
def test_gradients_that_add_without_rounding_give_equal_bits():
    tables, host = wide_tables(Sgd(learning_rate=0.5)), repetitive(False)
    host = dataclasses.replace(host, values=host.values % 3)  # many duplicates
    tables = tuple(dataclasses.replace(t, pooling="sum") if t.pooling == "mean" else t for t in tables)
    grads = {n: np.rint(g * 4).astype(np.float32) for n, g in given_grads(tables, host).items()}
    on = collection(tables, 8)
    _, plain = two_steps(on, device_features(on, host, SIZE), grads)
    _, dedup = two_steps(on, deduplicated(on, host), grads)
    equal(dedup, plain)


@pytest.mark.slow
def test_weights_and_momenta_of_rows_that_nobody_named_stay():
    # Room for distinct rows that a batch does not need must not look row 0 up.
    tables = wide_tables(Sgd(learning_rate=0.1, weight_decay=0.5))
    host = repetitive(False)
    host = dataclasses.replace(host, values=np.maximum(host.values, 1))
    on = collection(tables, 8)
    before = random_logical(on)
    _, after = two_steps(on, deduplicated(on, host), given_grads(tables, host))
    for table in tables:
        np.testing.assert_array_equal(after[table.name]["rows"][0], before[table.name]["rows"][0])


def test_more_distinct_rows_than_room_is_no_error_and_drops_nothing():
    tables = wide_tables(Sgd())
    on, host = collection(tables, 8), batch(SIZE)
    tight = (DedupGroup(features=("bag",), rows_per_example=0.25),)
    features = deduplicate(host, (("bag",),))
    assert on.pack_deduplicated(features, 8, on.layout(SCHEMA, SIZE, tight), tight) is None


@pytest.mark.default_cases("4", "8")
@pytest.mark.parametrize("factor", [1, 2, 4, 8])
def test_bytes_on_the_wire_fall_by_the_factor(factor):
    def sent(groups):
        table = TableConfig(name="t", rows=4096, dim=16, features=("a",))
        mesh = meshes.make_mesh(MeshShape(), jax.devices()[:8])
        on = EmbeddingCollection(tables=(table,), mesh=mesh, exchange=Exchange(capacity_factor=1.0))
        schema, size = schema_of({"a": 32}, rows=4096), 512
        layout = on.layout(schema, size, groups)
        ids = np.repeat(np.arange(64 * 32 // factor).reshape(-1, 32), factor, axis=0)  # 64 examples of a device
        host = KeyedJagged(("a",), np.tile(ids, (8, 1)).reshape(-1), np.full((1, size), 32, np.int32))
        if groups:
            packed = on.pack_deduplicated(deduplicate(host, (("a",),)), 8, layout, groups)
        else:
            packed = on.pack(host, 8, layout)
        text = jax.jit(on.lookup).lower(on.abstract_state(), placed(on, packed)).as_text()
        moved = re.findall(r'all_to_all".*-> tensor<([0-9x]+)x(?:f32|i32)>', text)
        assert len(moved) == 2
        return sum(int(np.prod([int(n) for n in shape.split("x")])) for shape in moved)

    ratio = sent(()) / sent((DedupGroup(features=("a",), rows_per_example=1 / factor),))
    assert ratio == pytest.approx((256 + 8) / (256 / factor + 8))  # 8 slots of slack for each of 8 devices


def test_groups_that_cannot_be_are_refused():
    on = collection(wide_tables(Sgd()), 1)
    with pytest.raises(UserError, match="no table looks 'absent' up"):
        on.layout(SCHEMA, SIZE, (DedupGroup(features=("absent",), rows_per_example=0.5),))
    with pytest.raises(UserError, match="'bag' is in two groups"):
        one = DedupGroup(features=("bag",), rows_per_example=0.5)
        on.layout(SCHEMA, SIZE, (one, one))
    with pytest.raises(ValueError, match=r"rows_per_example must lie in \(0, 1\]; got 2"):
        DedupGroup(features=("bag",), rows_per_example=2)
    with pytest.raises(UserError, match="deduplicated in the groups"):
        layout = on.layout(SCHEMA, SIZE, GROUPS)
        on.pack_deduplicated(deduplicate(batch(SIZE), (("bag",),)), 1, layout, GROUPS)
