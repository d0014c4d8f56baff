"""The exchange of tables in two levels, between hosts and within them, against the flat one, on devices of one process.

The unit of work is one lookup of a batch and one update of the rows by gradients: ids, vectors and gradients each
travel once. 16 tables of 10,000 x 32 for 4,096 examples with four ids a table, row-wise AdaGrad; eight virtual devices
of a CPU, as 2 hosts of 4 (`2x4`) or 4 of 2 (`4x2`). Cases:

    table_wise-2x4      table_wise-4x2         a table is on one device
    table_row_wise-2x4  table_row_wise-4x2     its rows are striped over the devices of one host

Virtual devices share memory, so that no link is slow: this compares the work of two hops with that of one.
`benchmarks/tower_exchange.py` has links.

Figures: milliseconds of ids (sorting by row included), vectors and gradients (AdaGrad included) as programs of their
own, and those of the peer.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import jax
import numpy as np

from scalejax.bench import cpu_devices, machine
from scalejax.bench.harness import Contest, OutputsDiffer, best_seconds
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.lookup import Routing
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.embedding.sharded_tables import State

CASES = ("table_wise-2x4", "table_wise-4x2", "table_row_wise-2x4", "table_row_wise-4x2")
PEERS = ("flat",)
ON_CPU = True

Kind = Literal["table_wise", "table_row_wise"]
Route = Literal["flat", "two_level"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is exchanged.

    Attributes:
      tables: Tables of `rows` rows of `dim` numbers, a feature each.
      rows: Of a table.
      dim: Width of a row.
      ids: Ids that an example has of a feature.
      batch: Examples of all devices.
    """

    tables: int = 16
    rows: int = 10_000
    dim: int = 32
    ids: int = 4
    batch: int = 4096

    @property
    def features(self) -> tuple[str, ...]:
        """Names, one a table."""
        return tuple(f"f{number}" for number in range(self.tables))

    @property
    def schema(self) -> Schema:
        """The features as data."""
        return Schema(categorical=tuple(Categorical(name=n, rows=self.rows, length=self.ids) for n in self.features))


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    devices, wanted = jax.devices("cpu"), cpu_devices("sptt_exchange") or 0
    if len(devices) < wanted:
        raise UserError(
            f"sptt_exchange: needs {wanted} devices; jax has {len(devices)}. Set JAX_NUM_CPU_DEVICES={wanted} before "
            "jax starts, as `scalejax bench sptt_exchange` does."
        )
    return contest(case, against, Size(), devices[:wanted])


def contest(case: str, against: str | None, size: Size, devices: Sequence[Any]) -> Contest:
    """Ours and the peer's exchange of the same ids."""
    kind, _, shape = case.partition("-")
    hosts = int(shape.partition("x")[0])
    features = random_ids(size, size.batch)
    ours = Exchanged(collection(size, cast(Kind, kind), "two_level", hosts, devices), size, features)
    flat = None
    if against is not None:
        flat = Exchanged(collection(size, cast(Kind, kind), "flat", hosts, devices), size, features)

    def check() -> None:
        assert flat is not None
        for steps in (0, 2):
            ours.steps(steps)
            flat.steps(steps)
            differ = ours.differences(flat)
            if differ:
                raise OutputsDiffer(f"after {steps} steps these differ in their bits: {', '.join(differ)}")

    def figures() -> dict[str, float]:
        sides = {"": ours} if flat is None else {"": ours, "_flat": flat}
        found = {(part, end): 1e3 * s for end, side in sides.items() for part, s in side.seconds_of_parts().items()}
        return {f"{part}{end}_ms": found[part, end] for part in ("ids", "vectors", "gradients") for end in sides}

    return Contest(
        ours.steps,
        size.batch,
        machine.device_name(devices[0]),
        None if flat is None else flat.steps,
        check,
        figures=figures,
    )


def collection(size: Size, kind: Kind, route: Route, hosts: int, devices: Sequence[Any]) -> EmbeddingCollection:
    """Tables in turn on one host after another (table_row_wise), or one device after another.

    Args:
      size: The tables.
      kind: How each is sharded.
      route: Of the exchange.
      hosts: Indices of `replica`.
      devices: All of them, host after host.
    """
    inside = len(devices) // hosts

    def ranks(number: int) -> tuple[int, ...]:
        if kind == "table_wise":
            return (number % len(devices),)
        first = number % hosts * inside
        return tuple(range(first, first + inside))

    plans = tuple(TablePlan(table=n, kind=kind, ranks=ranks(i)) for i, n in enumerate(size.features))
    tables = tuple(
        TableConfig(
            name=name, rows=size.rows, dim=size.dim, features=(name,), optimizer=RowwiseAdagrad(learning_rate=0.01)
        )
        for name in size.features
    )
    mesh = meshes.make_mesh(meshes.MeshShape(replica=hosts, fsdp=inside), devices)
    return EmbeddingCollection(
        tables=tables, mesh=mesh, plan=ShardingPlan(tables=plans), exchange=Exchange(route=route)
    )


def random_ids(size: Size, examples: int, seed: int = 0) -> KeyedJagged:
    """Ids of so many examples, uniform over rows."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, size.rows, (size.tables, examples * size.ids), np.int32)
    return KeyedJagged(size.features, ids.reshape(-1), np.full((size.tables, examples), size.ids, np.int32))


class Exchanged:
    """Tables, a batch of ids on the devices, and the compiled step.

    Args:
      on: The tables.
      size: What they were made for.
      host: Ids of the examples of this process.

    Attributes:
      on: The tables.
      features: The batch.
      state: Of the tables.
      compiled: The step.
    """

    def __init__(self, on: EmbeddingCollection, size: Size, host: KeyedJagged) -> None:
        self.on = on
        self.features = on.to_device(host, on.layout(size.schema, size.batch))
        self.state = on.init(jax.random.key(0))
        self.compiled = jax.jit(self._exchange, donate_argnums=0).lower(self.state, self.features).compile()

    def _exchange(self, state: State, features: DeviceJagged) -> State:
        embedded, routing = self.on.lookup(state, features)
        return self.on.update(state, routing, _grads(embedded))

    def steps(self, count: int) -> None:
        """Looks up and updates, so many times."""
        for _ in range(count):
            self.state = self.compiled(self.state, self.features)
        jax.block_until_ready(self.state)

    def differences(self, other: "Exchanged") -> list[str]:
        """Vectors of the batch, rows and row states that do not have the bits of another's tables."""

        def numbers(side: Exchanged) -> dict[str, jax.Array]:
            found = dict(jax.jit(side.on.lookup)(side.state, side.features)[0])
            for table, leaves in side.on.to_logical(side.state).items():
                found |= {f"{table} {leaf}": value for leaf, value in leaves.items()}
            return found

        # On the devices, of which a process need not have all.
        equal = jax.jit(lambda one, two: jax.tree.map(lambda x, y: (x == y).all(), one, two))(
            numbers(self), numbers(other)
        )
        return [name for name, same in jax.device_get(equal).items() if not same]

    def seconds_of_parts(self) -> dict[str, float]:
        """The least of a few runs of the exchange of ids, of vectors and of gradients."""
        send: Callable[[DeviceJagged], Routing] = jax.jit(self.on.exchange_ids)
        fetch, update = jax.jit(self.on.fetch), jax.jit(self.on.update)
        routing = send(self.features)
        grads = _grads(fetch(self.state, routing))
        runs = {
            "ids": lambda: send(self.features),
            "vectors": lambda: fetch(self.state, routing),
            "gradients": lambda: update(self.state, routing, grads),
        }
        return {name: best_seconds(lambda run=run: jax.block_until_ready(run())) for name, run in runs.items()}


def _grads(embedded: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Gradients that depend on the vectors, so that they travel after them."""
    return {name: x + 1 for name, x in embedded.items()}
