"""Compressors of gradients: rows of float32 as fewer bytes, and back (BytePS-Compress).

    compressor = TopKEntries(k=0.001, values="float16")
    payload = compressor.encode(x, key)                   # float32[rows, n] -> arrays [rows, ...], which are sent
    compressor.decode(payload, n, key)                    # float32[rows, n], sums of which are gradients again

protocol     what an exchange asks of a compressor: the way there and back, bytes, keys, whether it is biased
casts        float32 and float16
onebit       signs under one scale a row
sparse       top-k and random-k
dithering    levels under one scale a row, rounded stochastically, and their size after entropy coding
block        block formats of `parallel.compression.codec`
selection    the k largest of a row, and k distinct random places
levels       small integers as streams of bits
norms        the largest magnitude and the length of each row

A row with NaN or an infinity never decodes to finite numbers alone:

    Identity, Fp16                             the value itself; Fp16 also makes NaN of what lies beyond float16
    Blocks                                     its block is NaN
    OneBit, sparse and dithering compressors   all of the row is NaN, where it had 0 too

Values below 2^-126 are zeros, as XLA's CPU threads and TPUs take them, except where float32 is sent.

Source: Zhong, Xie, Zheng, Lin, "Compressed Communication for Distributed Training: Adaptive Methods and System", 2021.
"""

from scalejax.parallel.compression.compressors.block import Blocks
from scalejax.parallel.compression.compressors.casts import Fp16, Identity
from scalejax.parallel.compression.compressors.dithering import (
    LinearDithering,
    NaturalDithering,
    entropy_coded_bytes,
)
from scalejax.parallel.compression.compressors.onebit import OneBit
from scalejax.parallel.compression.compressors.protocol import Compressor, Growth, Keys, Payload, Traits
from scalejax.parallel.compression.compressors.sparse import RandomKEntries, TopKEntries

__all__ = [
    "Blocks",
    "Compressor",
    "Fp16",
    "Growth",
    "Identity",
    "Keys",
    "LinearDithering",
    "NaturalDithering",
    "OneBit",
    "Payload",
    "RandomKEntries",
    "TopKEntries",
    "Traits",
    "entropy_coded_bytes",
]
