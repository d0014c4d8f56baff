"""DLRM against published counts; its forward pass: `test_baselines`."""

import jax
import pytest
from flax import nnx

from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.numerics.dtypes import Dtypes


def test_counts_on_criteo_terabyte_equal_the_published_ones(criteo):
    """Table 3 of the Wukong paper: total parameters less 204,184,585 rows of 128; MFLOP per example."""
    task = DlrmConfig().task(criteo)
    model = nnx.eval_shape(lambda: task.init(nnx.Rngs(0), Dtypes()))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(model))) == task.dense_parameters() == 680_321
    assert task.flops_per_example() == 4_630_272
    # 0.23 %: the published count leaves out the gradient of the numbers, which nobody needs
    assert task.flops_per_example() / 1e6 == pytest.approx(4.62, rel=2.5e-3)


def test_flops_less_the_unneeded_input_gradient_are_the_published_figure(criteo):
    flops = DlrmConfig().task(criteo).flops_per_example() - 2 * 13 * 512
    assert round(flops / 1e6, 2) == 4.62
