"""Random changes of pictures, and of the masks and points that belong to them.

Random numbers are hashes of (seed, number of the example, channel, which number): no state, any order, all examples of
a batch at once. Arrays go by their names:

    images     number[B, H, W, C]            resampled between pixels (bilinear)
    masks, instances  integers[B, H, W]      the nearest pixel; 0 beyond the edge
    points     float32[B, objects, 4 or 5, 2]  x and y of the top, left, bottom and right point, and of a centre
    ends       float32[B, objects, K, 2]     x and y of end points, such as those of a cross, in an order of their own

A point lies on the middle of a pixel where it is a whole number, as SciPy and OpenCV have it. NaN = not there. What
points are called is decided anew after a change: by the end points where there are some, else by the four themselves.
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from scalejax.data.arrays import Arrays
from scalejax.data.images.files import check_size
from scalejax.data.permutation import key_of, mix
from scalejax.errors import UserError, check_at_least

_MASKS = ("masks", "instances")
_POINTS = ("points", "ends")
_NOISE = 0x01D5E  # keeps the hashes of noise apart from those of the other numbers


def uniform(numbers: np.ndarray, count: int, *key: int) -> np.ndarray:
    """float64[M, count] in [0, 1) for int64[M] numbers of examples: hashes of a key, the example and the column."""
    base = np.uint64(key_of(*key))
    odd = np.uint64(0x9E3779B97F4A7C15)
    rows = mix(base + numbers.astype(np.uint64) * odd)[:, None]
    return (mix(rows + np.arange(1, count + 1, dtype=np.uint64)[None] * odd) >> np.uint64(11)) * 2.0**-53


def relabel(ends: np.ndarray) -> np.ndarray:
    """The top, left, bottom and right of K points by coordinate; one point may be several of them.

    Of points that are equally far out the top is the leftmost, the left one the lowest, the bottom the rightmost and
    the right one the highest, whatever their order: a quarter turn of the points is one of the names.

    Args:
      ends: float[..., K, 2], x and y; y grows downwards.
    Returns:
      float[..., 4, 2]; NaN where one of the K is.
    """
    x, y = ends[..., 0], ends[..., 1]
    order = ((y, x), (x, -y), (-y, -x), (-x, y))
    chosen = []
    for first, second in order:
        # Both minima are NaN where a coordinate is; argmin then is any, which the last line mends.
        outermost = first == first.min(-1, keepdims=True)
        chosen.append(np.where(outermost, second, np.inf).argmin(-1))
    found = np.take_along_axis(ends, np.stack(chosen, -1)[..., None], axis=-2)
    return np.where(np.isnan(ends).any((-2, -1), keepdims=True), np.nan, found).astype(ends.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Augment:
    """What happens to each training picture: turn, scale and shift in one resampling, then a window, flips and quarter
    turns, which move pixels as they are, then brightness, contrast and noise.

    Attributes:
      crop: Pixels of `fill` around a picture, out of which a window of its own size is cut.
      window: (height, width) of a window that is cut at a random place; None = of the picture's size.
      flip: "horizontal": every other picture is mirrored, left to right; "vertical": top to bottom; "both": either.
      quarter_turns: By 0, 90, 180 or 270 degrees; pictures are square.
      turn: Degrees; by at most so much either way, about the middle of what is shown.
      scale: Smallest and largest factor.
      shift: Pixels; by at most so much either way, down and across.
      brightness: Smallest and largest factor of every pixel.
      contrast: Smallest and largest factor of the distance of every pixel from the mean of its picture's channel.
      noise: Standard deviation of Gaussian noise, in units of stored pixels.
      fill: What lies beyond the edge of a picture, in units of stored pixels; None = 0 for uint8, and for float32 the
        least value of the picture's channel, such as the lower end of a window.

    Numbers in a range are uniform in it. uint8 stays uint8: the last result is rounded and kept in 0 to 255. An object
    of which nothing is left in the picture is not there (NaN); points of others are moved to its edge.
    """

    crop: int = 0
    window: tuple[int, int] | None = None
    flip: Literal["none", "horizontal", "vertical", "both"] = "none"
    quarter_turns: bool = False
    turn: float = 0.0
    scale: tuple[float, float] = (1.0, 1.0)
    shift: float = 0.0
    brightness: tuple[float, float] = (1.0, 1.0)
    contrast: tuple[float, float] = (1.0, 1.0)
    noise: float = 0.0
    fill: float | None = None

    def __post_init__(self) -> None:
        for name in ("crop", "turn", "shift", "noise"):
            check_at_least(f"Augment: {name}", getattr(self, name), 0)
        for name in ("scale", "brightness", "contrast"):
            low, high = getattr(self, name)
            if not 0 <= low <= high < math.inf or (name == "scale" and low == 0):
                raise UserError(
                    f"Augment: {name} must be the smallest and the largest factor, for example 0.8,1.25; got "
                    f"{low},{high}."
                )
        if self.window is not None:
            check_size("Augment: window", self.window)

    def shown(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of what training batches have, for pictures of a size.

        Raises:
          UserError: the window is larger, or quarter turns would change the shape.
        """
        shown = self.window or (height, width)
        if shown[0] > height + 2 * self.crop or shown[1] > width + 2 * self.crop:
            raise UserError(
                f"data.augment.window={shown[0]},{shown[1]} is larger than pictures of {height} x {width} with "
                f"crop={self.crop} pixels around them. Give a smaller window."
            )
        if self.quarter_turns and shown[0] != shown[1]:
            raise UserError(
                f"data.augment.quarter_turns needs square pictures; these are {shown[0]} x {shown[1]}. Give a square "
                "window, or turn=180."
            )
        return shown

    def middle(self, arrays: Arrays) -> Arrays:
        """Pictures that are not augmented, and their masks, of the size that augmented ones have: their middle.

        Raises:
          UserError: the window is larger than the pictures.
        """
        size = height, width = arrays["images"].shape[1:3]
        shown = self.shown(height, width)
        if shown[0] > height or shown[1] > width:
            raise UserError(
                f"data.augment.window={shown[0]},{shown[1]} is larger than pictures of {height} x {width}, whose "
                "middle the other splits show. Give a window of at most this size."
            )
        top, left = ((a - b) // 2 for a, b in zip(size, shown, strict=True))
        place = slice(None), slice(top, top + shown[0]), slice(left, left + shown[1])
        return {name: array[place] if name in ("images", *_MASKS) else array for name, array in arrays.items()}

    def check_whole(self, height: int, width: int) -> None:
        """Refuses a window of another size than that of pictures, all of which are shown whole."""
        if self.shown(height, width) != (height, width):
            raise UserError(
                f"data.augment.window={self.window}: pictures of this data set are shown whole in all splits, "
                f"{height} x {width} pixels. Leave the window out; crop=N shifts them at random, by N at most."
            )

    def moves(self) -> bool:
        """Whether pixels come to lie elsewhere."""
        cuts = bool(self.crop) or self.window is not None
        return cuts or self.flip != "none" or self.quarter_turns or self._resamples()

    def _resamples(self) -> bool:
        return bool(self.turn or self.shift) or self.scale != (1.0, 1.0)

    def apply(self, arrays: Arrays, numbers: np.ndarray, *, seed: int, channel: int) -> Arrays:
        """Arrays of examples [M, ...] by name, changed; `numbers` int64[M] are those of the examples in the stream."""
        drawn = uniform(numbers, 11, seed, channel).T
        images = arrays["images"]
        height, width = images.shape[1:3]
        shown = self.shown(height, width)
        room = np.array([height + 2 * self.crop - shown[0], width + 2 * self.crop - shown[1]])
        top, left = np.floor(drawn[:2] * (room[:, None] + 1)).astype(np.int64) - self.crop
        if self._resamples():
            turns = [math.radians(self.turn * (2 * u - 1)) for u in drawn[5]]
            moved = _affine(
                arrays,
                turns=turns,
                scales=_between(self.scale, drawn[6]),
                shifts=self.shift * (2 * drawn[7:9] - 1),
                corner=(top, left),
                shown=shown,
                fill=self._edges(images),
            )
        elif self.crop or self.window:
            moved = _cut(arrays, top, left, shown, self._edges(images))
        else:
            moved = {name: array for name, array in arrays.items() if name in ("images", *_MASKS, *_POINTS)}
        if self.flip in ("horizontal", "both"):
            moved = {name: _mirrored(name, array, drawn[2] < 0.5, 1, shown) for name, array in moved.items()}
        if self.flip in ("vertical", "both"):
            moved = {name: _mirrored(name, array, drawn[3] < 0.5, 0, shown) for name, array in moved.items()}
        if self.quarter_turns:
            quarters = np.floor(drawn[4] * 4).astype(np.int64)
            moved = {name: _quarter_turned(name, array, quarters, shown[0]) for name, array in moved.items()}
        if self.moves() and not arrays.keys().isdisjoint(_POINTS):
            moved |= _named(moved, shown)
        pixels = self._coloured(moved["images"], numbers, drawn[9], drawn[10], seed, channel)
        if pixels.dtype != images.dtype and images.dtype.kind in "ui":
            limits = np.iinfo(images.dtype)
            pixels = np.clip(np.rint(pixels), limits.min, limits.max)
        return {**arrays, **moved, "images": pixels.astype(images.dtype, copy=False)}

    def _edges(self, images: np.ndarray) -> np.ndarray:
        """What lies beyond the edges of each picture, in a form that goes with [B, H, W, C]."""
        if self.fill is None and images.dtype.kind == "f":
            return images.min((1, 2), keepdims=True)
        return np.full((1, 1, 1, 1), self.fill or 0, images.dtype)

    def _coloured(
        self, images: np.ndarray, numbers: np.ndarray, bright: np.ndarray, contrast: np.ndarray, seed: int, channel: int
    ) -> np.ndarray:
        def factors(limits: tuple[float, float], drawn: np.ndarray) -> np.ndarray:
            return _between(limits, drawn).astype(np.float32).reshape(-1, 1, 1, 1)

        if self.brightness != (1.0, 1.0):
            images = images * factors(self.brightness, bright)
        if self.contrast != (1.0, 1.0):
            # Each picture's mean by itself: sums of a batch would depend on how many there are in it.
            means = np.stack([image.mean((0, 1), dtype=np.float64) for image in images])[:, None, None].astype(
                np.float32
            )
            images = (images - means) * factors(self.contrast, contrast) + means
        if self.noise:
            count = math.prod(images.shape[1:])
            u = uniform(numbers, 2 * count, seed, channel, _NOISE).astype(np.float32)
            # Box and Muller (1958); 1 - u is never 0 in float64, and 2**-24 at least here.
            radius = np.sqrt(-2 * np.log(np.maximum(1 - u[:, :count], np.float32(2**-24))))
            normal = radius * np.cos(np.float32(2 * math.pi) * u[:, count:])
            images = images + np.float32(self.noise) * normal.reshape(images.shape)
        return images


def _between(limits: tuple[float, float], drawn: np.ndarray) -> np.ndarray:
    return limits[0] + (limits[1] - limits[0]) * drawn


def _cut(arrays: Arrays, top: np.ndarray, left: np.ndarray, shown: tuple[int, int], fill: np.ndarray) -> Arrays:
    """Windows whose upper left corners are pixels (top, left) of each picture, int64[B]; either may be negative."""
    height, width = arrays["images"].shape[1:3]
    rows, columns = top[:, None] + np.arange(shown[0]), left[:, None] + np.arange(shown[1])
    index = np.arange(len(top))[:, None, None]
    before, beyond = -min(rows.min(), columns.min(), 0), max(rows.max() - height + 1, columns.max() - width + 1, 0)
    found: Arrays = {}
    for name, array in arrays.items():
        if name == "images" or name in _MASKS:
            padded = _padded(array, before, beyond, fill if name == "images" else np.zeros((), array.dtype))
            found[name] = padded[index, rows[:, :, None] + before, columns[:, None, :] + before]
        elif name in _POINTS:
            found[name] = array - np.stack([left, top], 1)[:, None, None].astype(array.dtype)
    return found


def _padded(array: np.ndarray, before: int, beyond: int, fill: np.ndarray) -> np.ndarray:
    """[B, H, W, ...] with rows and columns before and beyond it."""
    if not before and not beyond:
        return array
    count, height, width = array.shape[:3]
    found = np.empty((count, before + height + beyond, before + width + beyond, *array.shape[3:]), array.dtype)
    found[:] = fill
    found[:, before : before + height, before : before + width] = array
    return found


def _affine(
    arrays: Arrays,
    *,
    turns: list[float],
    scales: np.ndarray,
    shifts: np.ndarray,
    corner: tuple[np.ndarray, np.ndarray],
    shown: tuple[int, int],
    fill: np.ndarray,
) -> Arrays:
    """Turned counterclockwise by radians and scaled about the middle of a window, shifted, and cut to it.

    A point p of the whole picture goes to m + s R (p - m) + t, m being the middle of the window; `shifts` are t down
    and across, [2, B].
    """
    top, left = corner
    cos, sin = np.array([math.cos(a) for a in turns]), np.array([math.sin(a) for a in turns])
    middle_y, middle_x = (shown[0] - 1) / 2, (shown[1] - 1) / 2  # in the window
    # Back from a pixel of the window to where it came from in the picture, [B, H, W]; y grows downwards.
    across = np.arange(shown[1]) - middle_x - shifts[1][:, None]
    down = np.arange(shown[0]) - middle_y - shifts[0][:, None]
    a, b = (cos / scales)[:, None], (sin / scales)[:, None]
    x = (a * across + (left + middle_x)[:, None])[:, None, :] - (b * down)[:, :, None]
    y = (b * across)[:, None, :] + (a * down + (top + middle_y)[:, None])[:, :, None]
    found: Arrays = {}
    for name, array in arrays.items():
        if name == "images":
            found[name] = _bilinear(array, y, x, fill)
        elif name in _MASKS:
            rows, columns = np.floor(y + 0.5).astype(np.int64), np.floor(x + 0.5).astype(np.int64)
            inside = (rows >= 0) & (rows < array.shape[1]) & (columns >= 0) & (columns < array.shape[2])
            index = np.arange(len(array))[:, None, None]
            nearest = array[index, rows.clip(0, array.shape[1] - 1), columns.clip(0, array.shape[2] - 1)]
            found[name] = np.where(inside, nearest, np.zeros((), array.dtype))
        elif name in _POINTS:
            own = (slice(None), None, None)
            dx, dy = array[..., 0] - (left + middle_x)[own], array[..., 1] - (top + middle_y)[own]
            c, s = (scales * cos)[own], (scales * sin)[own]
            moved_x = middle_x + shifts[1][own] + c * dx + s * dy
            moved_y = middle_y + shifts[0][own] - s * dx + c * dy
            found[name] = np.stack([moved_x, moved_y], -1).astype(array.dtype)
    return found


def _bilinear(images: np.ndarray, y: np.ndarray, x: np.ndarray, fill: np.ndarray) -> np.ndarray:
    """float32[B, H, W, C] of images at float64[B, H, W] rows and columns, `fill` beyond their edges."""
    height, width = images.shape[1:3]
    padded = _padded(images, 1, 1, fill)
    # The edge of `fill` is one pixel wide, so that what is further out is looked up there.
    y, x = np.clip(y, -1, height) + 1, np.clip(x, -1, width) + 1
    rows, columns = np.minimum(y.astype(np.int32), height), np.minimum(x.astype(np.int32), width)
    v, u = (y - rows).astype(np.float32)[..., None], (x - columns).astype(np.float32)[..., None]
    stride = width + 2
    flat = padded.reshape(-1, padded.shape[-1])
    index = (np.arange(len(images)) * (height + 2) * stride)[:, None, None] + rows.astype(np.int64) * stride + columns
    upper = flat[index].astype(np.float32)
    upper += u * (flat[index + 1] - upper)
    lower = flat[index + stride].astype(np.float32)
    lower += u * (flat[index + stride + 1] - lower)
    lower -= upper
    lower *= v
    lower += upper
    return lower


def _mirrored(name: str, array: np.ndarray, which: np.ndarray, axis: int, shown: tuple[int, int]) -> np.ndarray:
    """Examples of bool[B] `which` mirrored along axis 0 (down) or 1 (across) of the picture."""
    which = which.reshape(-1, *(1,) * (array.ndim - 1))
    if name in _POINTS:
        turned = array.copy()
        turned[..., 1 - axis] = shown[axis] - 1 - turned[..., 1 - axis]
        return np.where(which, turned, array)
    return np.where(which, np.flip(array, 1 + axis), array)


def _quarter_turned(name: str, array: np.ndarray, quarters: np.ndarray, side: int) -> np.ndarray:
    """Examples turned counterclockwise by int64[B] `quarters` of 90 degrees, as `np.rot90` does."""
    found = array.copy()
    for count in (1, 2, 3):
        which = quarters == count
        if name in _POINTS:
            for _ in range(count):
                found[which] = np.stack([found[which][..., 1], side - 1 - found[which][..., 0]], -1)
        else:
            found[which] = np.rot90(array[which], count, axes=(1, 2))
    return found


def _named(arrays: Arrays, shown: tuple[int, int]) -> Arrays:
    """Points and ends of objects of which something is in the picture, moved to its edge, with their names."""
    found = {name: arrays[name] for name in _POINTS if name in arrays}
    outer = found["ends"] if "ends" in found else found["points"][..., :4, :]
    limit = np.array([shown[1] - 1, shown[0] - 1], outer.dtype)
    low, high = outer.min(-2), outer.max(-2)  # NaN where a point is
    there = ((high >= 0) & (low <= limit)).all(-1)[..., None, None]
    found = {
        name: np.where(there, np.clip(points, 0, limit), np.nan).astype(points.dtype) for name, points in found.items()
    }
    if "points" in found:
        named = relabel(found["ends"] if "ends" in found else found["points"][..., :4, :])
        found["points"] = np.concatenate([named, found["points"][..., 4:, :]], -2)
    return found
