"""Row-wise quantization as FBGEMM defines it, one row and one number after the other in NumPy's float32 and float16."""

import warnings

import numpy as np

BITS = {"int8": 8, "int8_half": 8, "int4": 4, "int2": 2}


def quantize(table, format):
    """float32[V, D] -> uint8[V, bytes]: codes, scale, bias."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow and NaN, which rows below are made for
        return np.stack([_row(row.astype(np.float32), format) for row in table])


def _row(row, format):
    bits, nan = BITS[format], np.isnan(row).any()
    low, high = row.min(), row.max()
    if format == "int8":
        span = np.float32(high - low)
        scale, bias = span / np.float32(255), low
        inverse = np.float32(255) / (span + np.float32(1e-8))
    else:
        bias = np.float16(low)
        low = np.float32(bias)
        span = np.float32(high - low)
        scale = np.float16(span / np.float32((1 << bits) - 1))
        scale = np.float16(1) if scale == 0 else scale
        inverse = np.float32(1) / np.float32(scale)
    kind = np.float32 if format == "int8" else np.float16
    if nan:
        scale = bias = kind(np.nan)
    codes = [0 if nan else _code(np.float32(np.float32(x - low) * inverse), bits) for x in row]
    packed = bytearray(-(-len(codes) * bits // 8))
    for i, code in enumerate(codes):
        packed[i * bits // 8] |= code << (i * bits % 8)
    return np.frombuffer(bytes(packed) + kind(scale).tobytes() + kind(bias).tobytes(), np.uint8)


def _code(steps, bits):
    return min(max(int(np.rint(steps)), 0), (1 << bits) - 1) if np.isfinite(steps) else 0


def dequantize(data, format, dim):
    """uint8[V, bytes] -> float32[V, dim], rounded after the product and after the sum."""
    bits, kind = BITS[format], np.float32 if format == "int8" else np.float16
    size = -(-dim * bits // 8)
    tail = np.ascontiguousarray(data[:, size : size + 2 * np.dtype(kind).itemsize]).view(kind).astype(np.float32)
    places = np.arange(dim) * bits
    codes = (data[:, places // 8] >> (places % 8).astype(np.uint8)) & ((1 << bits) - 1)
    with np.errstate(all="ignore"):
        return (codes.astype(np.float32) * tail[:, :1]).astype(np.float32) + tail[:, 1:]


def rows(dim, seed=0):
    """Name -> float32[V, dim]: what tables hold, and what they should not."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(200, dim)).astype(np.float32)
    ties = np.tile(np.arange(dim) % 31 / 2, (4, 1)).astype(np.float32) + np.array([[0], [1], [-3], [8]], np.float32)
    tiny = rng.integers(-(2**23), 2**23, (64, dim)).astype(np.float64) * 2.0**-149
    small = rng.normal(size=(64, dim)) * 2.0 ** rng.integers(-140, -100, (64, 1))
    return {
        "normal": normal,
        "spread": normal * (2.0 ** rng.integers(-40, 40, (200, 1))).astype(np.float32),
        "uniform": rng.uniform(-1e-3, 1e-3, (64, dim)).astype(np.float32),
        "constant": np.repeat(rng.normal(size=(64, 1)), dim, 1).astype(np.float32),
        "nearly constant": (1 + rng.integers(0, 3, (64, dim)) * 2.0**-23).astype(np.float32),
        "zero": np.zeros((2, dim), np.float32),
        "ties": ties,
        "range near 1e-8": (normal[:64] * 1e-8).astype(np.float32),
        "scale zero in float16": (normal[:64] * 3e-8).astype(np.float32),
        "subnormal": tiny.astype(np.float32),
        "into subnormal": small.astype(np.float32),
        "huge": (normal[:64].astype(np.float64) * 1e38).clip(-3e38, 3e38).astype(np.float32),
        "beyond float16": (normal[:64] * 3e5).astype(np.float32),
    }
