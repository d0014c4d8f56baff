"""Scaled pictures against Pillow's, which filters by the same triangle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from scalejax import nn
from scalejax.errors import UserError

METHODS = {"linear": Image.Resampling.BILINEAR, "cubic": Image.Resampling.BICUBIC}


def pictures(dtype=np.float32):
    return np.random.default_rng(0).uniform(0, 255, (2, 37, 50, 3)).astype(dtype)


def by_pillow(images, size, method):
    channels = [
        [Image.fromarray(image[..., c]).resize(size[::-1], METHODS[method]) for c in range(3)] for image in images
    ]
    return np.stack([np.stack([np.array(c) for c in each], -1) for each in channels])


@pytest.mark.parametrize("size", [(9, 11), (37, 20), (80, 111), (1, 1), (37, 50)])
def test_it_is_pillows(size):
    found = nn.resize(jnp.asarray(pictures()), size)
    np.testing.assert_allclose(found, by_pillow(pictures(), size, "linear"), atol=2e-3)


@pytest.mark.parametrize("size", [(9, 11), (80, 111)])
def test_cubic_is_pillows(size):
    found = nn.resize(jnp.asarray(pictures()), size, "cubic")
    np.testing.assert_allclose(found, by_pillow(pictures(), size, "cubic"), atol=2e-3)


def test_stored_pixels_stay_stored_pixels():
    images = pictures(np.uint8)
    found = nn.resize(jnp.asarray(images), (80, 111), "cubic")
    exact = by_pillow(images.astype(np.float32), (80, 111), "cubic")
    assert exact.min() < 0
    assert exact.max() > 255
    assert found.dtype == jnp.uint8
    np.testing.assert_allclose(np.asarray(found, np.float32), np.clip(exact, 0, 255), atol=0.51)


def test_a_fine_checkerboard_becomes_grey_and_not_a_coarse_one():
    board = (np.indices((64, 64)).sum(0) % 2).astype(np.float32)[None, ..., None]
    np.testing.assert_allclose(nn.resize(jnp.asarray(board), (16, 16)), 0.5, atol=0.05)


def test_under_jit_and_grad_in_bfloat16():
    images = jnp.asarray(pictures(), jnp.bfloat16)
    found = jax.jit(lambda x: nn.resize(x, (9, 11)))(images)
    assert found.dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: nn.resize(x, (9, 11)).sum())(jnp.asarray(pictures()))
    # Every pixel of the result is a mean: the gradients of each picture and channel add up to their number.
    np.testing.assert_allclose(gradient.sum((1, 2)), 99, rtol=1e-5)


def test_bad_input_says_what_is_wanted():
    with pytest.raises(UserError, match=r"method.*linear"):
        nn.resize(jnp.zeros((1, 4, 4, 1)), (2, 2), "nearest")
    with pytest.raises(ValueError, match=r"size of 1 or more"):
        nn.resize(jnp.zeros((1, 4, 4, 1)), (0, 2))
