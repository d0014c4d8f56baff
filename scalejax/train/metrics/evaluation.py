"""The scores of one split turned into metrics, and into the files of `evaluation/` in a run folder.

`evaluation/<split>.json` is what the report draws, one entry a task:

    {"format": 1, "split": "test", "examples": 33673, "tasks": [
        {"name": "label", "reliability": {"weight": [...], "predicted": [...], "observed": [...], "low": [...],
         "high": [...]}, "histogram": {"negative": [...], "positive": [...]}}]}

with the bins of `exact.reliability` (equal weight) and `exact.score_histogram` (equal width over [0, 1]).

`evaluation/<split>.npz` is what a comparison of two runs needs, in the order of the file: labels float32[N, T],
predictions float64[N, T], weights float32[N]; no pickles. Above a million examples it is not written, and such runs are
compared by their intervals alone.
"""

import dataclasses
import io
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from scalejax import json_reading
from scalejax.data import packed_files
from scalejax.errors import UserError
from scalejax.train import disk
from scalejax.train.metrics import bootstrap, exact

FOLDER = "evaluation"
PICTURES = "pictures"
FORMAT = 1
MOST_EXAMPLES = 1_000_000
"""Above this `<split>.npz` is not written: 12 bytes an example and task and more would add up."""


def evaluate(
    predictions: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    groups: ArrayLike | None = None,
    names: Sequence[str] = (),
    intervals: Literal["none", "bootstrap"] = "none",
    resamples: int = 1000,
) -> dict[str, float]:
    """Every metric of a split.

    Args:
      predictions: float[N, T]. In [0, 1].
      labels: float[N, T]. In [0, 1].
      weights: float[N], or None for 1 each.
      groups: integers[N] for GAUC (weighted by examples), or None.
      names: Names of the tasks; with two or more, a metric is called "logloss/name".
      intervals: "bootstrap" adds 95 % intervals of logloss, ne and auc, as "ne_low" and "ne_high".
      resamples: Of the bootstrap; seeded, so that equal scores give equal intervals.
    Returns:
      "examples", then for each task logloss, logloss_base (that of the base rate), ne, auc, gauc (with groups),
      calibration, base_rate and the intervals.
    Raises:
      ValueError: shapes that do not fit, or predictions outside [0, 1].
    """
    p, y, w = _arrays(predictions, labels, weights, names)
    result: dict[str, float] = {"examples": int(np.sum(w > 0))}
    for t in range(p.shape[1]):
        suffix = f"/{names[t]}" if p.shape[1] > 1 else ""
        values = _metrics(p[:, t], y[:, t], w, groups)
        if intervals == "bootstrap":
            sure = bootstrap.intervals(y[:, t], p[:, t], w, resamples=resamples)
            for metric, interval in sure.items():
                values |= {f"{metric}_low": interval.low, f"{metric}_high": interval.high}
        result |= {name + suffix: value for name, value in values.items()}
    return result


def _metrics(p: np.ndarray, y: np.ndarray, w: np.ndarray, groups: ArrayLike | None) -> dict[str, float]:
    values = {
        "logloss": exact.logloss(y, p, w),
        "logloss_base": exact.base_logloss(y, w),
        "ne": exact.normalized_entropy(y, p, w),
        "auc": exact.auc(y, p, w),
    }
    if groups is not None:
        values["gauc"] = exact.grouped_auc(y, p, groups, w).value
    return values | {"calibration": exact.calibration(y, p, w), "base_rate": exact.base_rate(y, w)}


class ScoredTask(TypedDict):
    """What is drawn of a task; numbers that are not finite are null."""

    name: str
    reliability: dict[str, list[float]]
    histogram: dict[str, list[float]]


class Diagrams(TypedDict):
    """Content of `evaluation/<split>.json`."""

    format: int
    split: str
    examples: int
    tasks: list[ScoredTask]


def save_diagrams(
    folder: pathlib.Path,
    split: str,
    predictions: ArrayLike,
    labels: ArrayLike,
    weights: ArrayLike | None = None,
    *,
    names: Sequence[str] = (),
) -> None:
    """Writes `evaluation/<split>.json` and `.npz` into a run folder, each of them whole or not at all.

    Args:
      folder: Run folder.
      split: Which split was scored.
      predictions, labels, weights, names: As in `evaluate`.
    Raises:
      UserError: the disk refuses.
    """
    p, y, w = _arrays(predictions, labels, weights, names)
    tasks: list[ScoredTask] = []
    for t in range(p.shape[1]):
        negative, positive = exact.score_histogram(y[:, t], p[:, t], w)
        tasks.append(
            {
                "name": names[t] if len(names) else "label",
                "reliability": {
                    name: values.tolist()
                    for name, values in dataclasses.asdict(exact.reliability(y[:, t], p[:, t], w)).items()
                },
                "histogram": {"negative": negative.tolist(), "positive": positive.tolist()},
            }
        )
    content: Diagrams = {"format": FORMAT, "split": split, "examples": int(np.sum(w > 0)), "tasks": tasks}
    target = folder / FOLDER
    with disk.explained(f"cannot write {target}"):
        target.mkdir(parents=True, exist_ok=True)
    arrays = target / f"{split}.npz"
    if len(w) <= MOST_EXAMPLES:
        packed = io.BytesIO()
        np.savez_compressed(packed, labels=y.astype(np.float32), predictions=p, weights=w.astype(np.float32))
        disk.write_atomically(arrays, packed.getvalue())
    else:
        arrays.unlink(missing_ok=True)  # an earlier evaluation's, of other scores
    disk.write_atomically(target / f"{split}.json", json.dumps(disk.finite(content), allow_nan=False) + "\n")


def read_diagrams(folder: pathlib.Path) -> list[Diagrams]:
    """The content of every `evaluation/*.json` of a run folder, by name of the split.

    Raises:
      UserError: a file is damaged, or of another format.
    """
    found: list[Diagrams] = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        try:
            content = json_reading.read(path)
            known = content["format"] == FORMAT
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}). Remove it; the next evaluation writes it anew.") from error
        if not known:
            raise UserError(f"{path} has format {content['format']}, this version reads {FORMAT}. Remove it.")
        found.append(content)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of a scored split that a metric made.

    Attributes:
      split: What was scored.
      name: Of letters, digits, - and _; one picture of a split has it.
      caption: A sentence below it.
      svg: The picture.
    """

    split: str
    name: str
    caption: str
    svg: str


def save_picture(folder: pathlib.Path, picture: Picture) -> None:
    """Writes a picture into a run folder, `evaluation/pictures/<split>-<name>.json`, where reports find it.

    Raises:
      ValueError: its name cannot be part of a file name.
      UserError: the disk refuses.
    """
    if not re.fullmatch(r"[\w-]+", picture.name):
        raise ValueError(f"save_picture: name must be of letters, digits, - and _; got {picture.name!r}.")
    target = folder / FOLDER / PICTURES
    with disk.explained(f"cannot write {target}"):
        target.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, **dataclasses.asdict(picture)}
    disk.write_atomically(target / f"{picture.split}-{picture.name}.json", json.dumps(content) + "\n")


def read_pictures(folder: pathlib.Path) -> list[Picture]:
    """The pictures of a run folder, by name.

    Raises:
      UserError: a file is damaged.
    """
    found = []
    for path in sorted((folder / FOLDER / PICTURES).glob("*.json")):
        try:
            content = json_reading.read(path)
            found.append(Picture(**{name: str(content[name]) for name in ("split", "name", "caption", "svg")}))
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} is damaged ({error}). Remove it; the next evaluation writes it anew.") from error
    return found


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Scored examples of one split, in the order of the file.

    Attributes:
      labels: float32[N, T].
      predictions: float64[N, T].
      weights: float32[N].
    """

    labels: np.ndarray
    predictions: np.ndarray
    weights: np.ndarray

    def same_examples(self, other: "Predictions") -> bool:
        """Whether labels and weights are equal in the same order; only then a paired comparison has a meaning."""
        return np.array_equal(self.labels, other.labels) and np.array_equal(self.weights, other.weights)


def read_predictions(folder: pathlib.Path, split: str) -> Predictions | None:
    """The content of `evaluation/<split>.npz`; None if it was not written.

    Raises:
      UserError: the file is damaged.
    """
    path = folder / FOLDER / f"{split}.npz"
    if not path.exists():
        return None
    try:
        arrays = packed_files.read_npz(path)
        return Predictions(arrays["labels"], arrays["predictions"], arrays["weights"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}). Remove it; the next evaluation writes it anew.") from error


def _arrays(
    predictions: ArrayLike, labels: ArrayLike, weights: ArrayLike | None, names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    p, y = np.asarray(predictions, np.float64), np.asarray(labels, np.float64)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, np.float64)
    if p.ndim != 2 or p.shape != y.shape or w.shape != p.shape[:1]:
        raise ValueError(
            f"evaluation: predictions and labels must have one shape [N, T] and weights [N]; got {p.shape}, {y.shape} "
            f"and {w.shape}."
        )
    if p.shape[1] > 1 and len(names) != p.shape[1]:
        raise ValueError(f"evaluation: names must name each of the {p.shape[1]} tasks; got {list(names)}.")
    return p, y, w
