"""What is refused on the host, and what the device does with it all the same."""

import dataclasses

import jax
import numpy as np
import pytest
from embedding_cases import (
    BIG_ROWS,
    SCHEMA,
    batch,
    device_features,
    numpy_stack,
    numpy_unstack,
    random_logical,
    tables_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.examples.jagged import KeyedJagged as HostKeyedJagged
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding import packing
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.exchange.routed import bucket_capacity
from scalejax.parallel.embedding.ids.occurrences import lookups
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape

SIZE = 64
ONE = TableConfig(name="t", rows=BIG_ROWS, dim=2, features=("fixed",), optimizer=Sgd(learning_rate=1.0))


def on(tables, factor=2.0, devices=8):
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, exchange=Exchange(capacity_factor=factor))


def ids_of(values):
    values = np.asarray(values)
    return HostKeyedJagged(("fixed",), values, np.full((1, SIZE), 2, np.int32))


@pytest.mark.parametrize(("bad", "shown"), [(-1, "id -1"), (BIG_ROWS, f"id {BIG_ROWS}"), (2**40, f"id {2**40}")])
def test_ids_out_of_range_name_feature_value_and_range(bad, shown):
    values = np.zeros(2 * SIZE, np.int64)
    values[7] = bad
    each = on((ONE,), devices=1)
    with pytest.raises(UserError, match=rf"'fixed': {shown} in example 3 .*\[0, {BIG_ROWS}\).*1 of 128"):
        each.pack(ids_of(values), 1, each.layout(SCHEMA, SIZE))


def test_a_full_bucket_names_the_feature_and_the_factor_that_would_do():
    each = on((ONE,))
    layout = each.layout(SCHEMA, SIZE)
    hot = ids_of(np.full(2 * SIZE, 5))
    with pytest.raises(UserError, match=r"16 ids for one other device.*room for 12.*'fixed'.*capacity_factor=3.6 or"):
        each.pack(hot, 8, layout)
    on((ONE,), factor=3.6).pack(hot, 8, layout)


def test_weights_must_be_finite():
    host = batch(SIZE, weighted=True)
    host.weights[3] = np.nan
    each = on(tables_of(Sgd()))
    bag, example = next(
        (SCHEMA.keys[f], e)
        for f in range(5)
        for e in range(SIZE)
        if host.lengths.reshape(-1)[: f * SIZE + e + 1].sum() > 3
    )
    with pytest.raises(
        UserError, match=rf"'{bag}': an id in example {example} .* weight nan.*\(1 of .*Clean the column"
    ):
        each.pack(host, 8, each.layout(SCHEMA, SIZE))


@pytest.mark.parametrize("values", [np.full(2 * SIZE, 2**40 + 3), np.full(2 * SIZE, 2**63 + 11, np.uint64)])
def test_hashes_of_64_bits_are_refused_with_the_ways_out(values):
    each = on((ONE,), devices=1)
    with pytest.raises(UserError, match=rf"'fixed': id {values[0]} .*64-bit hashes.*Hashed and Counted.*id_map"):
        each.pack(ids_of(values), 1, each.layout(SCHEMA, SIZE))


def test_ids_and_lengths_that_are_no_counts_are_refused():
    each = on((ONE,), devices=1)
    layout = each.layout(SCHEMA, SIZE)
    with pytest.raises(UserError, match=r"values of a batch are float64; wanted integers.*Convert the column"):
        each.pack(ids_of(np.full(2 * SIZE, 1.5)), 1, layout)  # would become 1 on its way
    with pytest.raises(UserError, match=r"values of a batch are float64"):
        each.pack(ids_of(np.full(2 * SIZE, np.nan)), 1, layout)  # is neither below 0 nor above anything
    host = batch(SIZE)
    host.lengths[1, 5:7] = -1, host.lengths[1, 5] + host.lengths[1, 6] + 1  # add up all the same
    each = on(tables_of(Sgd()))
    with pytest.raises(UserError, match=r"'bag' has -1 ids in example 5 .*must not be negative.*offsets"):
        each.pack(host, 8, each.layout(SCHEMA, SIZE))
    with pytest.raises(ValueError, match=r"keys must be unique; a appear more than once. Rename"):
        HostKeyedJagged(("a", "a"), np.zeros(2, np.int64), np.ones((2, 1), np.int32))


def test_features_of_another_name_are_refused_wherever_they_meet():
    each = on(tables_of(Sgd()), devices=1)
    lacking = dataclasses.replace(SCHEMA, categorical=SCHEMA.categorical[1:])
    with pytest.raises(
        UserError, match=r"table 'shared' looks up the feature 'one'.*does not have; it has bag, fixed.*Rename"
    ):
        each.layout(lacking, SIZE)
    features = device_features(each, batch(SIZE), SIZE)
    embedded, routing = jax.eval_shape(each.lookup, each.abstract_state(), features)
    renamed = {("other" if name == "one" else name): x for name, x in embedded.items()}
    with pytest.raises(ValueError, match=r"grads must have the features.*missing: \['one'\], unknown: \['other'\]"):
        each.update(each.abstract_state(), routing, renamed)
    narrow = embedded | {"sequence": embedded["one"]}
    with pytest.raises(ValueError, match=r"gradient of feature 'sequence' .* \(64, 3, 3\); got \(64, 4\)"):
        each.update(each.abstract_state(), routing, narrow)


def test_more_rows_than_a_device_can_number_are_refused_naming_the_tables():
    tables = tuple(TableConfig(name=n, rows=2**30 + 2**29, dim=2, features=(n,)) for n in ("a", "b"))
    on(tables, devices=8)
    with pytest.raises(
        UserError, match=r"tables a, b together have 3,221,225,472 rows on one device; at most .*more devices"
    ):
        on(tables, devices=1)


def test_a_state_of_other_tables_is_refused():
    each = on(tables_of(RowwiseAdagrad()), devices=1)
    logical = random_logical(each)
    with pytest.raises(
        UserError, match=r"tables must be shared.*missing: \['big'\], unknown: \['bigger'\].*Name the tables"
    ):
        each.from_logical({("bigger" if name == "big" else name): leaves for name, leaves in logical.items()})
    with pytest.raises(UserError, match=r"arrays of table 'big' must be rows, accumulator; missing: \['accumulator'\]"):
        each.from_logical(logical | {"big": {"rows": logical["big"]["rows"]}})
    short = {"rows": logical["big"]["rows"][:-1], "accumulator": logical["big"]["accumulator"]}
    with pytest.raises(UserError, match=r"rows of table 'big' must have the shape \(1030, 4\); got \(1029, 4\)"):
        each.from_logical(logical | {"big": short})


def test_pack_refuses_what_does_not_fit():
    each = on(tables_of(Sgd()))
    layout = each.layout(SCHEMA, SIZE)
    host = batch(SIZE)
    with pytest.raises(UserError, match="no feature 'one'"):
        packing.arrange(dataclasses.replace(host, keys=("other", *host.keys[1:])), layout, 8)
    with pytest.raises(UserError, match=r"lengths of a batch sum to \d+, but it has \d+ ids. Pass one length per"):
        packing.arrange(dataclasses.replace(host, values=host.values[:-1]), layout, 8)
    with pytest.raises(UserError, match="does not divide over 7 devices"):
        packing.arrange(host, layout, 7)
    lengths = host.lengths.copy()
    lengths[0, 2], lengths[0, 3] = 2, 0
    with pytest.raises(UserError, match="'one' must have 1 ids in every example; example 2 of the batch has 2"):
        packing.arrange(dataclasses.replace(host, lengths=lengths), layout, 8)
    small = tuple(dataclasses.replace(f, capacity=3) if f.name == "bag" else f for f in layout)
    with pytest.raises(UserError, match=r"'bag' has .* ids in the 8 examples of one device, but room for 3"):
        packing.arrange(host, small, 8)


@pytest.mark.default_cases("8")
@pytest.mark.parametrize("devices", [1, 8])
def test_the_device_counts_bad_ids_and_neither_reads_nor_updates_a_row(devices):
    each = on((ONE,), devices=devices)
    good, bad = ids_of(np.full(2 * SIZE, 9)), np.zeros((devices, 2 * SIZE // devices), np.int32)
    bad[0, :2] = -1, BIG_ROWS
    bad[-1, -1] = 9
    bad[:] = np.where(bad == 0, 7, bad)
    features = device_features(on((ONE,), 8.0, devices), good, SIZE, schema=_schema())
    features = dataclasses.replace(features, values=jax.device_put(bad, meshes.everywhere(each.mesh)))
    logical = random_logical(each)
    state, embedded = _step(on((ONE,), 8.0, devices), numpy_stack(each, logical), features)
    np.testing.assert_array_equal(np.asarray(each.faults(state)), [2, 0])
    np.testing.assert_array_equal(embedded[0], 0)
    after = numpy_unstack(each, state)["t"]["rows"]
    changed = np.flatnonzero((after != logical["t"]["rows"]).any(axis=1))
    np.testing.assert_array_equal(changed, [7, 9])
    with pytest.raises(UserError, match="2 ids out of range and 0 ids for which"):
        each.check_faults(np.asarray(each.faults(state)))


def test_the_device_counts_overflow_ids():
    each = on((ONE,))
    features = device_features(on((ONE,), 8.0), ids_of(np.full(2 * SIZE, 9)), SIZE, schema=_schema())
    logical = random_logical(each)
    state, embedded = _step(each, numpy_stack(each, logical), features)
    # 16 ids a device for one destination with room for 12: 4 are lost on each of 8 devices
    np.testing.assert_array_equal(np.asarray(each.faults(state)), [0, 32])
    assert (np.asarray(embedded) == 0).all(axis=1).sum() == 2 * 8
    moved = logical["t"]["rows"][9] - numpy_unstack(each, state)["t"]["rows"][9]
    np.testing.assert_allclose(moved, 8 * 12, rtol=1e-6)


def _schema():
    return dataclasses.replace(SCHEMA, categorical=(SCHEMA["fixed"],))


def _step(each, state, features):
    @jax.jit
    def step(state, features):
        embedded, routing = each.lookup(state, features)
        ones = jax.tree.map(lambda x: x * 0 + 1, embedded)
        return each.update(state, routing, ones), embedded["fixed"]

    return step(state, features)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_room_is_refused_exactly_where_a_literal_count_exceeds_it(data):
    tables = (
        TableConfig(name="a", rows=11, dim=2, features=("x",)),
        TableConfig(name="b", rows=300, dim=2, features=("y",)),
    )
    each = on(tables, factor=data.draw(st.sampled_from([1.0, 1.5, 3.0])))
    from embedding_cases import schema_of

    schema = schema_of({"x": 1, "y": 2}, rows=11)
    layout = each.layout(schema, 128)
    spread = data.draw(st.integers(1, 11))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    x, y = rng.integers(0, spread, 128), rng.integers(0, spread, 256)
    host = HostKeyedJagged(
        ("x", "y"), np.concatenate([x, y]), np.stack([np.ones(128), np.full(128, 2)]).astype(np.int32)
    )
    most = 0
    for shard in range(8):
        counts = np.zeros(8, int)
        for example in range(16 * shard, 16 * (shard + 1)):
            counts[x[example] % 8] += 1
            for position in range(2):
                counts[(y[2 * example + position] + 1) % 8] += 1
        most = max(most, counts.max())
    (stack,) = each.stacks
    fits = most <= bucket_capacity(stack, lookups(stack, layout), each.exchange)
    if fits:
        each.pack(host, 8, layout)
    else:
        with pytest.raises(UserError, match="capacity_factor="):
            each.pack(host, 8, layout)
