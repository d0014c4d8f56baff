"""RECIST-Net with the network of ExtremeNet, planned by the TPU compiler at its size."""

import pytest
from changes import changed

from scalejax import configs
from scalejax.plan import plan

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.timeout(1500)]  # minutes of compilation each


def test_it_fits_at_511_pixels():
    """Three slices, two stacks: temporaries of 4.8 GB on v5e, of the least memory."""
    batch = 8
    experiment = changed(configs.load("recist-deep-lesion"), data__size=511, data__batch_size=batch)
    found = plan(experiment, "v5e:2x2")
    assert found.memory.fits
    # Forward and twice backward, 2.56 TFLOP a picture; the gradient of the pixels, of which nobody asks, is left out.
    assert found.model_flops == pytest.approx(2.565e12 * batch, rel=0.001)
    assert found.flops == pytest.approx(found.model_flops, rel=0.002)
