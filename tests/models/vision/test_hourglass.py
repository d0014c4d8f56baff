"""Hourglass networks: sizes, shapes and counts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.models.vision import hourglass
from scalejax.models.vision.hourglass import SIZES, HourglassConfig
from scalejax.nn import counts

TINY = HourglassConfig(stacks=2, widths=(4, 6, 8), blocks=(1, 1, 2), stem=4, features=5)


def network(config, channels, dtypes=nn.FLOAT32):
    return hourglass.HourglassNetwork(config, channels, nnx.Rngs(0), dtypes)


@pytest.mark.slow
def test_each_stack_gives_maps_of_a_quarter_of_the_size():
    structure, state = nnx.split(network(TINY, 3))
    found = jax.jit(lambda state, x: nnx.merge(structure, state)(x, "evaluation"))(state, jnp.ones((2, 32, 47, 3)))
    assert [maps.shape for maps in found] == [(2, 8, 12, 5)] * 2
    assert not np.allclose(found[0], found[1])


def literal_count(config, channels):
    """Filters and norms, written out from the drawing in the module."""

    def conv(inputs, outputs, kernel=3):
        return kernel * kernel * inputs * outputs + 2 * outputs

    def residual(inputs, outputs, stride=1):
        shortcut = 0 if inputs == outputs and stride == 1 else conv(inputs, outputs, 1)
        return conv(inputs, outputs) + conv(outputs, outputs) + shortcut

    def glass(widths, blocks):
        (a, b, *_), n = widths, blocks[0]
        total = n * residual(a, a) + residual(a, b, 2) + (n - 1) * residual(b, b)
        total += (n - 1) * residual(b, b) + residual(b, a)
        return total + (glass(widths[1:], blocks[1:]) if len(widths) > 2 else blocks[1] * residual(b, b))

    width = config.widths[0]
    total = conv(channels, config.stem, 7) + residual(config.stem, width, 2)
    total += config.stacks * (glass(config.widths, config.blocks) + conv(width, config.features))
    between = conv(width, width, 1) + conv(config.features, width, 1) + residual(width, width)
    return total + (config.stacks - 1) * between


@pytest.mark.slow
@pytest.mark.parametrize("config", [TINY, SIZES["small"], SIZES["extremenet"]])
def test_parameters_are_those_of_the_drawing(config):
    model = counts.abstract(hourglass.HourglassNetwork, config, 3)
    assert counts.parameters(model) == literal_count(config, 3)


@pytest.mark.slow
def test_the_network_of_extremenet_has_the_parameters_of_hourglass_104():
    """187.7 M; with the heads of a CenterNet for 80 classes 191 M, as papers state of it."""
    model = counts.abstract(hourglass.HourglassNetwork, SIZES["extremenet"], 3)
    head = 256 * 256 * 9 + 256
    heads = 2 * (3 * head + 257 * (80 + 2 + 2))
    assert round((counts.parameters(model) + heads) / 1e6) == 191


@pytest.mark.slow
def test_training_moves_running_means_and_evaluation_does_not():
    one = HourglassConfig(stacks=1, widths=(4, 6), blocks=(1, 1), stem=4, features=5)
    model, x = network(one, 1), jax.random.normal(jax.random.key(0), (2, 16, 16, 1))

    def means():
        return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.BatchStat))]

    before = means()
    model(x, "evaluation")
    assert all(np.array_equal(a, b) for a, b in zip(before, means(), strict=True))
    model(x, "training")
    assert all(not np.array_equal(a, b) for a, b in zip(before, means(), strict=True))


def test_a_head_begins_at_its_bias():
    head = hourglass.Head(5, 6, 1, nnx.Rngs(0), nn.FLOAT32, bias=-2.19)
    found = head(jax.random.normal(jax.random.key(1), (2, 4, 4, 5)))
    assert abs(float(jax.nn.sigmoid(found).mean()) - 0.1) < 0.04


def test_sizes_that_cannot_be_halved_are_refused():
    assert SIZES["extremenet"].cells(511, 511) == (128, 128)
    with pytest.raises(
        UserError, match=r"33 x 32 cells, which an hourglass of depth 3 cannot halve 3 times.*multiples of 32"
    ):
        SIZES["small"].cells(130, 128)
    with pytest.raises(UserError, match=r"as many widths as blocks"):
        dataclasses.replace(TINY, blocks=(1, 1))
