"""Objects as key points in maps: targets, losses, and how the peaks of maps become boxes.

The key points of an object are its extremes by coordinate, top, left, bottom and right, and the centre between them
(ExtremeNet, Zhou et al., 2019, arXiv 1901.08043; maps and their loss are CornerNet's, Law and Deng, 2018).

Points are (x, y) in pixels; a cell of a map is `stride` pixels wide, and a point lies in cell floor(point / stride).
Extremes may coincide. Every shape is static and the code knows no mesh.

    B pictures    N objects, NaN where there is none    h, w cells    K peaks of a map    P pairs of peaks    M boxes
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from scalejax.nn import wide

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int

EXTREMES = ("top", "left", "bottom", "right")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """How peaks become boxes.

    Attributes:
      peaks: K, the highest peaks of a map that are looked at.
      threshold: Least height of a peak of an extreme.
      centre_threshold: Least height of the map of centres between four extremes.
      aggregation: How much of the heights beside it along the edge of an object a point of an extreme is given; 0 =
        nothing.
      boxes: M, the best groups that are kept.
      sigma: Of soft-NMS: a box loses the factor exp(-IoU^2 / sigma) for each better one.
      overlap: IoU up to which a box loses nothing.
      ghosts: A box is halved if the boxes inside of it, itself among them, have more than so many times its score;
        None = never.
    """

    peaks: int = 40
    threshold: float = 0.1
    centre_threshold: float = 0.1
    aggregation: float = 0.1
    boxes: int = 1000
    sigma: float = 0.5
    overlap: float = 0.0
    ghosts: float | None = 4.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Targets:
    """What maps should be.

    Attributes:
      heat: float[B, h, w, 5], in [0, 1], exactly 1 at key points; of the extremes and then of centres.
      cells: int32[B, N, 5, 2], x and y of the cells of key points.
      extremes: float[B, N, 4, 2], pixels.
      ends: float[B, N, 4, 2], pixels, of the diameters; 0 where there is no object.
      present: bool[B, N].
    """

    heat: jax.Array
    cells: jax.Array
    extremes: jax.Array
    ends: jax.Array
    present: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Groups:
    """The best groups of four peaks.

    Attributes:
      scores: float[B, M], 0 where there is none.
      picked: int32[B, M, 4], numbers of peaks, in the order of `EXTREMES`.
      centres: int32[B, M, 2], x and y of the cell of the centre.
    """

    scores: jax.Array
    picked: jax.Array
    centres: jax.Array


def extremes(points: "Float[Array, '*batch 4 2']") -> "Float[Array, '*batch 4 2']":
    """The top, left, bottom and right of four points, by coordinate: one point may be several, the first of equals."""
    x, y = points[..., 0], points[..., 1]
    which = jnp.stack([y.argmin(-1), x.argmin(-1), y.argmax(-1), x.argmax(-1)], -1)
    return jnp.take_along_axis(points, which[..., None], axis=-2)


def radius(width: jax.Array, height: jax.Array, iou: float = 0.7) -> jax.Array:
    """How far both corners of a box of so many cells may move, so that its IoU with itself stays above `iou`.

    The least of three cases, a quadratic equation each: one corner out and one in, both in, both out (CornerNet, in the
    form whose roots were mended).
    """
    total, area = width + height, width * height

    def root(a: float, b: jax.Array, c: jax.Array) -> jax.Array:
        return (b - jnp.sqrt(b * b - 4 * a * c)) / (2 * a)

    moved = root(1, total, area * (1 - iou) / (1 + iou))
    inner = root(4, 2 * total, (1 - iou) * area)
    outer = -root(4 * iou, 2 * iou * total, (iou - 1) * area)
    return jnp.minimum(jnp.minimum(moved, inner), outer)


def centre_of(left: jax.Array, right: jax.Array) -> jax.Array:
    """The cell between two, rounded down: floor((left + right + .5) / 2) of integers."""
    return (left + right) // 2


def cells_of(points: "Float[Array, '*batch 2']", height: int, width: int, stride: int) -> "Int[Array, '*batch 2']":
    """The cells of points; those outside of a map of height x width are moved to its edge."""
    x, y = (jnp.floor(points[..., n] / stride).astype(jnp.int32) for n in (0, 1))
    return jnp.stack([jnp.clip(x, 0, width - 1), jnp.clip(y, 0, height - 1)], -1)


def targets(ends: "Float[Array, 'batch objects 4 2']", height: int, width: int, stride: int) -> Targets:
    """Targets for maps of height x width cells, from the ends of diameters, NaN where there is no object.

    The cell of a centre is the one that grouping looks at, between the cells of the extremes; ExtremeNet takes that of
    the middle, which may be its neighbour.
    """
    present = jnp.isfinite(ends).all((-2, -1))
    ends = jnp.where(present[..., None, None], ends, 0)
    outermost = extremes(ends)  # B N 4 2
    cells = cells_of(outermost, height, width, stride)
    top, left, bottom, right = jnp.moveaxis(cells, -2, 0)
    centre = jnp.stack([centre_of(left[..., 0], right[..., 0]), centre_of(top[..., 1], bottom[..., 1])], -1)
    cells = jnp.concatenate([cells, centre[..., None, :]], -2)  # B N 5 2
    box = jnp.ceil((ends.max(-2) - ends.min(-2)) / stride)
    reach = jnp.floor(radius(box[..., 0], box[..., 1]))[..., None, None]  # B N 1 1
    columns = jnp.arange(width).reshape(1, 1, 1, -1) - cells[..., :1]  # B N 5 w
    rows = jnp.arange(height).reshape(1, 1, 1, -1) - cells[..., 1:]  # B N 5 h

    def bump(away: jax.Array) -> jax.Array:
        away = away.astype(reach.dtype)
        falls = jnp.exp(-(away * away) / (2 * jnp.square((2 * reach + 1) / 6)))
        return jnp.where((abs(away) <= reach) & present[..., None, None], falls, 0)

    heat = (bump(rows)[..., :, None] * bump(columns)[..., None, :]).max(1)  # B 5 h w
    return Targets(jnp.moveaxis(heat, 1, -1), cells, outermost, ends, present)


def focal(logits: "Float[Array, 'batch h w maps']", heat: "Float[Array, 'batch h w maps']") -> "Float[Array, 'batch']":
    """Focal loss of each picture, summed over cells and maps: -(1-p)^2 log p where heat = 1, else with (1-heat)^4.

    p is cut to [1e-4, 1 - 1e-4]. To be divided by the number of objects.
    """
    p = jnp.clip(jax.nn.sigmoid(logits.astype(wide(logits.dtype))), 1e-4, 1 - 1e-4)
    at, off = jnp.square(1 - p) * jnp.log(p), (1 - heat) ** 4 * jnp.square(p) * jnp.log1p(-p)
    return -jnp.where(heat == 1, at, off).sum((1, 2, 3))


def smooth_l1(x: jax.Array) -> jax.Array:
    """x^2 / 2 within 1 of 0, |x| - 1/2 outside."""
    return jnp.where(abs(x) < 1, 0.5 * x * x, abs(x) - 0.5)


def at_cells(maps: "Float[Array, 'batch h w *values']", cells: "Int[Array, 'batch *n 2']") -> jax.Array:
    """What maps say at cells (x, y): float[B, *n, *values]."""
    return jax.vmap(lambda of, at: of[at[..., 1], at[..., 0]])(maps, cells)


def aggregated(heat: "Float[Array, '*shape']", axis: int, weight: float) -> "Float[Array, '*shape']":
    """Edge aggregation: heights plus `weight` times those beside them along an axis, from both sides.

    From each side those are summed that come after one another without falling, up to the point itself, which is not
    counted.
    """
    lines = jnp.moveaxis(heat, axis, 0)

    def further(carry: tuple[jax.Array, jax.Array], now: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        before, total = carry
        beside = jnp.where(now >= before, total, 0)
        return (now, now + beside), beside

    begin = (jnp.full_like(lines[0], jnp.inf), jnp.zeros_like(lines[0]))
    beside = sum(jax.lax.scan(further, begin, lines, reverse=back)[1] for back in (False, True))
    return heat + weight * jnp.moveaxis(jnp.asarray(beside), 0, axis)


def peaks(heat: "Float[Array, 'batch maps h w']") -> "Float[Array, 'batch maps h w']":
    """Heights that none of the eight cells around them exceeds; 0 elsewhere."""
    highest = jax.lax.reduce_window(heat, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 1, 1), "SAME")
    return jnp.where(heat == highest, heat, 0)


def top(
    heat: "Float[Array, 'batch maps h w']", count: int
) -> "tuple[Float[Array, 'batch maps k'], Int[Array, 'batch maps k 2']]":
    """The highest cells of maps, highest first, and their x and y."""
    width = heat.shape[-1]
    heights, cells = jax.lax.top_k(heat.reshape(*heat.shape[:2], -1), count)
    return heights, jnp.stack([cells % width, cells // width], -1)


def group(
    scores: "Float[Array, 'batch 4 k']",
    cells: "Int[Array, 'batch 4 k 2']",
    centres: "Float[Array, 'batch h w']",
    how: Grouping,
) -> Groups:
    """All groups of a top, a left, a bottom and a right that fit, with the map of centres high between; the best M.

    Of a group no extreme lies beyond the one whose name says so, equality being allowed, and its score is
    (top + left + bottom + right + 2 centre) / 6. Instead of K^4 groups, pairs of top and bottom are joined with pairs
    of left and right, among few peaks or all, as the fullest map has them above the threshold.

    Args:
      scores: Heights of peaks, falling.
      cells: Where they are, x and y.
      centres: The map of centres.
      how: Thresholds, and M.
    """
    count, live = scores.shape[-1], scores >= how.threshold
    few = [number for number in _FEW if number < count]
    joins = [jax.vmap(functools.partial(_join_first, first=number, how=how)) for number in few]
    which = jnp.searchsorted(jnp.array([*few, count], jnp.int32), live.sum(-1, dtype=jnp.int32).max())
    joins += [functools.partial(_join_fitting, how=how)]
    return jax.lax.switch(which, joins, scores, cells, centres)


_FEW = (8, 12, 16, 24)
"""Numbers of peaks among which all pairs are joined; among more, those are looked for that fit."""


def _join_first(scores: jax.Array, cells: jax.Array, centres: jax.Array, *, first: int, how: Grouping) -> Groups:
    """The groups of one picture, among the first peaks of each map."""
    number = jnp.arange(first * first)
    pairs = number // first * scores.shape[-1] + number % first
    return _join(scores, cells, centres, jnp.stack([pairs, pairs]), how=how)


def _join_fitting(scores: jax.Array, cells: jax.Array, centres: jax.Array, *, how: Grouping) -> Groups:
    """The groups of some pictures, among the pairs that fit: usually little more than half of all."""
    count, live = scores.shape[-1], scores >= how.threshold

    def fit(first: int, second: int, axis: int) -> jax.Array:
        one, other = cells[:, first, :, None, axis], cells[:, second, None, :, axis]
        both = live[:, first, :, None] & live[:, second, None, :] & (one <= other)
        return both.reshape(len(both), -1)

    fits = jnp.stack([fit(0, 2, 1), fit(1, 3, 0)], 1)  # B 2 K*K
    most, every = fits.sum(-1, dtype=jnp.int32).max(), jnp.arange(count * count, dtype=jnp.int32)
    places = jnp.where(fits, jnp.cumsum(fits, -1, dtype=jnp.int32) - 1, count * count)

    def joined(size: int) -> Callable[[jax.Array], Groups]:
        def numbers(at: jax.Array) -> jax.Array:
            return jnp.full(size, count * count, jnp.int32).at[at].set(every, mode="drop")

        def one(scores: jax.Array, cells: jax.Array, centres: jax.Array, places: jax.Array) -> Groups:
            return _join(scores, cells, centres, jnp.stack([numbers(places[0]), numbers(places[1])]), how=how)

        return lambda places: jax.vmap(one)(scores, cells, centres, places)

    half = -(-3 * count * count // 4)
    return jax.lax.cond(most <= half, joined(half), joined(count * count), places)


def _join(scores: jax.Array, cells: jax.Array, centres: jax.Array, pairs: jax.Array, *, how: Grouping) -> Groups:
    """The groups of one picture.

    The best M groups are in the M rows whose best is best, a row being all groups of one pair of top and bottom: only
    those are sorted, and what all pairs have is never written.

    Args:
      scores: As for `group`.
      cells: Likewise.
      centres: Likewise.
      pairs: int[2, P], pairs of top and bottom and pairs of left and right, by the number of the first x K + that of
        the second; K^2 = none.
      how: Likewise.
    """
    count, size = scores.shape[-1], pairs.shape[1]
    (top_, left), (bottom, right) = jnp.minimum(pairs // count, count - 1), pairs % count  # P each
    t, l, b, r = (cells[n, which] for n, which in enumerate((top_, left, bottom, right)))  # P 2
    columns = centre_of(l[:, 0], r[:, 0])
    between = centres[:, columns]  # h P

    def of_pair(real: jax.Array, one: jax.Array, other: jax.Array, fits: jax.Array) -> jax.Array:
        """The score of a pair, -inf if it is none, does not fit or a peak is too low."""
        high = jnp.minimum(one, other) >= how.threshold
        return jnp.where((real < count * count) & fits & high, one + other, -jnp.inf)

    # Of a pair of left and right: what a top must not be below, a bottom not above; its own left and right; its score.
    high, low = jnp.minimum(l, r)[None, :, 1], jnp.maximum(l, r)[None, :, 1]
    leftmost, rightmost = l[None, :, 0], r[None, :, 0]
    level = of_pair(pairs[1], scores[1, left], scores[3, right], l[:, 0] <= r[:, 0])[None]
    # Of a pair of top and bottom: row of the centre, its top and bottom, what it lies between, its score.
    of = {
        "row": centre_of(t[:, 1], b[:, 1]),
        "top": t[:, 1],
        "bottom": b[:, 1],
        "least": jnp.minimum(t, b)[:, 0],
        "most": jnp.maximum(t, b)[:, 0],
        "score": of_pair(pairs[0], scores[0, top_], scores[2, bottom], t[:, 1] <= b[:, 1]),
    }

    def of_rows(of: dict[str, jax.Array]) -> jax.Array:
        """Scores of the groups of some pairs of top and bottom with all of left and right, 0 where they do not fit."""
        centre = between[of["row"]]
        row = {name: values[:, None] for name, values in of.items()}
        fits = (row["top"] <= high) & (row["bottom"] >= low) & (leftmost <= row["least"]) & (rightmost >= row["most"])
        total = (row["score"] + level + 2 * centre) / 6
        return jnp.where(fits & (centre >= how.centre_threshold), jnp.maximum(total, 0), 0)

    kept = min(how.boxes, size)
    chosen = jax.lax.top_k(of_rows(of).max(1), kept)[1]
    some = {name: values[chosen] for name, values in of.items()}
    best, which = jax.lax.top_k(of_rows(some).reshape(-1), min(how.boxes, kept * size))
    upright, level_ = chosen[which // size], which % size
    picked = jnp.stack([top_[upright], left[level_], bottom[upright], right[level_]], -1).astype(jnp.int32)
    where = jnp.stack([columns[level_], of["row"][upright]], -1)
    missing = ((0, how.boxes - len(best)), (0, 0))
    return Groups(jnp.pad(best, missing[0]), jnp.pad(picked, missing), jnp.pad(where, missing))


def iou(a: "Float[Array, '*batch 4']", b: "Float[Array, '*batch 4']") -> "Float[Array, '*batch']":
    """Intersection over union of boxes (left, top, right, bottom); 0 where both are empty."""
    both = jnp.clip(jnp.minimum(a[..., 2:], b[..., 2:]) - jnp.maximum(a[..., :2], b[..., :2]), 0).prod(-1)
    either = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - both
    return jnp.where(either > 0, both / jnp.where(either > 0, either, 1), 0)


def soft_nms(
    boxes: "Float[Array, 'batch m 4']", scores: "Float[Array, 'batch m']", *, sigma: float, overlap: float = 0.0
) -> "Float[Array, 'batch m']":
    """Scores after soft-NMS (Bodla et al., 2017): each loses exp(-IoU^2 / sigma) for every box that went before it.

    The highest score that is left goes next. Overlaps up to `overlap` cost nothing; with a small sigma this is hard
    NMS. What falls below .001 is 0.
    """
    shared = iou(boxes[:, :, None], boxes[:, None])
    factor = jnp.where(shared > overlap, jnp.exp(-(shared * shared) / sigma), 1)  # B M M
    each = jnp.arange(len(boxes))

    def next_one(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
        now, waits = carry
        best = jnp.where(waits, now, -1).argmax(-1)
        waits = waits.at[each, best].set(False)
        return (jnp.where(waits, now * factor[each, best], now), waits), None

    waiting = jnp.ones(scores.shape, bool)
    (now, _), _ = jax.lax.scan(next_one, (scores, waiting), None, length=scores.shape[1])
    return jnp.where(now >= 1e-3, now, 0)


def without_ghosts(
    boxes: "Float[Array, 'batch m 4']", scores: "Float[Array, 'batch m']", times: float
) -> "Float[Array, 'batch m']":
    """Halves the scores above .2 of boxes that have more than `times` their score inside, their own included.

    Such a box is made of extremes of several objects. All are judged by the scores that come in; ExtremeNet goes from
    one to the next.
    """
    a, b = boxes[:, :, None], boxes[:, None]  # b inside of a
    inside = ((b[..., :2] >= a[..., :2]) & (b[..., 2:] <= a[..., 2:])).all(-1)
    total = jnp.where(inside, scores[:, None], 0).sum(-1)
    return jnp.where((scores > 0.2) & (total > times * scores), scores / 2, scores)


def farthest(points: "Float[Array, '*batch n 2']") -> "Float[Array, '*batch 2 2']":
    """The two points that are farthest from each other, the first of equals."""
    count = points.shape[-2]
    away = jnp.square(points[..., :, None, :] - points[..., None, :, :]).sum(-1)
    which = away.reshape(*away.shape[:-2], -1).argmax(-1)[..., None]
    both = jnp.concatenate([which // count, which % count], -1)
    return jnp.take_along_axis(points, both[..., None], axis=-2)


def diameters(
    outermost: "Float[Array, '*batch 4 2']", regressed: "Float[Array, '*batch 4 2']", near: float
) -> "tuple[Float[Array, '*batch 4 2'], Bool[Array, '*batch']]":
    """Ends of the long and then of the short diameter, and whether the short one is that of the regression.

    Four extremes apart from each other are the ends of both. Where two are no farther than `near` apart, they are one
    end of the long diameter, the two farthest are its ends, and the extremes do not say where the short one is.
    """
    upright, level = outermost[..., ::2, :], outermost[..., 1::2, :]
    neighbours = jnp.linalg.norm(outermost - jnp.roll(outermost, 1, -2), axis=-1)
    coincide = (neighbours <= near).any(-1)

    def ordered(one: jax.Array, other: jax.Array) -> jax.Array:
        longer = (_length(one) >= _length(other))[..., None, None]
        return jnp.concatenate([jnp.where(longer, one, other), jnp.where(longer, other, one)], -2)

    apart = ordered(upright, level)
    shorter = ordered(regressed[..., :2, :], regressed[..., 2:, :])[..., 2:, :]
    close = jnp.concatenate([farthest(outermost), shorter], -2)
    return jnp.where(coincide[..., None, None], close, apart), coincide


def _length(ends: jax.Array) -> jax.Array:
    return jnp.linalg.norm(ends[..., 0, :] - ends[..., 1, :], axis=-1)
