"""Every kind of sharding gives what one device gives, to the bit, and NumPy in float64; and holds only its share.

Of kinds, copies, optimizers, weights and world sizes every value meets every other in some case; all have features of
pooling sum, mean and none, of one id, of several and of any number, empty bags and two features on one table.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest
from covering import covering
from embedding_cases import (
    OPTIMIZERS,
    batch,
    device_features,
    given_grads,
    numpy_lookup,
    numpy_stack,
    numpy_unstack,
    numpy_update,
    plan_of,
    random_logical,
    schema_of,
    steps,
    two_steps,
    wide_tables,
)

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import (
    Lamb,
    RowwiseAdagrad,
    Sgd,
    TableConfig,
)
from scalejax.parallel.embedding.plan.sharding_plan import KINDS, Exchange, ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding

BATCH = 16
ROOM = Exchange(capacity_factor=8.0)
WHOLE_ROWS = ("row_wise", "table_wise", "table_row_wise", "data_parallel")


def collection(tables, devices, plan=None, replica=1, **more):
    mesh = meshes.make_mesh(MeshShape(replica=replica), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan, **{"exchange": ROOM, **more})


def stepped(on, host, grads, logical=None, updates=2):
    return steps(on, device_features(on, host, BATCH), grads, updates, logical)


@functools.cache
def on_one_device(name, weighted, accumulate="ordered", updates=2):
    tables = wide_tables(OPTIMIZERS[name])
    host = batch(BATCH, weighted=weighted)
    on = collection(tables, 1, accumulate=accumulate)
    return stepped(on, host, given_grads(tables, host), updates=updates)


@functools.cache
def in_double_precision(name, weighted):
    """(what is looked up first, logical state after two steps, touched rows by table), NumPy float64."""
    tables, host = wide_tables(OPTIMIZERS[name]), batch(BATCH, weighted=weighted)
    grads = given_grads(tables, host)
    state = before = random_logical(collection(tables, 1))
    touched = {}
    for number in range(2):
        state, touched = numpy_update(tables, state, host, grads, updates=number)
    return numpy_lookup(tables, before, host), state, touched


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def agrees_with_double_precision(embedded, after, name, weighted):
    looked_up, state, touched = in_double_precision(name, weighted)
    assert set(embedded) == set(looked_up)
    for feature, value in looked_up.items():
        np.testing.assert_allclose(embedded[feature], value, rtol=1e-5, atol=1e-6)  # a few float32 numbers of size 0.3
    before = random_logical(collection(wide_tables(OPTIMIZERS[name]), 1))
    for table, leaves in after.items():
        for leaf, value in leaves.items():
            # two float32 steps; AdaGrad and Adam divide sums that nearly cancel by their own size
            np.testing.assert_allclose(value, state[table][leaf], rtol=2e-4, atol=5e-5, err_msg=f"{table} {leaf}")
            untouched = np.setdiff1d(np.arange(len(value)), [*touched[table]])
            np.testing.assert_array_equal(value[untouched], before[table][leaf][untouched])


PRODUCT = [
    case
    for case in itertools.product(KINDS, ("shard", "copy"), OPTIMIZERS, (False, True), (2, 4, 8))
    if case[0] in WHOLE_ROWS or not OPTIMIZERS[case[2]].uses_row_norms
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "replicas", "name", "weighted", "devices"), covering(PRODUCT))
def test_every_kind_equals_one_device_to_the_bit(kind, replicas, name, weighted, devices):
    tables = wide_tables(OPTIMIZERS[name])
    host = batch(BATCH, weighted=weighted)
    on = collection(tables, devices, plan_of(kind, tables, replicas), replica=2)
    embedded, after = stepped(on, host, given_grads(tables, host))
    expected, state = on_one_device(name, weighted)
    equal(embedded, expected)
    equal(after, state)
    agrees_with_double_precision(embedded, after, name, weighted)


TWO_LEVEL = Exchange(capacity_factor=8.0, route="two_level")


TWO_LEVEL_CASES = [
    (hosts, kind, name, weighted, accumulate)
    for hosts, kind, name, weighted, accumulate in itertools.product(
        (1, 2, 4, 8), KINDS, OPTIMIZERS, (True, False), ("ordered", "exact")
    )
    if kind in WHOLE_ROWS or not OPTIMIZERS[name].uses_row_norms
]
BY_DEFAULT = (4, "table_row_wise", "adam", True, "ordered")


@pytest.mark.default_cases("4-table_row_wise-adam-True-ordered")
@pytest.mark.parametrize(
    ("hosts", "kind", "name", "weighted", "accumulate"),
    # Optimizers meet the kinds on one level, above.
    dict.fromkeys([BY_DEFAULT, *covering(TWO_LEVEL_CASES, columns=[(0, 1), (0, 4), (1, 3), (1, 4)])]),
)
def test_two_levels_equal_one_device_to_the_bit(hosts, kind, name, weighted, accumulate):
    tables = wide_tables(OPTIMIZERS[name])
    host = batch(BATCH, weighted=weighted)
    plan = plan_of(kind, tables, "shard")
    on = collection(tables, 8, plan, replica=hosts, exchange=TWO_LEVEL, accumulate=accumulate)
    embedded, after = stepped(on, host, given_grads(tables, host), updates=3)
    expected, state = on_one_device(name, weighted, accumulate, updates=3)
    equal(embedded, expected)
    equal(after, state)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adagrad", "adam", "rowwise", "lamb"])
def test_a_plan_of_several_kinds_equals_one_device_to_the_bit(name):
    """Each kind is a program of its own here, where a compiler may divide in one and multiply in the other."""
    tables = wide_tables(OPTIMIZERS[name])
    host = batch(BATCH)
    kinds = ("table_wise", "table_row_wise", "row_wise", "data_parallel")
    if not OPTIMIZERS[name].uses_row_norms:
        kinds = ("table_wise", "grid", "row_wise", "column_wise")
    entries = [plan_of(kind, (table,)).tables for kind, table in zip(itertools.cycle(kinds), tables, strict=False)]
    on = collection(tables, 8, ShardingPlan(tables=tuple(itertools.chain.from_iterable(entries))), replica=2)
    embedded, after = stepped(on, host, given_grads(tables, host))
    expected, state = on_one_device(name, False)
    equal(embedded, expected)
    equal(after, state)


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_device_equals_numpy_in_double_precision(name, weighted):
    agrees_with_double_precision(*on_one_device(name, weighted), name, weighted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["column_wise", "grid"])
def test_one_statistic_a_slice_is_another_optimizer_and_says_so_in_its_shape(kind):
    tables = wide_tables(RowwiseAdagrad(learning_rate=0.1, statistic="slice"))
    host = batch(BATCH)
    grads = given_grads(tables, host)
    on = collection(tables, 8, plan_of(kind, tables), replica=2)
    logical = random_logical(on)
    assert logical["big"]["accumulator"].shape == (tables[1].rows, 2)
    _, after = stepped(on, host, grads, logical)
    expected = logical
    for _ in range(2):
        expected, _ = numpy_update(tables, expected, host, grads, np.float32)
    equal(after, expected)
    by_row = {t: {n: x.mean(axis=1) if n == "accumulator" else x for n, x in s.items()} for t, s in logical.items()}
    whole = wide_tables(RowwiseAdagrad(learning_rate=0.1))
    _, other = stepped(collection(whole, 8, plan_of(kind, whole), replica=2), host, grads, by_row)
    assert abs(other["shared"]["rows"] - after["shared"]["rows"]).max() > 1e-3


@pytest.mark.slow
def test_the_dense_sum_of_a_copied_table_agrees_to_rounding():
    tables, host = wide_tables(OPTIMIZERS["rowwise"]), batch(BATCH, weighted=True)
    plan = ShardingPlan(tables=tuple(TablePlan(table=t.name, kind="data_parallel", update="psum") for t in tables))
    embedded, after = stepped(collection(tables, 8, plan), host, given_grads(tables, host))
    expected, state = on_one_device("rowwise", True)
    equal(embedded, expected)
    for name, leaves in after.items():
        for leaf, value in leaves.items():
            # The same float32 numbers added in another order, then divided by their own size.
            np.testing.assert_allclose(value, state[name][leaf], rtol=1e-4, atol=1e-5)
    before = random_logical(collection(tables, 1))
    same = (state["big"]["rows"] == before["big"]["rows"]).all(axis=1)
    np.testing.assert_array_equal(after["big"]["rows"][same], before["big"]["rows"][same])


def test_features_of_fixed_lengths_on_one_table_are_summed_by_example():
    """Which eight devices can do as one does; feature after feature they would add in another order."""
    table = TableConfig(name="t", rows=5, dim=16, features=("a", "b"), optimizer=Sgd(learning_rate=0.1))
    rng, found = np.random.default_rng(0), []
    host = KeyedJagged.from_dense({"a": rng.integers(0, 5, BATCH), "b": rng.integers(0, 5, (BATCH, 3))})
    grads = {name: rng.normal(size=(BATCH, 16)).astype(np.float32) for name in ("a", "b")}
    for devices in (1, 8):
        on = collection((table,), devices)
        features = device_features(on, host, BATCH, schema=schema_of({"a": 1, "b": 3}, rows=5))
        found.append(two_steps(on, features, grads)[1])
    equal(*found)


def test_a_step_that_is_not_taken_writes_no_row_of_a_copied_table():
    tables, host = wide_tables(OPTIMIZERS["adagrad"]), batch(BATCH)
    plan = ShardingPlan(tables=tuple(TablePlan(table=t.name, kind="data_parallel", update="psum") for t in tables))
    on = collection(tables, 8, plan)
    features, grads, before = device_features(on, host, BATCH), given_grads(tables, host), random_logical(on)

    @jax.jit
    def step(state, features, grads, when):
        return on.update(state, on.lookup(state, features)[1], grads, when=when)

    for taken in (False, True):
        after = numpy_unstack(on, step(numpy_stack(on, before), features, grads, taken))
        same = jax.tree.leaves(jax.tree.map(np.array_equal, after, before))
        assert all(same) != taken


def _compiled(kind, devices=8, replicas="shard", replica=2, update="gather"):
    table = TableConfig(name="t", rows=8192, dim=64, features=("a", "b"))
    columns = 2 if kind in ("column_wise", "table_column_wise", "grid") else 1
    plan = ShardingPlan(tables=(TablePlan(table="t", kind=kind, columns=columns, update=update),), replicas=replicas)
    on = collection((table,), devices, plan, replica, exchange=Exchange())
    features = device_features(on, None, 512, schema=schema_of({"a": 1, "b": 3}, rows=8192))

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, {name: x + 1 for name, x in embedded.items()})

    compiled = jax.jit(step, donate_argnums=0).lower(on.abstract_state(), features).compile()
    return compiled, compiled.as_text()


# Devices that share the rows of the one table, and collectives of the step.
SHARES = {
    "row_wise": (8, {"all-to-all"}),
    "table_wise": (1, {"all-to-all"}),
    "column_wise": (2, {"all-to-all"}),
    "table_row_wise": (4, {"all-to-all"}),
    "table_column_wise": (2, {"all-to-all"}),
    "grid": (8, {"all-to-all"}),
    "data_parallel": (1, {"all-gather"}),
}


@pytest.mark.default_cases("grid")
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_holds_its_share_and_moves_data_by_the_collectives_of_its_kind(kind):
    compiled, text = _compiled(kind)
    parts, collectives = SHARES[kind]
    found = {c for c in ("all-to-all", "all-gather", "all-reduce", "reduce-scatter") if f" {c}(" in text}
    assert found == collectives
    table = 8192 * (64 * 4 + 4)  # rows and their statistic
    if kind in ("column_wise", "table_column_wise", "grid"):
        table = 8192 * (64 * 4 + 2 * 4)  # each slice has the statistic
    share = compiled.memory_analysis().argument_size_in_bytes
    assert table / parts <= share < 1.1 * table / parts + 2**15  # and the ids


@pytest.mark.default_cases("2-table_row_wise")
@pytest.mark.parametrize("kind", ["table_wise", "table_row_wise"])
@pytest.mark.parametrize("hosts", [2, 4])
def test_in_two_levels_vectors_cross_between_hosts_once_a_bag(hosts, kind):
    """Each hop is over one axis; over `replica` travel ids, pooled vectors and their gradients, padded to no more."""
    inside, per_device, length, dim, numbers = 8 // hosts, 64, 3, 64, 4
    tables = tuple(TableConfig(name=f"t{i}", rows=512, dim=dim, features=(f"f{i}",)) for i in range(8))
    ranks = {
        "table_wise": lambda i: (i,),
        "table_row_wise": lambda i: tuple(range(i // inside * inside, (i // inside + 1) * inside)),
    }[kind]
    plan = ShardingPlan(tables=tuple(TablePlan(table=f"t{i}", kind=kind, ranks=ranks(i)) for i in range(8)))
    on = collection(tables, 8, plan, hosts, exchange=Exchange(route="two_level"))
    on = dataclasses.replace(on, mesh=meshes.make_mesh(MeshShape(replica=hosts, fsdp=inside)))
    schema = schema_of({f"f{i}": length for i in range(8)}, rows=512)
    features = device_features(on, None, 8 * per_device, schema=schema)

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, {name: x + 1 for name, x in embedded.items()})

    compiled = jax.jit(step, donate_argnums=0).lower(on.abstract_state(), features).compile()
    found = explain_sharding(compiled, on.mesh)
    assert {c.kind for c in found} == {"all-to-all"}
    assert {c.axes for c in found} == {("replica",), ("fsdp",)}
    between = sorted(c.bytes // c.count for c in found if c.axes == ("replica",) for _ in range(c.count))
    planes = 2 if kind == "table_wise" else 3  # row and bag of an id, and where a host has several devices its device
    ids, vectors = per_device * 8 * length * planes * numbers, per_device * 8 * dim * numbers
    assert between == sorted([ids, vectors, vectors])


def test_two_dimensional_sharding_gathers_updates_over_the_copies_only():
    compiled, text = _compiled("row_wise", replicas="copy")
    assert " all-to-all(" in text
    assert " all-gather(" in text
    share = compiled.memory_analysis().argument_size_in_bytes
    table = 8192 * (64 * 4 + 4)
    assert table / 4 <= share < 1.1 * table / 4 + 2**15


def test_the_dense_sum_is_an_all_reduce():
    _, text = _compiled("data_parallel", update="psum")
    assert " all-reduce(" in text
    assert " all-gather(" not in text


@pytest.mark.slow
def test_many_tables_cost_as_many_collectives_as_one():
    def count(tables):
        on = collection(tables, 8, exchange=Exchange())
        lengths = {name: 1 for table in tables for name in table.features}
        features = device_features(on, None, 64, schema=schema_of(lengths, rows=100))

        def step(state, features):
            embedded, routing = on.lookup(state, features)
            return on.update(state, routing, embedded)

        text = jax.jit(step).lower(on.abstract_state(), features).compile().as_text()
        return text.count(" all-to-all(")

    def table(number):
        return TableConfig(name=f"t{number}", rows=100 + number, dim=8, features=(f"f{number}",))

    assert count(tuple(table(n) for n in range(40))) == count((table(0),)) == 3  # ids, rows, gradients


def test_a_table_wise_bag_travels_as_one_vector():
    def bytes_of(kind):
        table = TableConfig(name="t", rows=512, dim=64, features=("a",))
        plan = ShardingPlan(tables=(TablePlan(table="t", kind=kind),))
        on = collection((table,), 8, plan, exchange=Exchange(capacity_factor=8.0))
        features = device_features(on, None, 512, schema=schema_of({"a": 20}, rows=512))
        text = jax.jit(on.lookup).lower(on.abstract_state(), features).as_text()
        shapes = [line.rsplit("tensor<", 1)[1] for line in text.splitlines() if "all_to_all" in line]
        return sum(int(np.prod([int(n) for n in s.split("xf32")[0].split("x")])) for s in shapes if "xf32" in s)

    assert bytes_of("table_wise") == 8 * 64 * 64  # devices x bags of a device x width
    assert bytes_of("row_wise") == 20 * bytes_of("table_wise")  # every slot, with room for all of them anywhere


def test_plans_that_cannot_be_built_say_what_would_do():
    tables = wide_tables(RowwiseAdagrad())

    def refused(entry, match, optimizer=None, **more):
        own = tables if optimizer is None else wide_tables(optimizer)
        with pytest.raises(UserError, match=match):
            collection(own, 8, ShardingPlan(tables=(TablePlan(table="big", **entry),)), replica=2, **more)

    refused({"kind": "diagonal"}, "kind 'diagonal'; known kinds: row_wise, table_wise")
    refused(
        {"kind": "table_wise", "ranks": (8,)}, r"ranks \(8,\), but the mesh numbers its devices 0 to 7.*another mesh"
    )
    refused({"kind": "table_wise", "ranks": (1, 2)}, "needs 1 ranks on this mesh")
    refused({"kind": "column_wise", "columns": 3}, "32 wide, which 3 equal column slices do not divide")
    refused({"kind": "column_wise", "columns": 4}, "slices of 8 columns.*blocks of 16.*statistic='slice'")
    refused({"kind": "row_wise", "columns": 2}, "columns=2 and kind row_wise")
    refused({"kind": "table_row_wise", "ranks": (2, 3, 4, 5)}, "within one host, 4 devices")
    refused({"kind": "table_row_wise", "ranks": (0, 1)}, "needs 4 ranks")
    refused({"kind": "row_wise", "ranks": (1, 1)}, "names a device twice")
    refused({"kind": "data_parallel", "ranks": (0,)}, "leave ranks out")
    refused({"kind": "row_wise", "update": "psum"}, "only data_parallel tables have")
    refused({"kind": "column_wise", "columns": 2}, "Lamb needs norms of whole rows", Lamb())
    longest = RowwiseAdagrad(max_norm=1.0)
    refused({"kind": "grid", "columns": 2}, "RowwiseAdagrad with max_norm=1.0 needs norms of whole rows", longest)
    with pytest.raises(UserError, match="table 'big' is named twice"):
        twice = (TablePlan(table="big"), TablePlan(table="big"))
        collection(tables, 8, ShardingPlan(tables=twice))


@pytest.mark.slow
def test_given_ranks_are_taken():
    tables = wide_tables(Sgd())
    plan = ShardingPlan(
        tables=(
            TablePlan(table="big", kind="table_wise", ranks=(5,)),
            TablePlan(table="means", kind="row_wise", ranks=(6, 1, 3)),
            TablePlan(table="shared", kind="grid", columns=2, ranks=(4, 5, 6, 7, 0, 1, 2, 3)),
            TablePlan(table="tiny", kind="column_wise", columns=2, ranks=(7, 7)),
        )
    )
    on = collection(tables, 8, plan, replica=2)
    placed = {(m.config.name, m.start): m.ranks for stack in on.stacks for m in stack.members}
    assert placed == {
        ("big", 0): (5,),
        ("means", 0): (6, 1, 3),
        ("shared", 0): (4, 5, 6, 7),
        ("shared", 16): (0, 1, 2, 3),
        ("tiny", 0): (7,),
        ("tiny", 16): (7,),
    }
    host = batch(BATCH, weighted=True)
    embedded, after = stepped(on, host, given_grads(tables, host))
    expected, state = stepped(collection(tables, 1), host, given_grads(tables, host))
    equal(embedded, expected)
    equal(after, state)
