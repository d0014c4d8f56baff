"""An exported click model behind HTTP: rows of all clients are scored together, in batches of a few sizes.

A bucket is a power of two of rows, with room for IDS_PER_ROW ids a row of each feature with lists; all are compiled
before the first request. A step takes requests in the order in which they came, as many as fit the largest bucket, and
fills the smallest that holds them up with rows that nobody reads. So the sizes of batches come from the load alone:
what arrives while a batch is scored is the next one.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from scalejax.errors import UserError
from scalejax.inference import reload
from scalejax.inference.server import protocol
from scalejax.inference.server.answers import broken
from scalejax.inference.server.app import Came, Job, ServerSettings, Service

IDS_PER_ROW = 16
"""Of a feature with lists, on average over a batch; rows with more take the room of several."""


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreRequest:
    """What one body wants scored.

    Attributes:
      inputs: Of the program by name, not filled up.
      size: Rows.
      samples: Answers.
    """

    inputs: Mapping[str, np.ndarray]
    size: int
    samples: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreResult:
    """Of one body.

    Attributes:
      request: The number that `submit` returned.
      outputs: Of its rows, by name, [rows, labels].
      ended: "error" where they are not finite.
      message: Of it.
      sample: Of `ScoreRequest.samples`.
    """

    request: int
    outputs: Mapping[str, np.ndarray]
    ended: str = "stop"
    message: str = ""
    sample: int = 0


@dataclasses.dataclass(frozen=True)
class ScorerStats:
    """Of a scorer; see `requests.Stats`. Between two steps nothing runs."""

    waiting: int
    compilations: int
    rows: int
    batches: int
    running: int = 0


class Scorer:
    """A `requests.AnyLoop` for `ScoreRequest`s.

    Args:
      model: What was exported, loaded.
      most: Rows of a batch, at most.
    """

    def __init__(self, model: reload.Model, *, most: int) -> None:
        self.model, self.most = model, 1 << (most - 1).bit_length()
        features: Mapping[str, dict[str, int | None]] = model.signature["features"]
        self._lists = [name for name, feature in features.items() if feature["length"] is None]
        self._waiting: dict[int, ScoreRequest] = {}
        self._numbers = itertools.count()
        self._rows = self._batches = self._warm = 0

    def warm_up(self) -> None:
        """Compiles every bucket."""
        for bucket in (1 << n for n in range(self.most.bit_length())):
            self.model.run(self.filled([], bucket))
        self._warm = self.model.compiled()

    def check(self, request: ScoreRequest) -> None:
        """Refuses what is larger than a batch."""
        if self.bucket([request]) > self.most:
            lists = f" and {self.most * IDS_PER_ROW:,} ids of a feature" if self._lists else ""
            raise UserError(
                f"rows: at most {self.most:,}{lists} fit into a request; got {request.size:,}. Send several."
            )

    def submit(self, request: ScoreRequest) -> int:
        """See `requests.AnyLoop`."""
        self.check(request)
        number = next(self._numbers)
        self._waiting[number] = request
        return number

    def cancel(self, number: int, sample: int | None = None) -> None:
        """See `requests.AnyLoop`."""
        del sample  # it has no other
        self._waiting.pop(number, None)

    def step(self) -> list[ScoreResult]:
        """Scores a batch of those that wait."""
        needed = itertools.accumulate(map(self._room, self._waiting.values()))
        fit = itertools.takewhile(lambda room: _bucket(room) <= self.most, needed)
        taken = [number for number, _ in zip(self._waiting, fit, strict=False)]
        if not taken:
            return []
        parts = [self._waiting.pop(number) for number in taken]
        found = self.model.run(self.filled(parts, self.bucket(parts)))
        ends = np.cumsum([rows.size for rows in parts]).tolist()
        self._rows, self._batches = self._rows + ends[-1], self._batches + 1
        chunks = []
        for number, begin, end in zip(taken, [0, *ends], ends, strict=False):
            outputs = {name: array[begin:end] for name, array in found.items()}
            finite = all(np.isfinite(array).all() for array in outputs.values())
            chunks.append(
                ScoreResult(number, outputs)
                if finite
                else ScoreResult(number, {}, "error", "the model's scores of these rows are not finite.")
            )
        return chunks

    @property
    def busy(self) -> bool:
        """See `requests.AnyLoop`."""
        return bool(self._waiting)

    @property
    def stats(self) -> ScorerStats:
        """See `requests.AnyLoop`."""
        compilations = self.model.compiled() - self._warm
        return ScorerStats(len(self._waiting), compilations, self._rows, self._batches)

    def bucket(self, parts: Sequence[ScoreRequest]) -> int:
        """The smallest that holds these rows; one that is not there if none does."""
        return _bucket(np.sum([self._room(part) for part in parts], axis=0))

    def _room(self, part: ScoreRequest) -> np.ndarray:
        """What a request takes of a batch: rows, and by each feature with lists, in rows."""
        return np.array([part.size, *(part.inputs[f"ids/{name}"].size / IDS_PER_ROW for name in self._lists)])

    def filled(self, parts: Sequence[ScoreRequest], bucket: int) -> dict[str, np.ndarray]:
        """Inputs of the program: rows of all, and as many more as the bucket wants."""
        found: dict[str, np.ndarray] = {}
        for name, described in self.model.signature["inputs"].items():
            first, *rest = described["shape"]
            array = np.zeros((bucket * (1 if first == "batch" else IDS_PER_ROW), *rest), described["dtype"])
            given = [part.inputs[name] for part in parts]
            count = sum(map(len, given))
            if given:
                array[:count] = np.concatenate(given)
            found[name] = array
        return found


def _bucket(room: np.ndarray) -> int:
    return 1 << (math.ceil(room.max()) - 1).bit_length()


class ScoreServer(Service):
    """A click model behind HTTP.

    Args:
      scorer: Scores rows.
      settings: See there; `max_queue_tokens` are rows.
      failed: Called, in some thread, when the scorer has failed.
    """

    def __init__(self, scorer: Scorer, settings: ServerSettings, *, failed: Callable[[], None] = lambda: None) -> None:
        signature, self._scorer = scorer.model.signature, scorer
        described = {name: signature[name] for name in ("features", "dense", "labels")} | {"max_rows": scorer.most}
        # One request begins with the next step for certain; of the others it depends on their rows.
        settings = dataclasses.replace(settings, slots=1)
        super().__init__(scorer, settings, routes={"/v1/score": self._job}, described=described, failed=failed)

    def _job(self, body: bytes, came: Came) -> "ScoreJob":
        signature, model = self._scorer.model.signature, self._scorer.model
        rows = protocol.read_rows(body, self.settings.name, signature)
        lengths = {name: np.array(counts, np.int32) for name, counts in rows.lengths.items()}
        ids = {
            name: np.array(values, np.int32).reshape(-1 if name in lengths else (rows.count, -1))
            for name, values in rows.ids.items()
        }
        dense = np.array(rows.dense, np.float32).reshape(rows.count, len(signature["dense"]))
        inputs = model.inputs(ids, dense, lengths)
        for name, counts in lengths.items():
            inputs[f"ids/{name}"] = inputs[f"ids/{name}"][: counts.sum()]
        return ScoreJob(self, ScoreRequest(inputs, rows.count), came, signature["labels"])


class ScoreJob(Job):
    """A body with rows."""

    def __init__(self, server: ScoreServer, rows: ScoreRequest, came: Came, labels: Sequence[str]) -> None:
        super().__init__(server, [rows], came, param="rows")
        self._labels = labels
        self._scores: ScoreResult | None = None

    def _add(self, place: int, chunk: ScoreResult) -> None:
        del place
        self._scores = chunk
        self._service.metrics.ended(chunk.ended)
        if chunk.ended == "error":
            self.fail(broken(chunk.message))
        self._end()

    def _found(self) -> object:
        assert self._scores is not None
        columns = {name: array.tolist() for name, array in self._scores.outputs.items()}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        data = [{"index": number, **row} for number, row in enumerate(rows)]
        usage = {"rows": len(data)}
        name = self._service.settings.name
        return {"object": "list", "model": name, "labels": list(self._labels), "data": data, "usage": usage}

    def _unended(self) -> int:
        return int(self._scores is None)
