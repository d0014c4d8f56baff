"""Steps of a ResNet and of a U-Net planned by the TPU compiler: they fit, and their work is what is on paper."""

import dataclasses

import pytest
import segmentation_cases
from changes import changed

from scalejax import configs
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision import resnet
from scalejax.models.vision.unet import UNetConfig
from scalejax.nn import counts
from scalejax.numerics import flops
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import plan, topology
from scalejax.train.experiment import Precision
from scalejax.train.runs import binding

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.timeout(1500)]  # minutes of compilation each

CHIPS = "v5e:2x2"
"""Of the least memory."""


class ImageNet:
    """What a plan asks of data: a schema and a batch size."""

    batch_size = 256

    def schema(self):
        return ImageSchema(
            height=224,
            width=224,
            channels=3,
            mean=(123.7, 116.3, 103.5),
            std=(58.4, 57.1, 57.4),
            classes=tuple(map(str, range(1000))),
            batch_size=self.batch_size,
        )


def test_the_work_of_resnet_50_is_what_is_on_paper():
    """`scalejax plan` compiles its step for minutes: see `docs/vision.md`."""
    experiment = changed(configs.load("resnet-fashion", []), model=resnet.SIZES["resnet50"], data=ImageNet())
    mesh, _ = topology.make_mesh(topology.parse(CHIPS), MeshShape())
    program = binding.bind(experiment, experiment.data.schema(), mesh)
    # 4.09 billion multiply-adds a picture forward; the gradient of the pixels is taken by nobody.
    forward, first = 4.089e9, 7 * 7 * 3 * 64 * 112 * 112
    state, batch = program.abstract_state(), program.abstract_batch()
    traced = flops.count(program.train_step.trace(state, batch)).total
    assert traced == pytest.approx(2 * ImageNet.batch_size * (3 * forward - first), rel=0.001)
    shapes = {name: x.shape for name, x in batch.fields.items()}
    assert program.task.work(shapes).flops == pytest.approx(6 * ImageNet.batch_size * forward, rel=0.001)


def test_resnet_18_at_224_pixels_fits():
    found = plan(changed(configs.load("resnet-fashion", []), model=resnet.SIZES["resnet18"], data=ImageNet()), CHIPS)
    assert found.memory.fits
    # Statistics of the global batch, gradients and parameters go over the chips.
    assert {c.axis for c in found.collectives} == {"fsdp"}


def test_a_unet_of_512_pixels_fits():
    pictures, side = 16, 512
    schema = dataclasses.replace(segmentation_cases.SCHEMA, height=side, width=side)
    data = segmentation_cases.Drawn(batch_size=pictures, schema_=schema)
    experiment = segmentation_cases.experiment(
        UNetConfig(widths=(32, 64, 128)), data=data, precision=Precision(compute="bfloat16")
    )
    found = plan(experiment, CHIPS)
    assert found.memory.fits
    # The gradient of the pictures themselves is not asked for: one of the stem's three products is missing.
    stem = 2 * pictures * side**2 * 9 * 32
    assert found.flops == found.model_flops - stem
    parameters = counts.parameters(counts.abstract(experiment.model.build, schema))
    assert found.memory.bytes_per_chip["parameters"] * found.topology.devices >= 4 * parameters
    assert {c.axis for c in found.collectives} == {"fsdp"}
