"""Training in stages: batch size, sequence length and data change when given numbers of tokens have been seen.

Each stage is a data config; where it begins is said in tokens (positions of all rows, padding included, as papers
count them), and it begins with the first step at which that many have been seen.

    stages = (Stage(from_tokens=0, data=short), Stage(from_tokens=252_000_000, data=long))
    for span in plan(stages, tokens=10**9):
        batches = span.data.build().train_batches(start_example=span.first_example)

A stage that differs from the one before in batch size alone goes on in the same stream of rows (a batch-size ramp); any
other begins a stream of its own at row 0 (give it a seed of its own, or it begins with the documents that the last
stage began with).
"""

import dataclasses
import itertools
from collections.abc import Sequence

from scalejax.data.text.dataset import TokenSource
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """What is trained on from some number of tokens on.

    Attributes:
      from_tokens: Tokens that have been seen before.
      data: Rows; holds the batch size and the length.
    """

    from_tokens: int
    data: TokenSource


@dataclasses.dataclass(frozen=True)
class StageSpan:
    """A stage in steps.

    Attributes:
      data: Its rows.
      first_step: Its first step, counted from 0 over all stages.
      stop_step: The first step behind it.
      first_example: Where in the stream of `data` it begins.
    """

    data: TokenSource
    first_step: int
    stop_step: int
    first_example: int


def plan(stages: Sequence[Stage], tokens: int) -> tuple[StageSpan, ...]:
    """The steps of each stage of a run that stops with the first step at which `tokens` have been seen.

    Args:
      stages: By ascending `from_tokens`, the first from 0.
      tokens: Tokens of the whole run.
    Raises:
      UserError: stages out of order or without a step, or a run that stops before the last stage begins.
    """
    starts = [stage.from_tokens for stage in stages]
    if not stages or starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise UserError(f"stages: from_tokens must begin at 0 and ascend; got {starts}.")
    if tokens <= starts[-1]:
        raise UserError(f"stages: the run stops at {tokens:,} tokens, before the stage from {starts[-1]:,} begins.")
    spans: list[StageSpan] = []
    step = seen = example = 0
    for number, (stage, until) in enumerate(zip(stages, [*starts[1:], tokens], strict=True)):
        if number and not _same_rows(stages[number - 1].data, stage.data):
            example = 0
        batch = stage.data.batch_size
        per_step = batch * stage.data.schema().length
        steps = max(0, -(-(until - seen) // per_step))
        if steps == 0:
            raise UserError(
                f"stages[{number}] from {stage.from_tokens:,} tokens has no step: the stage before it ends a step at "
                f"{seen:,} tokens, where the next one begins. Leave it out, or let it go on for longer."
            )
        spans.append(StageSpan(stage.data, step, step + steps, example))
        step, seen, example = step + steps, seen + steps * per_step, example + steps * batch
    return tuple(spans)


def _same_rows(a: TokenSource, b: TokenSource) -> bool:
    return dataclasses.replace(a, batch_size=b.batch_size, threads=b.threads) == b
