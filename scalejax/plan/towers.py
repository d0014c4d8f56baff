"""Which features should share a tower: groups by how much learned rows interact, of equal size or equal cost.

    scalejax towers RUN --towers 4 --save towers.json

Paper: L. Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling Technique for Efficient Large-Scale
Recommendation", MLSys 2024 (arXiv 2403.00877), its tower partitioner. For vectors e_i of a feature i in examples x:

    S_ij  = |mean over x of cos(e_i(x), e_j(x))|
    D_ij  = 1 - S_ij (coherent: similar features together)  |  S_ij (diverse: similar features apart)
    Z     = argmin over points on a plane of sum_{i<j} (|Z_i - Z_j| - D_ij)^2               by Adam, the best of starts
    towers = k-means of Z in which the step that assigns points to centres is exact under the bounds of the sizes

The last is a linear assignment to repeated centres (Bennett et al., "Constrained K-Means Clustering", MSR-TR-2000-65).
Balance by cost, which the paper has not, makes it an integer program. The paper's baselines are features assigned in
turn ("stride") and at random; both are among the starts of the k-means, so that by count, with no group first, none of
equal sizes has a smaller objective.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import optimize, sparse

from scalejax.data.examples.schema import Schema
from scalejax.errors import UserError, check_one_of, check_whole
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.planner import evaluation
from scalejax.parallel.planner.statistics import Zipf
from scalejax.parallel.towers import Partition
from scalejax.plan.sharding import statistics_of_schema
from scalejax.units import size

if TYPE_CHECKING:
    from rich.console import Console

Distance = Literal["coherent", "diverse"]
Balance = Literal["count", "cost"]
Assign = Callable[[np.ndarray], np.ndarray]

_STARTS = {"count": 32, "cost": 8}
_PLANES, _STEPS, _RATE = 16, 600, 0.03
_LOOSENED = 1.05  # with a bound as tight as can be 40 features in 8 towers were not solved in half a minute
_SOLVER = {"mip_rel_gap": 5e-3, "node_limit": 100}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partitioner:
    """How features are put into towers.

    Attributes:
      towers: T.
      distance: Whether similar features shall be together or apart; the paper found neither better in general.
      balance: What is even over towers: the number of features, or the bytes of their lookups (`costs`).
      ratio: Of counts, the largest over the smallest, where they divide so; of costs, the largest over the mean, or
        5 % above what placing the most costly first reaches, if that is more.
      first: Groups of features, such as those of the user, that share no tower with others; what is in none is one
        more. The paper found most of its gain in such a split.
      seed: Of the starts.
    """

    towers: int
    distance: Distance = "coherent"
    balance: Balance = "count"
    ratio: float = 1.0
    first: tuple[tuple[str, ...], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole("--towers", self.towers, 1)
        check_one_of("--distance", self.distance, get_args(Distance))
        check_one_of("--balance", self.balance, get_args(Balance))
        if not 1 <= self.ratio < float("inf"):
            raise UserError(f"--ratio must be at least 1 and finite; got {self.ratio}. 1 is the most even.")

    def partition(self, names: Sequence[str], interactions: np.ndarray, costs: Sequence[float]) -> "FoundTowers":
        """Puts features into towers.

        Args:
          names: F features.
          interactions: S, float[F, F].
          costs: Of each feature.

        Raises:
          UserError: there are fewer features than towers, or `first` does not fit them.
        """
        if len(names) < self.towers:
            raise UserError(
                f"--towers {self.towers}: the run has {len(names)} features with tables, and every tower needs one. "
                f"Take at most {len(names)} towers."
            )
        groups = self._groups(names)
        points = plane(interactions if self.distance == "diverse" else 1 - interactions, self.seed)
        priced = np.asarray(costs, float)
        labels, used = np.zeros(len(names), int), 0
        for members, towers in zip(groups, _shares(list(map(len, groups)), self.towers), strict=True):
            labels[members] = used + self._group(points[members], priced[members], towers)
            used += towers
        stride, *random = self._baselines(len(names), self.towers)
        return FoundTowers(
            names=tuple(names),
            interactions=interactions,
            points=points,
            costs=priced,
            labels=labels,
            stride=stride,
            random=tuple(random),
        )

    def _groups(self, names: Sequence[str]) -> list[np.ndarray]:
        """Positions of the features of each of the groups, the rest last."""
        named = [name for group in self.first for name in group]
        wrong = [name for name in named if name not in names or named.count(name) > 1]
        if wrong or not all(self.first):
            got = ", ".join(name or "''" for name in wrong) or "none"
            raise UserError(
                f"--first: every group must name features of the run, each once; got {got} in it. The "
                f"features are {', '.join(names)}."
            )
        rest = tuple(name for name in names if name not in named)
        groups = [*self.first, *([rest] if rest else [])]
        if len(groups) > self.towers:
            raise UserError(
                f"--first: {len(groups)} groups, with that of all other features, need as many towers; got "
                f"{self.towers}. Take more towers, or fewer groups."
            )
        return [np.array([list(names).index(name) for name in group]) for group in groups]

    def _baselines(self, points: int, towers: int) -> list[np.ndarray]:
        """Towers of points assigned in turn, and at random."""
        stride, rng = np.arange(points) % towers, np.random.default_rng(self.seed)
        return [stride, *(rng.permutation(stride) for _ in range(_STARTS["count"]))]

    def _group(self, points: np.ndarray, costs: np.ndarray, towers: int) -> np.ndarray:
        """Tower of each point: the best k-means of all starts and bounds."""
        starts = self._baselines(len(points), towers)[: 1 + _STARTS[self.balance]]
        found = [_kmeans(points, start, assign) for assign in self._assignments(costs, towers) for start in starts]
        return min(found, key=lambda labels: spread(points, labels))

    def _assignments(self, costs: np.ndarray, towers: int) -> list[Assign]:
        if self.balance == "cost":
            return [_by_cost(costs, towers, self.ratio)]
        even, most = len(costs) // towers, -(-len(costs) // towers)
        loose = {(low, int(min(self.ratio * low, len(costs) - (towers - 1) * low))) for low in range(1, even + 1)}
        bounds = {(even, most)} | {(low, high) for low, high in loose if high * towers >= len(costs)}
        return [_by_count(*one) for one in sorted(bounds)]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FoundTowers:
    """Features in towers, and what they could be compared with.

    Attributes:
      names: F features.
      interactions: S, float[F, F].
      points: float[F, 2] on the plane.
      costs: Of each feature.
      labels: int[F], its tower.
      stride: The same for features assigned in turn.
      random: The same for features assigned at random, several times.
    """

    names: tuple[str, ...]
    interactions: np.ndarray
    points: np.ndarray
    costs: np.ndarray
    labels: np.ndarray
    stride: np.ndarray
    random: tuple[np.ndarray, ...]

    @property
    def partition(self) -> Partition:
        """As a model takes it."""
        towers = [[] for _ in range(int(self.labels.max()) + 1)]
        for name, tower in zip(self.names, self.labels, strict=True):
            towers[tower].append(name)
        return Partition(towers=tuple(map(tuple, towers)))

    @property
    def spread(self) -> float:
        """What k-means makes small."""
        return spread(self.points, self.labels)

    def compared(self, measure: Callable[[np.ndarray], float]) -> dict[str, float]:
        """A measure of labels for these towers and for the baselines (at random: the mean)."""
        random = float(np.mean([measure(labels) for labels in self.random]))
        return {"towers": measure(self.labels), "stride": measure(self.stride), "random": random}

    def within(self, labels: np.ndarray) -> float:
        """Mean interaction of two features of one tower; 0 if no two share one."""
        together = (labels[:, None] == labels) & ~np.eye(len(labels), dtype=bool)
        return float(self.interactions[together].mean()) if together.any() else 0.0

    def shares(self) -> list[float]:
        """Of the costs, tower by tower."""
        return (np.bincount(self.labels, self.costs) / self.costs.sum()).tolist()

    def render(self, console: "Console") -> None:
        """Prints towers, shares and objectives."""
        lines: list[str] = []
        for tower, share in zip(self.partition.towers, self.shares(), strict=True):
            lines.append(
                f"tower {len(lines)}: {len(tower)} features, {share:.1%} of the cost "
                f"({size(share * self.costs.sum())} an example): {', '.join(tower)}"
            )
        pairs = np.triu_indices(len(self.names), 1)
        if len(self.names) > 1:
            strengths = self.interactions[pairs]
            a, b = (self.names[index[strengths.argmax()]] for index in pairs)
            lines.append(
                f"interaction of two features: median {np.median(strengths):.4f}, "
                f"largest {strengths.max():.4f} ({a}, {b})"
            )
        for what, measure in {
            "objective (spread on the plane)": lambda labels: spread(self.points, labels),
            "mean interaction inside a tower": self.within,
        }.items():
            values = ", ".join(f"{name} {value:.4f}" for name, value in self.compared(measure).items())
            lines.append(f"{what}: {values}")
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)

    def to_json(self) -> dict[str, object]:
        """What `--json` writes."""
        return {
            "towers": self.partition.towers,
            "shares": self.shares(),
            "objectives": self.compared(lambda labels: spread(self.points, labels)),
            "points": {name: point.tolist() for name, point in zip(self.names, self.points, strict=True)},
            "interactions": self.interactions.tolist(),
        }


def interactions(rows: Iterable[np.ndarray]) -> np.ndarray:
    """S of raw vectors: batches float[B, F, N] -> float64[F, F]. A vector of zeros interacts with none.

    The mean is that of products of rows of the same example; that of the rows themselves would tell nothing, since
    every example looks others up.
    """
    total, count = 0.0, 0
    for batch in rows:
        wide = np.asarray(batch, np.float64)
        norms = np.linalg.norm(wide, axis=2, keepdims=True)
        unit = wide / np.where(norms > 0, norms, 1)
        total = total + np.einsum("bfn,bgn->fg", unit, unit, optimize=True)
        count += len(wide)
    return np.abs(total / count)


def costs(tables: Sequence[TableConfig], schema: Schema) -> dict[str, float]:
    """Bytes an example of each feature: rows that are looked up, and the vector that is sent."""
    works = evaluation.works_of(tables, statistics_of_schema(schema, tuple(tables), Zipf(exponent=1.0)), batch_size=1)
    found: dict[str, float] = {}
    for work in works.values():
        table = work.table
        each = table.dim * (work.occurrences * work.itemsize + work.vectors * work.wide_itemsize)
        found |= {feature: each / len(table.features) for feature in table.features}
    return found


def plane(distances: np.ndarray, seed: int) -> np.ndarray:
    """Points float64[F, 2] whose distances are as near to `distances`, [F, F], as Adam finds from several starts."""
    wanted = jnp.asarray(distances, jnp.float32)
    pairs = 1 - jnp.eye(len(wanted), dtype=jnp.float32)
    adam = optax.adam(_RATE)

    def stress(x: jax.Array) -> jax.Array:
        apart = x[:, None] - x[None]
        return (pairs * jnp.square(jnp.sqrt(jnp.square(apart).sum(-1) + 1e-12) - wanted)).sum() / 2

    def solve(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: tuple[jax.Array, optax.OptState], _: None) -> tuple[tuple[jax.Array, optax.OptState], None]:
            x, state = carry
            update, state = adam.update(jax.grad(stress)(x), state)
            return (cast("jax.Array", optax.apply_updates(x, update)), state), None

        (x, _), _ = jax.lax.scan(step, (x, adam.init(x)), None, length=_STEPS)
        return x, stress(x)

    starts = np.random.default_rng(seed).normal(size=(_PLANES, len(wanted), 2)) / 2
    points, stresses = jax.jit(jax.vmap(solve))(jnp.asarray(starts, jnp.float32))
    return np.asarray(points[int(np.argmin(stresses))], np.float64)


def spread(points: np.ndarray, labels: np.ndarray) -> float:
    """The sum of squared distances of points to the centres of their towers."""
    return float(sum(np.square(own - own.mean(0)).sum() for own in _towers(points, labels)))


def _towers(points: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    return [points[labels == t] for t in range(int(labels.max()) + 1)]


def _kmeans(points: np.ndarray, labels: np.ndarray, assign: Assign) -> np.ndarray:
    """Lloyd's steps with an exact assignment, until the spread no longer falls; a start outside the bounds is left."""
    best = None
    while True:
        centres = np.stack([own.mean(0) for own in _towers(points, labels)])
        labels = assign(np.square(points[:, None] - centres).sum(-1))
        if best is not None and spread(points, labels) >= spread(points, best) - 1e-12:
            return best
        best = labels


def _by_count(low: int, high: int) -> Assign:
    """Cheapest towers with `low` to `high` points each: every tower is `high` places, of which `low` must be taken."""

    def assign(cost: np.ndarray) -> np.ndarray:
        points, towers = cost.shape
        places = np.repeat(cost, high, axis=1)
        nobody = np.where(np.arange(high) < low, 1 + len(cost) * cost.max(), 0)
        square = np.concatenate([places, np.tile(nobody, (towers * high - points, towers))])
        return optimize.linear_sum_assignment(square)[1][:points] // high

    return assign


def _by_cost(costs: np.ndarray, towers: int, ratio: float) -> Assign:
    """Cheapest towers that each have a point, and none more than its part of the costs.

    They are within half a percent of the cheapest; where the solver finds none in its number of nodes, they are those
    of the most costly first.
    """
    busy, greedy = np.zeros(towers), np.zeros(len(costs), int)
    for number, point in enumerate(np.argsort(-costs, kind="stable")):
        greedy[point] = number if number < towers else busy.argmin()  # no tower stays empty, of costs of 0 neither
        busy[greedy[point]] += costs[point]
    most = max(_LOOSENED * busy.max(), ratio * costs.mean() * len(costs) / towers) * (1 + 1e-9)
    one_each = sparse.kron(sparse.eye(len(costs)), np.ones((1, towers)))
    of_tower = sparse.kron(np.ones((1, len(costs))), sparse.eye(towers))
    priced = sparse.kron(costs[None], sparse.eye(towers))
    bounds = [
        optimize.LinearConstraint(one_each, 1, 1),
        optimize.LinearConstraint(of_tower, 1, np.inf),
        optimize.LinearConstraint(priced, 0, most),
    ]

    def assign(cost: np.ndarray) -> np.ndarray:
        zero_one = optimize.Bounds(0, 1)
        solved = optimize.milp(cost.reshape(-1), integrality=1, bounds=zero_one, constraints=bounds, options=_SOLVER)
        return greedy if solved.x is None else solved.x.reshape(cost.shape).argmax(1)

    return assign


def _shares(sizes: Sequence[int], towers: int) -> list[int]:
    """Towers of each group: one, and the others one by one to the group with most features a tower."""
    found = [1] * len(sizes)
    for _ in range(towers - len(sizes)):
        group = max(range(len(sizes)), key=lambda g: (sizes[g] / found[g] if found[g] < sizes[g] else 0, -g))
        found[group] += 1
    return found
