"""float32 and float16."""

import numpy as np
from compressor_cases import back, heavy

from scalejax.parallel.compression.compressors import Fp16, Identity


def test_identity_keeps_every_bit():
    x = np.random.default_rng(0).integers(0, 2**32, (2, 999), dtype=np.uint32).view(np.float32)
    np.testing.assert_array_equal(np.asarray(back(Identity(), x)).view(np.uint32), x.view(np.uint32))


def test_float16_is_that_of_numpy_and_what_it_has_not_is_nan():
    edges = np.float32([65504, 65519.996, 6.1e-5, 5.9e-8, 2.99e-8, 2.98e-8, 2.0**-25, 0.0, -0.0, 2049, 2051])
    x = np.concatenate([edges, -edges, heavy(500)])[None]
    np.testing.assert_array_equal(back(Fp16(), x), x.astype(np.float16).astype(np.float32))
    beyond = np.float32([[65520, -65520, 1e30, 1]])
    np.testing.assert_array_equal(back(Fp16(), beyond), np.float32([[np.nan, np.nan, np.nan, 1]]))
