"""Steps of networks for pictures planned by the TPU compiler: they fit, and their work is what is on paper."""

import dataclasses

import pytest
import segmentation_cases
from changes import changed

from scalejax import configs
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision import resnet
from scalejax.models.vision.pairwise_unet import PairwiseUNetConfig, Templates
from scalejax.models.vision.unet import UNetConfig
from scalejax.nn import counts
from scalejax.plan import plan
from scalejax.train.experiment import Precision

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


def segmentation_of(model, side):
    schema = dataclasses.replace(segmentation_cases.SCHEMA, height=side, width=side)
    data = segmentation_cases.Drawn(batch_size=16, schema_=schema)
    return segmentation_cases.experiment(model, data=data, precision=Precision(compute="bfloat16"))


@pytest.mark.parametrize("name", ["v5e:2x2", pytest.param("v5p:2x2x2", marks=pytest.mark.slow)])
def test_a_unet_of_512_pixels_fits_and_its_products_are_counted(name):
    experiment = segmentation_of(UNetConfig(), 512)
    found = plan(experiment, name)
    assert found.memory.fits
    task = experiment.model.task(experiment.data.schema())
    shapes = {field: (16, *of.shape) for field, of in task.fields().items()}
    # The gradient of the pictures themselves is not asked for: one of the stem's three products is missing.
    stem = 2 * 16 * 512**2 * 9 * 32
    assert found.flops == task.work(shapes).flops - stem
    parameters = counts.parameters(counts.abstract(experiment.model.build, experiment.data.schema()))
    assert found.memory.bytes_per_chip["parameters"] * found.topology.devices >= 4 * parameters
    assert any("fsdp" in c.axes for c in found.collectives)


@pytest.mark.slow
def test_a_pairwise_step_fits_beside_it():
    unet = UNetConfig(widths=(16, 32, 64, 128))
    found = plan(segmentation_of(PairwiseUNetConfig(unet=unet, templates=Templates(count=2)), 128), "v5e:2x2")
    assert found.memory.fits
