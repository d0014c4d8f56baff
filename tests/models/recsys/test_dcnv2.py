"""DCNv2 against published counts; its forward pass: `test_baselines`."""

import jax
import pytest
from flax import nnx

from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.numerics.dtypes import Dtypes


def test_counts_on_criteo_terabyte_equal_the_published_ones(criteo):
    """Table 3 of the Wukong paper: total parameters less 204,184,585 rows of 128; MFLOP per example."""
    task = DcnV2Config().task(criteo)
    model = nnx.eval_shape(lambda: task.init(nnx.Rngs(0), Dtypes()))
    assert sum(p.size for p in jax.tree.leaves(nnx.state(model))) == task.dense_parameters() == 43_737_217
    # 0.23 %: the published count leaves out the gradient of the numbers, which nobody needs
    assert task.flops_per_example() / 1e6 == pytest.approx(262.35, rel=2.5e-3)
