"""Pictures as files: PNG, and SVG with PNGs in it, which is what reports show.

`grid` shows pictures side by side with what is right and what a model said: captions of classes, outlines of masks,
boxes and points.
"""

import base64
import dataclasses
import html
import struct
import zlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
"""Of classes 1, 2, ... and then from the first again: Okabe and Ito's, told apart by people of all kinds of sight."""
_RIGHT, _SAID = "#009e73", "#d55e00"
_LINE = 15  # pixels of a line of caption
_TINT = 0.4


def png(pixels: np.ndarray) -> bytes:
    """uint8[H, W] as a PNG of 8 bits grey, uint8[H, W, 3] as one of red, green and blue."""
    height, width = pixels.shape[:2]
    # Each line begins with its filter, 0 = none.
    lines = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0))).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


def sheet(images: np.ndarray, columns: int) -> np.ndarray:
    """uint8[N, H, W] as one picture of rows of `columns` images, two pixels apart; what is left over is white."""
    rows = -(-len(images) // columns)
    height, width = images.shape[1:]
    whole = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2), 255, np.uint8)
    for number, image in enumerate(images):
        top, left = number // columns * (height + 2), number % columns * (width + 2)
        whole[top : top + height, left : left + width] = image
    return whole


def svg(pixels: np.ndarray, scale: int = 2) -> str:
    """uint8[H, W] as an SVG in which a pixel is `scale` wide."""
    height, width = (size * scale for size in pixels.shape)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f"{_image(pixels, height, width)}</svg>"
    )


def _image(pixels: np.ndarray, height: int, width: int) -> str:
    data = base64.b64encode(png(pixels)).decode()
    return (
        f'<image width="{width}" height="{height}" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{data}"/>'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """A box or points over a picture; pixel (x, y) has its middle at x, y.

    Attributes:
      kind: "box": points are its upper left and lower right corner; "polygon"; "points".
      points: float[K, 2], x and y; those that are NaN are left out.
      said: Whether a model said so (dashed); else it is right.
      label: At the first point.
    """

    kind: Literal["box", "polygon", "points"]
    points: np.ndarray
    said: bool = False
    label: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture of a grid.

    Attributes:
      pixels: number[H, W] or [H, W, C]; 3 channels are red, green and blue, of others the middle one is shown.
      lines: Below it.
      wrong: Whether what is below is marked as a mistake.
      right: integers[H, W], the right mask, or None: lines around its classes.
      said: The mask that a model gave: a tint.
      drawn: Boxes and points.
    """

    pixels: np.ndarray
    lines: tuple[str, ...] = ()
    wrong: bool = False
    right: np.ndarray | None = None
    said: np.ndarray | None = None
    drawn: tuple[Drawn, ...] = ()


def labelled(pixels: np.ndarray, right: str, said: str) -> Panel:
    """A picture with its class and that which a model gave it."""
    if right == said:
        return Panel(pixels=pixels, lines=(right,))
    return Panel(pixels=pixels, lines=(f"{said}, not", right), wrong=True)


def grid(
    panels: Sequence[Panel], *, columns: int = 4, scale: float = 2.0, limits: tuple[float, float] | None = None
) -> str:
    """Pictures side by side in one SVG; a pixel is `scale` wide.

    Args:
      panels: Row by row.
      columns: Of a row.
      scale: Of pictures; captions have one size.
      limits: Values that are black and white; None = the least and the largest of each picture, 0 and 255 of uint8.
    """
    if not panels:
        raise ValueError("grid: panels must have at least one picture; got none.")
    columns = min(columns, len(panels))
    wide = max(panel.pixels.shape[1] for panel in panels) * scale + 8
    high = max(panel.pixels.shape[0] for panel in panels) * scale + 8
    high += _LINE * max(len(panel.lines) for panel in panels)
    width, height = columns * wide, -(-len(panels) // columns) * high
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">'
    ]
    for number, panel in enumerate(panels):
        left, top = number % columns * wide + 4, number // columns * high + 4
        parts.append(f'<g transform="translate({left:g} {top:g})">{_panel(panel, scale, limits)}</g>')
    return "".join([*parts, "</svg>"])


def shown(pixels: np.ndarray, limits: tuple[float, float] | None = None) -> np.ndarray:
    """uint8[H, W] or uint8[H, W, 3] to look at, see `grid`."""
    if pixels.ndim == 3 and pixels.shape[2] != 3:
        pixels = pixels[..., pixels.shape[2] // 2]
    if pixels.dtype == np.uint8 and limits is None:
        return pixels
    values = np.nan_to_num(pixels.astype(np.float64))
    low, high = limits or (float(values.min()), float(values.max()))
    return np.rint(255 * np.clip((values - low) / max(high - low, 1e-12), 0, 1)).astype(np.uint8)


def _panel(panel: Panel, scale: float, limits: tuple[float, float] | None) -> str:
    pixels = shown(panel.pixels, limits)
    height, width = pixels.shape[:2]
    if panel.said is not None:
        pixels = _tinted(pixels, panel.said)
    parts = [f'<g transform="scale({scale:g})" fill="none" stroke-width="1.5">{_image(pixels, height, width)}']
    if panel.right is not None:
        for number in np.unique(panel.right[panel.right > 0]).tolist():
            path = _outline(panel.right == number)
            parts.append(f'<path d="{path}" stroke="{_colour(number)}" vector-effect="non-scaling-stroke"/>')
    parts += [_shape(drawn, scale) for drawn in panel.drawn]
    parts.append("</g>")
    most = max(4, int(width * scale / 5.5))
    for number, line in enumerate(panel.lines):
        text = line if len(line) <= most else line[: most - 1] + "…"
        fill = _SAID if panel.wrong else "currentColor"
        place = f'x="{width * scale / 2:g}" y="{height * scale + _LINE * (number + 0.8):g}"'
        parts.append(f'<text {place} text-anchor="middle" fill="{fill}">{html.escape(text)}</text>')
    return "".join(parts)


def _colour(number: int) -> str:
    return COLOURS[(number - 1) % len(COLOURS)]


def _tinted(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """uint8[H, W, 3] with the colour of its class in every pixel that is not 0."""
    grey = pixels if pixels.ndim == 3 else pixels[..., None].repeat(3, 2)
    colours = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS], np.float64)
    tint = colours[(mask - 1) % len(COLOURS)]
    return np.where(mask[..., None] > 0, np.rint((1 - _TINT) * grey + _TINT * tint), grey).astype(np.uint8)


def _outline(inside: np.ndarray) -> str:
    """The edges of pixels that lie between bool[H, W] and what is not, as the path of an SVG."""
    padded = np.pad(inside, 1)
    steps: list[str] = []
    for edges, letter in (
        (padded[1:, 1:-1] != padded[:-1, 1:-1], "h"),
        ((padded[1:-1, 1:] != padded[1:-1, :-1]).T, "v"),
    ):
        ends = np.diff(np.pad(edges, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        for (line, start), (_, stop) in zip(np.argwhere(ends == 1), np.argwhere(ends == -1), strict=True):
            x, y = (start, line) if letter == "h" else (line, start)
            steps.append(f"M{x} {y}{letter}{stop - start}")
    return "".join(steps)


def _shape(drawn: Drawn, scale: float) -> str:
    points = drawn.points[~np.isnan(drawn.points).any(-1)].astype(np.float64) + 0.5
    if not len(points) or (drawn.kind == "box" and len(points) < 2):
        return ""
    colour = _SAID if drawn.said else _RIGHT
    style = f'stroke="{colour}" vector-effect="non-scaling-stroke"' + (' stroke-dasharray="4 2"' if drawn.said else "")
    if drawn.kind == "box":
        (x, y), (right, bottom) = points[:2]
        found = f'<rect x="{x:.6g}" y="{y:.6g}" width="{right - x:.6g}" height="{bottom - y:.6g}" {style}/>'
    elif drawn.kind == "polygon":
        found = f'<polygon points="{" ".join(f"{x:.6g},{y:.6g}" for x, y in points)}" {style}/>'
    else:
        radius = f"{2.5 / scale:.6g}"
        found = "".join(f'<circle cx="{x:.6g}" cy="{y:.6g}" r="{radius}" {style}/>' for x, y in points)
    if drawn.label:
        x, y = points[0]
        text = html.escape(drawn.label)
        found += f'<text x="{x:.6g}" y="{y - 2 / scale:.6g}" font-size="{10 / scale:.6g}" fill="{colour}">{text}</text>'
    return found
