"""Scores of a whole split: sums of metrics, and what metrics collect of every example, on every process."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from scalejax.errors import UserError
from scalejax.parallel.embedding.row_cache import RowCache
from scalejax.parallel.gradients.compute import ROWS
from scalejax.parallel.mesh import reading_order
from scalejax.train.batches.convert import prefetch
from scalejax.train.metrics import sums as metric_sums
from scalejax.train.metrics.protocol import SHOWN, Metric
from scalejax.train.state import TrainState
from scalejax.train.step import Program, Scored, scope_of


@dataclasses.dataclass(frozen=True)
class Scores:
    """Of one split under one state.

    Attributes:
      metrics: The metrics by name.
      sums: Their sums over the split, on the host.
      collected: {name: [N, ...]} of the examples that count, in the order of the file.
      overflow_ids: Ids that found no room in an exchange and were embedded as zeros, in the whole pass; None unless
        there may be any (`Exchange(overflow="count")`).
    """

    metrics: Mapping[str, Metric]
    sums: Mapping[str, object]
    collected: Mapping[str, np.ndarray]
    overflow_ids: int | None = None

    def measure(self, *, intervals: Literal["none", "bootstrap"] = "none") -> dict[str, float]:
        """All values of all metrics, exact ones in place of those of sums.

        "overflow_ids" is among them where ids may find no room: what was scored then is not quite the model.
        """
        values: dict[str, float] = {}
        for name, metric in self.metrics.items():
            exact = metric.exact(self.collected, intervals=intervals) if metric.collects else {}
            values |= exact or metric.compute(self.sums[name])
        return values | self.counted()

    def tabulate(self) -> dict[str, list[list[float]]]:
        """All tables of all metrics."""
        return {
            key: table.tolist()
            for name, metric in self.metrics.items()
            for key, table in metric.tabulate(self.sums[name]).items()
        }

    def counted(self) -> dict[str, float]:
        """{"overflow_ids": ...}, or nothing where there are none by agreement."""
        return {} if self.overflow_ids is None else {"overflow_ids": self.overflow_ids}


def score(
    program: Program,
    state: TrainState,
    batches: Iterator[object],
    *,
    of: str = "these examples",
    cache: RowCache | None = None,
) -> Scores:
    """Runs the model over one pass of batches; every process passes its slices and gets all scores.

    Args:
      program: The run.
      state: Whose parameters and tables are scored.
      batches: Host batches.
      of: What is scored, for messages.
      cache: Through which tables with tiers are read: `Tiers.scoring` of this state.

    Raises:
      UserError: a loss is not finite, an id is out of range, or an exchange had no room for one; with
        `Exchange(overflow="count")` the latter are in the result instead.
    """
    found: list[Scored] = []
    slices: list[Mapping[str, object]] = []
    scopes = {name: scope_of(field) for name, field in program.fields.items()}
    wanted = program.collected
    if wanted and scopes.get("weights") == "example":
        wanted |= {"weights"}  # what fills up a batch is no example of a metric that asks for none, either
    numbered = program.task.draws == "evaluation too"
    seen = 0
    with prefetch(batches, program, purpose="scoring", cache=cache) as prefetched:
        for host, device in prefetched:
            if cache is not None:
                state = dataclasses.replace(state, tables=cache.advance(state.tables))
            rows = program.rows(device)
            numbers = _numbers(program, seen, rows) if numbered else None
            scored = program.eval_step(state, device, numbers)
            if seen >= SHOWN:
                outputs = {name: x for name, x in scored.outputs.items() if name not in program.shown}
                scored = dataclasses.replace(scored, outputs=outputs)
            for output in scored.outputs.values():
                output.copy_to_host_async()
            # Without a bound a long split would queue on the device; virtual devices must not queue at all.
            if len(found) >= program.in_flight:
                found[-program.in_flight].loss.block_until_ready()
            found.append(scored)
            # Of a host batch that alone: all pictures of a split need not fit the memory.
            slices.append(_taken(host, wanted - program.shown if seen >= SHOWN else wanted))
            seen += rows
    overflowed = None
    if program.collection is not None:
        faults = np.sum([np.asarray(scored.faults) for scored in found], axis=0)
        program.collection.check_faults(faults)
        overflowed = int(faults[1]) if program.collection.exchange.overflow == "count" else None
    losses, parts = metric_sums.to_host(([scored.loss for scored in found], [scored.metrics for scored in found]))
    if not np.isfinite(losses).all():
        raise UserError(
            f"The loss of {of} is not finite at step {int(state.step)}: these parameters are of no use. Take an "
            "earlier checkpoint (--step), or train again with lower learning rates."
        )
    sums: dict[str, object] = {}
    for of_batch in parts:
        for name, part in of_batch.items():
            sums[name] = metric_sums.merge(sums[name], part) if name in sums else part
    return Scores(program.metrics, sums, _collected(wanted, scopes, found, slices, program.mesh), overflowed)


def _taken(host: object, names: frozenset[str]) -> dict[str, object]:
    """The fields of a host batch of these names, as far as it has them."""
    fields = host if isinstance(host, Mapping) else {name: getattr(host, name, None) for name in names}
    return {name: fields[name] for name in names if fields.get(name) is not None}


def _numbers(program: Program, first: int, rows: int) -> jax.Array:
    """uint32[B]: which example of the split each of a batch is."""
    local = rows // jax.process_count()
    own = np.arange(local, dtype=np.uint32) + np.uint32(first + jax.process_index() * local)
    return jax.make_array_from_process_local_data(NamedSharding(program.mesh, ROWS), own, (rows,))


def _collected(
    wanted: frozenset[str],
    scopes: Mapping[str, str],
    found: list[Scored],
    slices: list[Mapping[str, object]],
    mesh: Mesh,
) -> dict[str, np.ndarray]:
    # Fields come by process, in the order of the file; outputs in that of the devices along the mesh.
    reordered = mesh.is_multi_process and "example" in scopes.values()
    collected = {}
    for name in sorted(wanted):
        if name in found[0].outputs:
            outputs = [np.asarray(scored.outputs[name]) for scored in found if name in scored.outputs]
            if reordered:
                outputs = [output[reading_order(mesh, len(output))] for output in outputs]
            collected[name] = np.concatenate(outputs)
            continue
        parts = [np.asarray(held[name]) for held in slices if name in held]
        if not parts:
            continue
        # Every process has all of what is of a step.
        collected[name] = np.concatenate(parts) if scopes.get(name) == "step" else _gather(np.stack(parts))
    weights = collected.get("weights")
    if weights is None:
        return collected
    counts = (weights > 0).reshape(len(weights), -1).any(axis=1)
    return {
        name: array if scopes.get(name) == "step" else array[counts[: len(array)]] for name, array in collected.items()
    }


def _gather(local: np.ndarray) -> np.ndarray:
    """[batches, examples of this process, ...] -> [all examples, ...] in the order of the global batches."""
    if jax.process_count() == 1:
        return local.reshape(-1, *local.shape[2:])
    # 64 bits as words of 32: jax would cut them.
    wide = local.dtype.itemsize == 8
    sent = np.ascontiguousarray(local).view(np.uint32).reshape(*local.shape, 2) if wide else local
    whole = np.asarray(multihost_utils.process_allgather(sent))  # processes, batches, examples, ...
    whole = np.ascontiguousarray(whole.swapaxes(0, 1))
    whole = whole.view(local.dtype)[..., 0] if wide else whole
    return whole.reshape(-1, *local.shape[2:])
