"""The loss of segmentation against literal sums, at its edges and over devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision.segmentation import (
    SegmentationSettings,
    SegmentationTask,
    averaged,
    dice_and_cross_entropy,
    overlaps,
    soft_dice,
)
from scalejax.train.task import Batch, whole


def random_case(seed=0, batch=3, side=4, classes=3):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (batch, side, side, classes)).astype(np.float32)
    return logits, np.eye(classes, dtype=np.float32)[rng.integers(0, classes, (batch, side, side))]


def literal(logits, truth, weights, dice):
    """Picture by picture in float64."""
    logits = logits.astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    losses = []
    for n in range(len(logits)):
        entropy = -np.mean([np.log(p[n][pixel] @ truth[n][pixel]) for pixel in np.ndindex(p.shape[1:3])])
        scores = []
        for k in range(1, p.shape[-1]):
            own = [n] if dice == "picture" else range(len(logits))
            factors = {m: 1.0 if dice == "picture" else weights[m] for m in own}
            both = sum(w * (p[m, ..., k] * truth[m, ..., k]).sum() for m, w in factors.items())
            either = sum(w * (p[m, ..., k] + truth[m, ..., k]).sum() for m, w in factors.items())
            scores.append((2 * both + 1e-5) / (either + 1e-5))
        losses.append(entropy + 1 - np.mean(scores))
    return np.array(losses)


@pytest.mark.parametrize("dice", ["batch", "picture"])
def test_loss_is_the_literal_sum(dice):
    logits, truth = random_case()
    weights = np.array([1, 0, 1], np.float32)
    found = dice_and_cross_entropy(jnp.asarray(logits), jnp.asarray(truth), jnp.asarray(weights), dice)
    np.testing.assert_allclose(found, literal(logits, truth, weights, dice), rtol=1e-5)


def test_padding_is_in_no_sum_of_the_batch():
    logits, truth = random_case()
    weights = jnp.array([1.0, 1, 0])
    other = logits.copy()
    other[2] *= -3
    found = [dice_and_cross_entropy(jnp.asarray(x), jnp.asarray(truth), weights)[:2] for x in (logits, other)]
    np.testing.assert_array_equal(*found)


def test_soft_dice_of_hard_masks_is_that_of_counts():
    _, truth = random_case(1)
    _, predicted = random_case(2)
    found = soft_dice(jnp.asarray(predicted), jnp.asarray(truth), jnp.ones(3), "picture")
    for n, k in np.ndindex(3, 3):
        p, t = predicted[n, ..., k] > 0, truth[n, ..., k] > 0
        tp, fp, fn = (p & t).sum(), (p & ~t).sum(), (~p & t).sum()
        assert found[n, k] == pytest.approx(2 * tp / (2 * tp + fp + fn), abs=1e-5)
    counts = np.asarray(overlaps(jnp.asarray(predicted.argmax(-1)), jnp.asarray(truth.argmax(-1)), 3))
    np.testing.assert_allclose(2 * counts[..., 0] / (counts[..., 1] + counts[..., 2]), found[:, 1:], atol=1e-5)


def test_coarser_logits_have_the_loss_of_their_repetition():
    logits, _ = random_case(3)
    _, truth = random_case(4, side=8)
    repeated = logits.repeat(2, 1).repeat(2, 2)
    weights = jnp.ones(3)
    found = dice_and_cross_entropy(jnp.asarray(logits), averaged(jnp.asarray(truth), 2), weights)
    wanted = dice_and_cross_entropy(jnp.asarray(repeated), jnp.asarray(truth), weights)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


@pytest.mark.parametrize("dice", ["batch", "picture"])
def test_the_loss_of_a_task_has_the_dice_of_its_settings(dice):
    logits, truth = random_case()
    schema = ImageSchema(height=4, width=4, channels=1, mean=(0.0,), std=(1.0,), classes=("none", "a", "b"))
    settings = types.SimpleNamespace(segmentation=SegmentationSettings(dice=dice), inputs=("images",))
    task = SegmentationTask(config=settings, schema=schema)
    weights = np.array([1, 0, 1], np.float32)
    batch = Batch({"images": logits, "masks": truth.argmax(-1), "weights": weights})
    found = jax.jit(lambda batch: task.loss(lambda x, purpose: (x,), batch, keys=None, gather=whole).sum)(batch)
    np.testing.assert_allclose(found, (literal(logits, truth, weights, dice) * weights).sum(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dice", ["batch", "picture"])
@pytest.mark.parametrize("certain", [0.0, 200.0])
def test_an_empty_mask_has_a_finite_loss_and_gradient(dice, certain):
    truth = jnp.zeros((2, 4, 4, 3)).at[..., 0].set(1)
    logits = jnp.zeros((2, 4, 4, 3)).at[..., 0].set(certain)
    for weights in (jnp.ones(2), jnp.zeros(2)):
        losses, back = jax.vjp(lambda x, w=weights: dice_and_cross_entropy(x, truth, w, dice), logits)
        assert np.isfinite(losses).all()
        assert np.isfinite(back(jnp.ones(2))[0]).all()
