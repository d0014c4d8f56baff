"""Which ways of sharding are offered."""

import dataclasses

import pytest

from scalejax.errors import UserError
from scalejax.parallel.embedding.config import RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.planner import HostTopology, Reuse, TableConstraints, TableStatistics
from scalejax.parallel.planner.estimators import work
from scalejax.parallel.planner.options import check_constraints, divisors, options


def machine(devices=16, in_host=4):
    return HostTopology(
        devices=devices,
        devices_per_host=in_host,
        memory_bytes=2**34,
        memory_bandwidth=1e12,
        intra_host_bandwidth=1e11,
        inter_host_bandwidth=1e10,
    )


def offered(dim=128, topology=None, optimizer=RowwiseAdagrad(), accumulate="ordered", **limits):  # noqa: B008 (frozen)
    table = TableConfig(name="t", rows=100, dim=dim, features=("f",), optimizer=optimizer)
    found = TableStatistics(table="t", pooling_factors=(1.0,), popularity=Reuse(factor=1.0))
    constraint = TableConstraints(table="t", **limits) if limits else None
    return {
        (o.kind, o.columns, o.row_parts)
        for o in options(work(table, found, 64), topology or machine(), constraint, accumulate=accumulate)
    }


def test_every_kind_is_offered_with_every_slice_of_at_least_32():
    assert offered() == {
        ("table_wise", 1, 1),
        ("row_wise", 1, 16),
        ("data_parallel", 1, 1),
        ("table_row_wise", 1, 4),
        ("column_wise", 2, 1),
        ("column_wise", 4, 1),
        ("table_column_wise", 2, 1),
        ("table_column_wise", 4, 1),
        ("grid", 2, 4),
        ("grid", 4, 4),
    }


def test_slices_divide_the_width_and_fit_the_machine():
    assert {c for kind, c, _ in offered(dim=192) if kind == "column_wise"} == {2, 3, 4, 6}
    assert {c for kind, c, _ in offered(dim=192) if kind == "table_column_wise"} == {2, 3, 4}
    assert {c for kind, c, _ in offered(dim=192) if kind == "grid"} == {2, 3, 4}
    assert {c for _, c, _ in offered(dim=33)} == {1}
    # Slices of 24, 12 and 8 are no multiples of the 16 columns that the mean square of a row is formed of.
    assert {c for kind, c, _ in offered(dim=48, min_slice_width=8) if kind == "column_wise"} == {3}
    assert {c for kind, c, _ in offered(dim=48, optimizer=Sgd(), min_slice_width=8) if kind == "column_wise"} == {
        2,
        3,
        4,
        6,
    }
    assert {
        c
        for kind, c, _ in offered(dim=48, optimizer=Sgd(), accumulate="exact", min_slice_width=8)
        if kind == "column_wise"
    } == {3}
    assert {c for _, c, _ in offered(optimizer=Sgd(max_norm=1.0))} == {1}  # norms of whole rows


def test_one_host_has_no_kinds_of_its_own():
    assert {kind for kind, _, _ in offered(topology=machine(4, 4))} == {
        "table_wise",
        "row_wise",
        "data_parallel",
        "column_wise",
    }


def test_a_host_is_what_shares_an_index_of_the_meshs_replica_axis():
    one_replica = dataclasses.replace(machine(), devices_per_group=16)
    assert {kind for kind, _, _ in offered(topology=one_replica)} == {
        "table_wise",
        "row_wise",
        "data_parallel",
        "column_wise",
    }
    two_replicas = dataclasses.replace(machine(), devices_per_group=8)
    assert ("table_row_wise", 1, 8) in offered(topology=two_replicas)


def test_a_choice_that_the_engine_refuses_says_why():
    with pytest.raises(
        UserError, match=r"As column_wise the table is cut into columns, but Sgd with max_norm=1.0 needs"
    ):
        offered(optimizer=Sgd(max_norm=1.0), kinds=("column_wise",))


def test_constraints_narrow_the_choice():
    assert offered(kinds=("row_wise", "table_wise")) == {("row_wise", 1, 16), ("table_wise", 1, 1)}
    assert offered(columns=(4,)) == {("column_wise", 4, 1), ("table_column_wise", 4, 1), ("grid", 4, 4)}
    assert offered(max_devices=3) == {
        ("table_wise", 1, 1),
        ("row_wise", 1, 3),
        ("column_wise", 2, 1),
        ("table_column_wise", 2, 1),
    }


def test_a_choice_of_nothing_is_refused_with_what_would_be_possible():
    with pytest.raises(UserError, match=r"table 't' .width 32. cannot be sharded.*possible: table_wise, row_wise"):
        offered(dim=32, kinds=("column_wise",))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"kinds": ("diagonal",)}, "got 'diagonal'"),
        ({"min_slice_width": 0}, "min_slice_width must be at least 1"),
        ({"max_devices": 0}, "max_devices must be at least 1"),
        ({"columns": (0,)}, "columns must be at least 1"),
    ],
)
def test_bad_constraints_are_refused(limits, said):
    with pytest.raises(UserError, match=said):
        TableConstraints(table="t", **limits)


def test_constraints_must_suit_the_tables():
    tables = (TableConfig(name="t", rows=100, dim=12, features=("f",)),)
    with pytest.raises(UserError, match="no table 'u'; the tables are t"):
        check_constraints(tables, (TableConstraints(table="u"),))
    with pytest.raises(UserError, match="'t' is named twice"):
        check_constraints(tables, (TableConstraints(table="t"), TableConstraints(table="t")))
    with pytest.raises(UserError, match=r"must divide its width of 12; got 5\. Divisors: 1, 2, 3, 4, 6, 12"):
        check_constraints(tables, (TableConstraints(table="t", columns=(5,)),))


def test_divisors():
    assert divisors(36) == [d for d in range(1, 37) if 36 % d == 0]
