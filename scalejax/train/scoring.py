"""Scores of a whole split, gathered to the host on every process."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from scalejax.data.dedup import AnyBatch
from scalejax.errors import UserError
from scalejax.train import evaluation, exact
from scalejax.train.convert import prefetch
from scalejax.train.program import Program
from scalejax.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Scores:
    """Examples of weight > 0 in file order; N of them, T tasks.

    Attributes:
      logits: float32[N, T].
      labels: float32[N, T].
      weights: float32[N].
      groups: int64[N], or None where the data has no groups.
      spilled_ids: Ids that found no room in an exchange and were embedded as zeros, in the whole pass; None unless
        there may be any (`Exchange(spill="count")`).
    """

    logits: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    groups: np.ndarray | None
    spilled_ids: int | None = None

    @property
    def probabilities(self) -> np.ndarray:
        """float64[N, T], sigmoid of the logits."""
        return exact.sigmoid(self.logits)

    def measure(self, names: Sequence[str], *, intervals: Literal["none", "bootstrap"] = "none") -> dict[str, float]:
        """All metrics; keys end in "/name" where there are several tasks (see `evaluation.evaluate`).

        "spilled_ids" is among them where ids may find no room: what was scored then is not quite the model.
        """
        values = evaluation.evaluate(
            self.probabilities, self.labels, self.weights, groups=self.groups, names=names, intervals=intervals
        )
        return values | self.counted()

    def counted(self) -> dict[str, float]:
        """{"spilled_ids": ...}, or nothing where there are none by agreement."""
        return {} if self.spilled_ids is None else {"spilled_ids": self.spilled_ids}


def score(program: Program, state: TrainState, batches: Iterator[AnyBatch]) -> Scores:
    """Runs the model over one pass of batches; every process passes its slices and gets all scores.

    Raises:
      UserError: a score is not finite, an id is out of range, or an exchange had no room for one; with
        `Exchange(spill="count")` the latter are in the result instead.
    """
    logits: list[jax.Array] = []
    faults: list[jax.Array] = []
    slices: list[AnyBatch] = []
    with prefetch(batches, program, purpose="scoring") as prefetched:
        for host, device in prefetched:
            out, met = program.eval_step(state, device)
            out.copy_to_host_async()
            # Without a bound a long split would queue on the device; virtual devices must not queue at all.
            if len(logits) >= program.in_flight:
                logits[-program.in_flight].block_until_ready()
            logits.append(out)
            faults.append(met)
            slices.append(host)
    counts = np.sum([np.asarray(met) for met in faults], axis=0)
    program.collection.check_faults(counts)
    spilled = int(counts[1]) if program.collection.exchange.spill == "count" else None
    all_logits = np.concatenate([np.asarray(part) for part in logits])
    if not np.isfinite(all_logits).all():
        raise UserError(
            f"The scores of {int((~np.isfinite(all_logits)).any(1).sum())} examples are not finite at step "
            f"{int(state.step)}: these parameters are of no use. Take an earlier checkpoint (--step), or train again "
            "with lower learning rates."
        )
    labels = _gather(np.stack([b.labels for b in slices]))
    weights = _gather(np.stack([b.weights for b in slices]))
    kept = weights > 0
    groups = None
    if all(b.groups is not None for b in slices):
        groups = _gather(np.stack([np.asarray(b.groups) for b in slices]))[kept]
    return Scores(all_logits[kept], labels[kept], weights[kept], groups, spilled)


def _gather(local: np.ndarray) -> np.ndarray:
    """[batches, examples of this process, ...] -> [all examples, ...] in the order of the global batches."""
    if jax.process_count() == 1:
        return local.reshape(-1, *local.shape[2:])
    # As 32-bit words: jax would cut int64 to int32.
    words = np.ascontiguousarray(local).view(np.uint32).reshape(*local.shape[:2], -1)
    whole = multihost_utils.process_allgather(words)  # processes, batches, examples, words
    whole = np.asarray(whole).transpose(1, 0, 2, 3).reshape(-1, words.shape[-1])
    return np.ascontiguousarray(whole).view(local.dtype).reshape(-1, *local.shape[2:])
