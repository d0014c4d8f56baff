"""What all models of pictures do first."""

import jax
import jax.numpy as jnp

from scalejax.data.images.schema import ImageSchema
from scalejax.nn import wide
from scalejax.numerics.dtypes import Dtypes


def standardized(images: jax.Array, schema: ImageSchema, dtypes: Dtypes) -> jax.Array:
    """(x - mean) / std of each channel: stored pixels [B, H, W, C] to compute_dtype[B, H, W, C]."""
    dtype = wide(dtypes.compute)
    mean, std = (jnp.asarray(value, dtype).reshape(1, 1, 1, -1) for value in (schema.mean, schema.std))
    return ((images.astype(dtype) - mean) / std).astype(dtypes.compute)
