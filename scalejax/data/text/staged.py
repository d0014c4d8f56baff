"""Data whose batch size and length grow at fixed numbers of tokens, as one stream: `StagedData`."""

import dataclasses
import hashlib
from collections.abc import Iterator

from scalejax.data.reading import check_start
from scalejax.data.text.dataset import Parts, TokenDataSet, TokenSource
from scalejax.data.text.stages import Stage, StageSpan, plan
from scalejax.data.text.tokens import TokenBatch, TokenSchema
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedData:
    """Stages one after the other (`stages.py`); the last goes on without end.

        StagedData(stages=(
            Stage(from_tokens=0, data=TextData(length=4096, batch_size=1024)),
            Stage(from_tokens=252_000_000, data=TextData(length=8192, batch_size=1024)),
            Stage(from_tokens=2_870_000_000_000, data=TextData(length=8192, batch_size=2048)),
        ))

    is how Llama 3 405B was trained (arXiv 2407.21783, section 3.4.1). The example counter of a run counts rows of all
    stages. Splits other than "train" are those of the last stage.

    Attributes:
      stages: By ascending `from_tokens`, the first from 0.
    """

    stages: tuple[Stage, ...]

    @property
    def batch_size(self) -> int:
        """Rows of the largest batch."""
        return max(self.batch_sizes)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Rows of the batches of every stage."""
        return tuple(stage.data.batch_size for stage in self.stages)

    def schema(self) -> TokenSchema:
        """The vocabulary, and the longest rows.

        Raises:
          UserError: the stages have different vocabularies.
        """
        schemas = [stage.data.schema() for stage in self.stages]
        vocabularies = {schema.vocabulary for schema in schemas}
        if len(vocabularies) != 1:
            raise UserError(
                f"data.stages: all must have one vocabulary; got {sorted(vocabularies)}. Give them one tokenizer."
            )
        first = schemas[0]
        for number, schema in enumerate(schemas):
            if (schema.modalities, schema.ranges) != (first.modalities, first.ranges):
                raise UserError(
                    f"data.stages.{number} has tokens of {', '.join(schema.modalities)}, data.stages.0 of "
                    f"{', '.join(first.modalities)}, or other ids of them. Give all stages the same."
                )
        longest = max(schemas, key=lambda schema: schema.length)
        for number, schema in enumerate(schemas):
            for modality, name in enumerate(first.modalities):
                if schema.capacity(modality) > longest.capacity(modality):
                    raise UserError(
                        f"data.stages.{number} has up to {schema.capacity(modality)} tokens of {name} in a row, and "
                        f"data.stages.{schemas.index(longest)}, whose rows are the longest, up to "
                        f"{longest.capacity(modality)}: a model has the places of the longest. Set image_share there "
                        "so that it has room for as many."
                    )
        return longest

    def build(self) -> "StagedDataSet":
        """Opens the data of all stages.

        Raises:
          UserError: stages out of order or without a step, different vocabularies, or a file that cannot be read.
        """
        # Far enough for the last stage to have a step; where it ends is the run's business.
        longest = max((s.data.batch_size * s.data.schema().length for s in self.stages), default=0)
        spans = plan(self.stages, self.stages[-1].from_tokens + longest + 1 if self.stages else 0)
        opened: dict[TokenSource, TokenDataSet] = {}
        for span in spans:
            opened.setdefault(span.data, span.data.build())
        return StagedDataSet(spans, tuple(opened[span.data] for span in spans), self.schema())


class StagedDataSet:
    """Implements the `DataSet` protocol of `train.protocols`.

    Args:
      spans: The stages in steps; the end of the last is not looked at.
      sets: The data of each.
      schema: Of all of them.
    """

    def __init__(self, spans: tuple[StageSpan, ...], sets: tuple[TokenDataSet, ...], schema: TokenSchema) -> None:
        self._spans, self._sets, self._schema = spans, sets, schema
        self._parts = Parts([f"data.stages.{number}" for number in range(len(sets))], sets)
        self._begins = [0]
        for span in spans[:-1]:
            rows = (span.stop_step - span.first_step) * span.data.batch_size
            self._begins.append(self._begins[-1] + rows)

    @property
    def schema(self) -> TokenSchema:
        """The vocabulary, and the longest rows."""
        return self._schema

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is said when a run begins."""
        return self._parts.remarks()

    def files(self) -> dict[str, bytes]:
        """What a run folder is to hold of the data."""
        return self._parts.files()

    def pictures(self) -> Iterator[tuple[str, str, str, str]]:
        """Pictures for the report."""
        return self._parts.pictures()

    def num_examples(self, split: str) -> int:
        """Rows in a split of the last stage."""
        return self._sets[-1].num_examples(split)

    def fingerprint(self) -> str:
        """Hex digest of the data of all stages and of where each begins."""
        parts = [(found.fingerprint(), begin) for found, begin in zip(self._sets, self._begins, strict=True)]
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def days(self) -> tuple[tuple[str, int, int], ...]:
        """(): text has no days."""
        return ()

    def train_batches(
        self, *, start_example: int = 0, process_index: int = 0, process_count: int = 1
    ) -> Iterator[TokenBatch]:
        """This process's slice of each global batch from row `start_example` of all stages on, without end.

        Raises:
          UserError: a row at which no batch begins.
        """
        check_start(start_example)
        ends = [*self._begins[1:], None]
        for span, found, begin, end in zip(self._spans, self._sets, self._begins, ends, strict=True):
            if end is not None and start_example >= end:
                continue
            skipped = max(0, start_example - begin)
            size = span.data.batch_size
            if skipped % size:
                raise UserError(
                    f"train_batches: row {start_example} lies within a batch of {size} rows of the stage that begins "
                    f"at row {begin}. A run that was trained in other batches cannot go on with these stages."
                )
            batches = found.train_batches(
                start_example=span.first_example + skipped, process_index=process_index, process_count=process_count
            )
            count = None if end is None else (end - begin - skipped) // size
            while count is None or count > 0:
                yield next(batches)
                count = None if count is None else count - 1

    def eval_batches(self, split: str, *, process_index: int = 0, process_count: int = 1) -> Iterator[TokenBatch]:
        """One pass over a split of the last stage in file order."""
        return self._sets[-1].eval_batches(split, process_index=process_index, process_count=process_count)

    def range_batches(
        self, start: int, stop: int, *, process_index: int = 0, process_count: int = 1
    ) -> Iterator[TokenBatch]:
        """One pass over rows [start, stop) of the last stage's stream."""
        return self._sets[-1].range_batches(start, stop, process_index=process_index, process_count=process_count)
