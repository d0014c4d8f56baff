"""FROC: sensitivity of a detector against its false positives a picture.

A threshold on scores keeps some of the boxes that were found. A lesion is found if a box that is kept overlaps it
enough; it counts once. A box that overlaps no lesion enough is a false positive; a further one on a lesion that was
found is neither. The curve has a point for each score that occurs, is linear between them, begins at (0, 0) and keeps
the last sensitivity beyond its end, as the evaluations of DeepLesion have it (CADLab's MULAN).

Boxes are (left, top, right, bottom); those with score 0 are not there.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from scalejax.data.images import pictures
from scalejax.data.images.pictures import Drawn, Panel
from scalejax.train.metrics.evaluation import Picture, save_picture
from scalejax.train.metrics.protocol import Collected, MetricBase, Value

if TYPE_CHECKING:
    pass

FALSE_POSITIVES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""A picture, at which sensitivities are told."""
_SHOWN = 12
"""Most pictures of a sheet."""


def overlaps(found: np.ndarray, truth: np.ndarray, criterion: Literal["iou", "iobb"] = "iou") -> np.ndarray:
    """float64[F, T] of boxes [F, 4] with lesions [T, 4].

    Args:
      found: What a detector says.
      truth: What there is.
      criterion: "iou": intersection over union. "iobb": over the box that was found, as the first detectors on
        DeepLesion were scored.
    """
    a, b = np.asarray(found, np.float64)[:, None], np.asarray(truth, np.float64)[None]
    both = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None).prod(-1)
    own, other = (a[..., 2:] - a[..., :2]).prod(-1), (b[..., 2:] - b[..., :2]).prod(-1)
    over = own + other - both if criterion == "iou" else own + 0 * both
    return np.divide(both, over, out=np.zeros_like(both), where=over > 0)


@dataclasses.dataclass(frozen=True)
class FrocCurve:
    """Of some pictures, see the module.

    Attributes:
      thresholds: float64[S], each score that occurs, falling.
      false_positives: float64[S], a picture, of the boxes with at least this score.
      sensitivity: float64[S], of the lesions that count.
      found_at: float64[L], for each lesion the highest score of a box that finds it; -inf = none does.
      overlap: float64[L], of that box.
    """

    thresholds: np.ndarray
    false_positives: np.ndarray
    sensitivity: np.ndarray
    found_at: np.ndarray
    overlap: np.ndarray

    def at(self, false_positives: float) -> float:
        """Sensitivity at so many false positives a picture; NaN where there is no lesion."""
        if not len(self.found_at):
            return float("nan")
        x, y = np.append(0.0, self.false_positives), np.append(0.0, self.sensitivity)
        last = np.append(x[1:] != x[:-1], True)  # the highest sensitivity of equal numbers of false positives
        return float(np.interp(false_positives, x[last], y[last]))

    def overlap_of_hits(self, false_positives: float) -> float:
        """Mean overlap of the lesions that are found with no more false positives than this; NaN without any."""
        inside = self.thresholds[self.false_positives <= false_positives]
        hits = self.found_at >= inside.min(initial=np.inf)
        return float(self.overlap[hits].mean()) if hits.any() else float("nan")


def froc(
    boxes: Sequence[np.ndarray],
    scores: Sequence[np.ndarray],
    truth: Sequence[np.ndarray],
    *,
    counted: Sequence[np.ndarray] | None = None,
    criterion: Literal["iou", "iobb"] = "iou",
    enough: float = 0.5,
) -> FrocCurve:
    """The curve of some pictures.

    Args:
      boxes: Of each picture float[F, 4], what was found.
      scores: Of each float[F]; 0 = not there.
      truth: Of each float[T, 4], its lesions.
      counted: Of each bool[T], which lesions the sensitivity is of: a box on another one is still no false positive.
      criterion: See `overlaps`.
      enough: Overlap from which on a box finds a lesion.
    """
    wrong: list[np.ndarray] = []
    found_at: list[np.ndarray] = []
    overlap: list[np.ndarray] = []
    for number, (own, score, lesions) in enumerate(zip(boxes, scores, truth, strict=True)):
        real = np.asarray(score) > 0
        own, score = np.asarray(own)[real], np.asarray(score, np.float64)[real]
        shared = overlaps(own, np.reshape(lesions, (-1, 4)), criterion)
        hits = shared >= enough
        wrong.append(score[~hits.any(1)])
        held = np.where(hits, score[:, None], -np.inf)
        best = held.max(0, initial=-np.inf)
        # Of equal scores the larger overlap.
        over = np.where(hits & (held == best), shared, 0).max(0, initial=0)
        which = np.ones(len(best), bool) if counted is None else np.asarray(counted[number], bool)
        found_at.append(best[which])
        overlap.append(over[which])
    lesion_scores, false_scores = np.concatenate(found_at), np.sort(np.concatenate(wrong))
    present = lesion_scores[np.isfinite(lesion_scores)]
    thresholds = np.unique(np.concatenate([present, false_scores]))[::-1]
    found = np.searchsorted(np.sort(-present), -thresholds, side="right")
    false = len(false_scores) - np.searchsorted(false_scores, thresholds, side="left")
    return FrocCurve(
        thresholds,
        false / len(boxes),
        found / max(len(lesion_scores), 1),
        lesion_scores,
        np.concatenate(overlap),
    )


def boxes_of(ends: np.ndarray, padding: float = 0.0) -> np.ndarray:
    """float64[..., 4]: the smallest box around points [..., K, 2], with padding; NaN where there is no object."""
    ends = np.asarray(ends, np.float64)
    return np.concatenate([ends.min(-2) - padding, ends.max(-2) + padding], -1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Froc(MetricBase):
    """Sensitivities at some numbers of false positives a picture, exact, in evaluations.

    The loss gives "boxes" float[B, M, 4], "scores" float[B, M], "diameters" float[B, M, 4, 2] and "regressed" bool[B,
    M], whether the short one was in no key points; host batches have "images" and "ends" float[B, N, 4, 2], NaN for no
    object. Its first value, by which checkpoints are kept, is the mean of the sensitivities at 0.5 to 16.

    Attributes:
      padding: Pixels around the ends that belong to the box of a lesion.
      criterion: See `overlaps`.
      enough: Overlap from which on a box finds a lesion.
    """

    padding: float = 0.0
    criterion: Literal["iou", "iobb"] = "iou"
    enough: float = 0.5

    @property
    def collects(self) -> tuple[str, ...]:
        return ("boxes", "scores", "diameters", "regressed", "ends")

    @property
    def shows(self) -> tuple[str, ...]:
        return ("images",)

    @property
    def counts(self) -> tuple[str, str]:
        return ("lesions", "lesions")

    @property
    def values(self) -> tuple[Value, ...]:
        unit = f"share of lesions, {self.criterion.upper().replace('IOU', 'IoU')} >= {self.enough:g}"
        each = [
            Value(
                name=_name(at),
                title=f"sensitivity at {at:g} FP",
                unit=f"{unit}, {at:g} false positives a picture",
                better="high",
                shown="table",
            )
            for at in FALSE_POSITIVES
        ]
        points = ", ".join(f"{at:g}" for at in FALSE_POSITIVES)
        mean = Value(name="froc", title="FROC", unit=f"{unit}, mean at {points} false positives", better="high")
        overlap = Value(name="hit_overlap", title="overlap of hits at 4 FP", better="high", shown="table")
        regressed = Value(name="regressed", title="share of hits whose short diameter is regressed", shown="records")
        return (mean, *each, overlap, regressed, Value(name="lesions", title="lesions", shown="records"))

    def exact(self, collected: Collected, *, intervals: Literal["none", "bootstrap"]) -> dict[str, float]:
        del intervals
        curve = self.curve(collected)
        each = {_name(at): curve.at(at) for at in FALSE_POSITIVES}
        regressed = self._of_hits(collected, collected["regressed"], _threshold(curve, 4.0))
        return {
            "froc": float(np.mean(list(each.values()))),
            **each,
            "hit_overlap": curve.overlap_of_hits(4.0),
            "regressed": float(regressed.mean()) if len(regressed) else float("nan"),
            "lesions": float(len(curve.found_at)),
        }

    def _of_hits(self, collected: Collected, values: np.ndarray, threshold: float) -> np.ndarray:
        """What `values` [B, M] say of the boxes that are kept at a threshold and find a lesion."""
        hits = [
            kept & (overlaps(boxes, lesions, self.criterion) >= self.enough).any(1)
            for boxes, kept, lesions in zip(
                collected["boxes"], collected["scores"] >= threshold, self._lesions(collected), strict=True
            )
        ]
        return values[np.array(hits, bool).reshape(values.shape)]

    def _lesions(self, collected: Collected) -> list[np.ndarray]:
        return [boxes_of(ends[_there(ends)], self.padding) for ends in collected["ends"]]

    def curve(self, collected: Collected) -> FrocCurve:
        """FROC of collected outputs."""
        return froc(
            list(collected["boxes"]),
            list(collected["scores"]),
            self._lesions(collected),
            criterion=self.criterion,
            enough=self.enough,
        )

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: object) -> None:
        del sums
        curve = self.curve(collected)
        last = self.exact(collected, intervals="none")
        caption = (
            f"Sensitivity against false positives a picture, {len(curve.found_at)} lesions in "
            f"{len(collected['scores'])} pictures; mean at {', '.join(f'{at:g}' for at in FALSE_POSITIVES)}: "
            f"{last['froc']:.3f}."
        )
        save_picture(folder, Picture(split=split, name="froc", caption=caption, svg=_drawn_curve(curve)))
        threshold = _threshold(curve, 1.0)
        caption = (
            "Diameters as they are (green), and as they were found, with their boxes, at one false positive a picture "
            "(dashed; a star where the short one is regressed)."
        )
        panels = [panel(collected, number, threshold) for number in range(min(_SHOWN, len(collected["images"])))]
        save_picture(folder, Picture(split=split, name="lesions", caption=caption, svg=pictures.grid(panels)))


def _name(at: float) -> str:
    return f"sensitivity_{at:g}"


def _there(ends: np.ndarray) -> np.ndarray:
    return np.asarray(np.isfinite(ends).all((-2, -1)))


def _threshold(curve: FrocCurve, false_positives: float) -> float:
    """The lowest score with no more false positives a picture."""
    return float(curve.thresholds[curve.false_positives <= false_positives].min(initial=np.inf))


def panel(collected: Collected, number: int, threshold: float) -> Panel:
    """A picture with its diameters and with what was found at a threshold."""
    ends = collected["ends"][number]
    drawn = [Drawn(kind="polygon", points=pair) for cross in ends[_there(ends)] for pair in (cross[:2], cross[2:])]
    for kept in np.flatnonzero(collected["scores"][number] >= threshold):
        label = "*" if collected["regressed"][number, kept] else ""
        drawn.append(Drawn(kind="box", points=collected["boxes"][number, kept].reshape(2, 2), said=True, label=label))
        cross = collected["diameters"][number, kept]
        drawn += [Drawn(kind="polygon", points=pair, said=True) for pair in (cross[:2], cross[2:])]
    return Panel(pixels=collected["images"][number].astype(np.float32), drawn=tuple(drawn))


def _drawn_curve(curve: FrocCurve) -> str:
    """The curve over false positives on a logarithmic axis."""
    left, top, width, height = 44, 12, 340, 200
    first, final = np.log2(FALSE_POSITIVES[0] / 4), np.log2(FALSE_POSITIVES[-1])

    def place(at: float, sensitivity: float) -> str:
        x = left + width * (np.log2(at) - first) / (final - first)
        return f"{x:.1f},{top + height * (1 - sensitivity):.1f}"

    at = np.geomspace(FALSE_POSITIVES[0] / 4, FALSE_POSITIVES[-1], 120)
    line = " ".join(place(x, curve.at(x)) for x in at.tolist())
    text = 'font-family="sans-serif" font-size="11" fill="#444"'
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="400" height="250" viewBox="0 0 400 250">',
        '<rect width="400" height="250" fill="#fff"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + height * (1 - share)
        parts.append(f'<path d="M{left} {y}h{width}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end" {text}>{share:g}</text>')
    for x in FALSE_POSITIVES:
        where = place(x, 0).split(",")[0]
        parts.append(f'<text x="{where}" y="{top + height + 14}" text-anchor="middle" {text}>{x:g}</text>')
    middle = left + width / 2
    parts.append(f'<text x="{middle}" y="244" text-anchor="middle" {text}>false positives a picture</text>')
    parts.append(f'<polyline points="{line}" fill="none" stroke="#07c" stroke-width="2"/></svg>')
    return "".join(parts)
