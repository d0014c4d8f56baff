"""Looking up and updating embedding tables on a CPU, exact row-wise AdaGrad, against FBGEMM's fused operator.

The unit of work is one lookup of a batch and one update with given gradients, of 26 tables of 100,000 rows of 64
numbers by 8,192 one-hot examples whose ids follow Zipf's law with exponent 1.2; or, for `rows-*`, of one table and the
same ids below 10^4 whatever its rows. Cases:

    pipelined    which ids belong to which row is known with the batch: the input thread has sorted them
    inline       the sorting is part of what is timed
    rows-1e4 ... rows-1e7    pipelined, one table of so many rows

Figures: `slots_of_temporaries`, the step's temporary memory as a multiple of (ids x dim x 4 bytes), from the compiler.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.bench import machine, peers
from scalejax.bench.harness import Contest, OutputsDiffer, repeated
from scalejax.data.examples.jagged import KeyedJagged as HostKeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.ids import jagged
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.sharded_tables import State
from scalejax.parallel.embedding.update.host_row_plans import Room
from scalejax.parallel.mesh import MeshShape

_ROWS_CASES = {"rows-1e4": 10**4, "rows-1e5": 10**5, "rows-1e6": 10**6, "rows-1e7": 10**7}
CASES = ("pipelined", "inline", *_ROWS_CASES)
PEERS = ("fbgemm",)
ON_CPU = True

TABLES, ROWS, DIM, BATCH = 26, 100_000, 64, 8192
ZIPF = 1.2
OPTIMIZER = RowwiseAdagrad(learning_rate=0.01)
_BATCHES = 4

ROW_TOLERANCE = 1e-5
"""Largest difference of looked-up numbers after some steps, over the largest number: both sides sum the same float32
gradients of a row, in another order, and divide by their own size."""


class Peer(Protocol):
    """The same tables in another library."""

    def place(self, ids: np.ndarray, grads: np.ndarray) -> object: ...

    def step(self, placed: object) -> object: ...

    def lookup(self, placed: object) -> np.ndarray:
        """float32[B, tables * dim]."""
        ...


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    count, rows, below = (1, _ROWS_CASES[case], 10**4) if case in _ROWS_CASES else (TABLES, ROWS, ROWS)
    ids = [zipf_ids(count, below, seed) for seed in range(_BATCHES)]
    grads = np.random.default_rng(9).normal(size=(BATCH, count * DIM)).astype(np.float32)
    ours = _Ours(count, rows, ids, grads, inline=case == "inline")
    alone = Contest(ours.steps, BATCH, machine.device_name(ours.device), figures=ours.figures)
    if against is None:
        return alone
    peer: Peer = peers.load("fbgemm_tables").Tables(
        ours.tables(), OPTIMIZER.learning_rate, OPTIMIZER.eps, len(machine.usable_cpus())
    )
    placed = [peer.place(one, grads) for one in ids]
    turn = itertools.cycle(placed)
    peer_steps = repeated(lambda: peer.step(next(turn)))

    def check() -> None:
        for steps in (0, 3):
            ours.steps(steps)
            peer_steps(steps)
            for number, other in enumerate(placed):
                one, two = ours.lookup(number), peer.lookup(other)
                difference = np.abs(one - two).max() / np.abs(two).max()
                if not difference <= ROW_TOLERANCE:
                    raise OutputsDiffer(f"rows after {steps} steps differ by {difference:.1e} of the largest")

    return dataclasses.replace(alone, peer=peer_steps, check=check)


def zipf_ids(tables: int, rows: int, seed: int) -> np.ndarray:
    """int32[tables, BATCH] in [0, rows), id k with probability in proportion to (k + 1)^-1.2."""
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF)
    draws = np.random.default_rng(seed).random((tables, BATCH)) * weights[-1]
    return np.searchsorted(weights, draws).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class _Placed:
    host: HostKeyedJagged
    features: DeviceJagged


class _Ours:
    """Tables, their state, batches on the device, and the compiled step."""

    def __init__(self, count: int, rows: int, ids: Sequence[np.ndarray], grads: np.ndarray, *, inline: bool) -> None:
        names = tuple(f"f{number}" for number in range(count))
        tables = tuple(TableConfig(name=n, rows=rows, dim=DIM, features=(n,), optimizer=OPTIMIZER) for n in names)
        self.device = jax.devices("cpu")[0]
        self.collection = EmbeddingCollection(tables=tables, mesh=meshes.make_mesh(MeshShape(), [self.device]))
        schema = Schema(categorical=tuple(Categorical(name=n, rows=rows) for n in names))
        self._layout = self.collection.layout(schema, BATCH)
        self._inline, self._room = inline, Room()
        lengths = np.ones((count, BATCH), np.int32)
        hosts = [HostKeyedJagged(names, one.reshape(-1), lengths) for one in ids]
        self._batches = [_Placed(host, self._features(host)) for host in hosts]
        self._turn = itertools.cycle(self._batches)
        self._grads = {n: jax.device_put(grads[:, i * DIM : (i + 1) * DIM]) for i, n in enumerate(names)}
        self._state = self.collection.init(jax.random.key(0))
        step = jax.jit(self._step, donate_argnums=0)
        self._compiled = step.lower(self._state, self._batches[0].features, self._grads).compile()

    def _step(
        self, state: State, features: DeviceJagged, grads: dict[str, jax.Array]
    ) -> tuple[dict[str, jax.Array], State]:
        embedded, routing = self.collection.lookup(state, features)
        # The update comes after the lookups, as in a model that mixes features. Without anything that says so the
        # compiler copies all rows, to look them up after they are updated.
        after = jax.lax.cond(
            state["updates"] < 0,
            lambda vectors: sum(x[0, 0] for x in vectors.values()),
            lambda vectors: jnp.zeros(()),
            embedded,
        )
        return embedded, self.collection.update(state, routing, grads, 1.0 + after)

    def _features(self, host: HostKeyedJagged) -> DeviceJagged:
        packed = self.collection.pack(host, 1, self._layout)
        packed = self.collection.with_plans(packed, self._room)
        return jagged.to_device(packed, self.collection.mesh)

    def steps(self, count: int) -> None:
        """Looks up and updates, `count` batches."""
        for _ in range(count):
            batch = next(self._turn)
            features = self._features(batch.host) if self._inline else batch.features
            embedded, self._state = self._compiled(self._state, features, self._grads)
            jax.block_until_ready(embedded)
        jax.block_until_ready(self._state)

    @functools.cached_property
    def _lookup(self) -> Callable[[State, DeviceJagged], dict[str, jax.Array]]:
        return jax.jit(lambda state, features: self.collection.lookup(state, features)[0])

    def lookup(self, number: int) -> np.ndarray:
        """float32[B, tables * dim]."""
        embedded = self._lookup(self._state, self._batches[number].features)
        return np.concatenate([np.asarray(embedded[name]) for name in self._grads], axis=1)

    def tables(self) -> list[np.ndarray]:
        """Rows of every table."""
        logical = self.collection.to_logical(self._state)
        return [np.array(logical[table.name]["rows"]) for table in self.collection.tables]

    def figures(self) -> dict[str, float]:
        """Temporary memory."""
        memory = self._compiled.memory_analysis()
        assert memory is not None
        slots = len(self._grads) * BATCH * DIM * 4
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return {"slots_of_temporaries": (memory.temp_size_in_bytes + outputs) / slots}
