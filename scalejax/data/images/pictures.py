"""Grey pictures as files: PNG, and SVG with a PNG in it, which is what reports show."""

import base64
import struct
import zlib

import numpy as np


def png(pixels: np.ndarray) -> bytes:
    """uint8[H, W] as a PNG of 8 bits grey."""
    height, width = pixels.shape
    lines = np.pad(pixels, ((0, 0), (1, 0))).tobytes()  # each line begins with its filter, 0 = none
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
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
    data = base64.b64encode(png(pixels)).decode()
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
        f'<image width="{width}" height="{height}" style="image-rendering:pixelated" '
        f'href="data:image/png;base64,{data}"/></svg>'
    )
