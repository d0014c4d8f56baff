"""Steps of networks for pictures planned by the TPU compiler: they fit, and their work is what is on paper."""

import pytest
from changes import changed

from scalejax import configs
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision import resnet
from scalejax.plan import plan

pytestmark = pytest.mark.aot

CHIPS = ["v5e:2x2", "v5p:2x2x2"]
BATCH = 256


class ImageNet:
    """What a plan asks of data: a schema and a batch size."""

    batch_size = BATCH

    def schema(self):
        return ImageSchema(
            height=224,
            width=224,
            channels=3,
            mean=(123.7, 116.3, 103.5),
            std=(58.4, 57.1, 57.4),
            classes=tuple(map(str, range(1000))),
            batch_size=BATCH,
        )


@pytest.mark.parametrize("chips", CHIPS)
def test_resnet_50_at_224_pixels_fits(chips):
    experiment = changed(configs.load("resnet-fashion", []), model=resnet.SIZES["resnet50"], data=ImageNet())
    found = plan(experiment, chips)
    assert found.memory.fits
    # 4.09 billion multiply-adds a picture forward; the gradient of the pixels is taken by nobody.
    forward, first = 4.089e9, 7 * 7 * 3 * 64 * 112 * 112
    assert found.flops == pytest.approx(2 * BATCH * (3 * forward - first), rel=0.01)
    assert found.model_flops == pytest.approx(6 * BATCH * forward, rel=0.01)
    # Statistics of the global batch, gradients and parameters go over the chips.
    assert {axis for _, axis in ((c.kind, c.axis) for c in found.collectives)} == {"fsdp"}
