"""Features put into towers: planted groups are found again, sizes are within bounds, each step is the best there is."""

import itertools

import numpy as np
import pytest
import scipy.optimize
from sklearn.metrics import adjusted_rand_score

from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.plan import towers
from scalejax.plan.towers import Partitioner


def planted(seed, sizes=(5, 4, 4, 5), examples=256, width=8, noise=0.5):
    """Rows [B, F, N] that are, within a group, one vector an example and noise; the groups, shuffled."""
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    own = rng.normal(size=(examples, len(sizes), width))
    return own[:, truth] + noise * rng.normal(size=(examples, len(truth), width)), truth


def found(rows, costs=None, **options):
    count = rows.shape[1]
    names = [f"f{i}" for i in range(count)]
    given = np.ones(count) if costs is None else costs
    return Partitioner(**{"towers": 4, **options}).partition(names, towers.interactions([rows]), given)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_planted_groups_are_the_coherent_towers(seed):
    rows, truth = planted(seed)
    result = found(rows, seed=seed)
    assert adjusted_rand_score(truth, result.labels) == 1
    assert sorted(np.bincount(result.labels)) == [4, 4, 5, 5]


@pytest.mark.parametrize("seed", range(3))
def test_planted_groups_are_spread_over_the_diverse_towers(seed):
    rows, truth = planted(seed, sizes=(4, 4, 4, 4))
    result = found(rows, seed=seed, distance="diverse")
    assert max(np.bincount(4 * result.labels + truth)) <= 2
    assert result.within(result.labels) < np.mean([result.within(labels) for labels in result.random])


def test_interactions_are_literal_means_of_cosines_over_all_batches():
    rows, _ = planted(0, sizes=(2, 3), examples=6)
    rows[1, 2] = 0  # interacts with none
    wanted = np.zeros((5, 5))
    for i, j in itertools.product(range(5), repeat=2):
        for x in rows:
            lengths = np.linalg.norm(x[i]) * np.linalg.norm(x[j])
            wanted[i, j] += x[i] @ x[j] / lengths / 6 if lengths else 0
    np.testing.assert_allclose(towers.interactions([rows[:4], rows[4:]]), np.abs(wanted), rtol=1e-12)


def test_points_have_the_distances_of_a_plane_where_there_is_one():
    x = np.random.default_rng(0).uniform(size=(9, 2))
    wanted = np.linalg.norm(x[:, None] - x, axis=2)
    points = towers.plane(wanted, 0)
    got = np.linalg.norm(points[:, None] - points, axis=2)
    np.testing.assert_allclose(got, wanted, atol=1e-3)  # of Adam at a rate of 0.03


def test_points_are_as_near_to_interactions_as_another_minimiser_finds():
    rows, _ = planted(1)
    wanted = 1 - towers.interactions([rows])
    above = np.triu_indices(len(wanted), 1)

    def stress(x):
        x = np.reshape(x, (-1, 2))
        return np.square((np.linalg.norm(x[:, None] - x, axis=2) - wanted)[above]).sum()

    rng = np.random.default_rng(0)
    others = [scipy.optimize.minimize(stress, rng.normal(size=2 * len(wanted))).fun for _ in range(3)]
    assert stress(towers.plane(wanted, 0)) <= 1.01 * min(others)


def every_assignment(points, count):
    return np.array(list(itertools.product(range(count), repeat=points)))


@pytest.mark.parametrize(("low", "high"), [(2, 3), (1, 4), (2, 2)])
def test_an_assignment_by_count_is_the_cheapest_of_all(low, high):
    points = 6 if (low, high) == (2, 2) else 7
    cost = np.random.default_rng(low + high).uniform(size=(points, 3))
    every = every_assignment(points, 3)
    sizes = np.stack([(every == t).sum(1) for t in range(3)], axis=1)
    allowed = every[((sizes >= low) & (sizes <= high)).all(1)]
    best = cost[np.arange(points), allowed].sum(1).min()
    labels = towers._by_count(low, high)(cost)
    assert any((labels == row).all() for row in allowed)
    assert cost[np.arange(points), labels].sum() == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("ratio", [1.0, 1.5])
def test_an_assignment_by_cost_is_the_cheapest_that_no_tower_pays_too_much_for(ratio):
    rng = np.random.default_rng(0)
    cost, priced = rng.uniform(size=(7, 3)), rng.uniform(1, 4, size=7)
    every = every_assignment(7, 3)
    paid = np.stack([((every == t) * priced).sum(1) for t in range(3)], axis=1)
    busy = np.zeros(3)
    for one in sorted(priced, reverse=True):
        busy[np.argmin(busy)] += one
    most = max(1.05 * busy.max(), ratio * priced.sum() / 3)
    allowed = every[(paid <= most + 1e-9).all(1) & (paid > 0).all(1)]
    best = cost[np.arange(7), allowed].sum(1).min()
    labels = towers._by_cost(priced, 3, ratio)(cost)
    assert any((labels == row).all() for row in allowed)
    assert cost[np.arange(7), labels].sum() == pytest.approx(best, rel=5e-3)  # the solver's gap


@pytest.mark.parametrize("nodes", [100, 0], ids=["solved", "no node"])
def test_forty_features_of_uneven_cost_are_placed_in_a_bounded_number_of_nodes(nodes, monkeypatch):
    monkeypatch.setitem(towers._SOLVER, "node_limit", nodes)
    rng = np.random.default_rng(0)
    costs, points = rng.uniform(1, 4, size=40), rng.normal(size=(40, 2))
    labels = towers._by_cost(costs, 8, 1.0)(np.square(points[:, None] - points[:8]).sum(-1))
    paid = np.bincount(labels, costs, minlength=8)
    assert paid.min() > 0
    assert paid.max() <= 1.1 * costs.sum() / 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("distance", ["coherent", "diverse"])
def test_no_partition_in_turn_or_at_random_of_equal_sizes_has_a_smaller_objective(seed, distance):
    rows = np.random.default_rng(seed).normal(size=(32, 11, 4))  # no groups
    result = found(rows, seed=seed, distance=distance, towers=3)
    rng = np.random.default_rng(1000 + seed)
    others = [result.stride, *(rng.permutation(result.stride) for _ in range(200))]
    assert min(towers.spread(result.points, labels) for labels in others) >= result.spread > 0
    assert sorted(np.bincount(result.labels)) == [3, 4, 4]
    again = found(rows, seed=seed, distance=distance, towers=3)
    np.testing.assert_array_equal(again.labels, result.labels)
    np.testing.assert_array_equal(again.points, result.points)


def test_sizes_may_differ_by_the_ratio_where_that_is_better():
    rows, truth = planted(2, sizes=(2, 4, 4, 2))
    loose, even = found(rows, ratio=2.0), found(rows)
    assert adjusted_rand_score(truth, loose.labels) == 1
    assert set(np.bincount(even.labels)) == {3}
    assert loose.spread < even.spread


def test_any_ratio_is_bounded_by_the_features_that_there_are():
    rows, _ = planted(0, sizes=(1, 6))
    assert sorted(np.bincount(found(rows, ratio=1e6, towers=2).labels)) == [1, 6]


def test_towers_of_equal_cost_may_have_other_numbers_of_features():
    rows, _ = planted(3)
    costs = np.array([20.0, *[1.0] * 17])
    result = found(rows, costs, balance="cost", towers=2)
    paid = [costs[result.labels == t].sum() for t in range(2)]
    assert 20 <= max(paid) <= 21  # at most 5 % above the feature that alone is more than half
    assert result.spread > 0


def test_groups_come_first_and_have_towers_by_their_size():
    rows, _ = planted(4)
    user, item = ("f3", "f8", "f9"), ("f0", "f1", "f2", "f4", "f5", "f6")
    result = found(rows, first=(user, item), towers=6)
    owners = [{name for name in user if name in tower} for tower in result.partition.towers]
    assert result.partition.towers[0] == user
    assert not any(owners[1:])
    assert set(result.partition.towers[1] + result.partition.towers[2]) == set(item)
    assert [len(tower) for tower in result.partition.towers] == [3, 3, 3, 3, 3, 3]


def test_a_feature_costs_the_bytes_of_its_rows_and_of_its_vector():
    schema = Schema(categorical=(Categorical(name="a", rows=10), Categorical(name="b", rows=10, length=3)))
    found = towers.costs(DlrmConfig(dim=8).task(schema).tables(), schema)
    assert found == {"a": 8 * (4 + 4), "b": 8 * (3 * 4 + 4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"towers": 0}, r"--towers must be a whole number of at least 1; got 0"),
        ({"towers": 19}, r"--towers 19: the run has 18 features with tables, .* Take at most 18 towers"),
        ({"distance": "near"}, r"--distance must be one of coherent, diverse; got 'near'"),
        ({"balance": "rows"}, r"--balance must be one of count, cost; got 'rows'"),
        ({"ratio": 0.5}, r"--ratio must be at least 1 and finite; got 0.5"),
        ({"first": (("f1", "x"), ("f1",))}, r"--first: every group must name features of the run, .* got f1, x, f1"),
        ({"first": (("", ""),)}, r"--first: every group must name features of the run, each once; got '', '' in it"),
        ({"first": (("f1",), ())}, r"--first: every group must name features of the run, .* got none"),
        ({"first": (("f1",), ("f2",)), "towers": 2}, r"--first: 3 groups, with that of all other features, .* got 2"),
    ],
)
def test_what_cannot_be_partitioned_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        found(planted(0)[0], **options)
