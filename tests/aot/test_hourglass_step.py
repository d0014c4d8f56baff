"""RECIST-Net with the network of ExtremeNet at its size: its work, and a hourglass of one block a depth compiled."""

import dataclasses

import pytest
from changes import changed

from scalejax import configs
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import plan, topology
from scalejax.train.runs import binding

pytestmark = pytest.mark.aot

BATCH = 8
PUBLISHED = changed(configs.load("recist-deep-lesion"), data__size=511, data__batch_size=BATCH)


def test_its_work_is_what_is_on_paper():
    """Three slices, two stacks: forward and twice backward, 2.56 TFLOP a picture.

    `scalejax plan recist-deep-lesion --set data.size=511 --set data.batch_size=8 --topology v5e:2x2` compiles it for
    minutes: it fits, with temporaries of 4.8 GB.
    """
    mesh, _ = topology.make_mesh(topology.parse("v5e:2x2"), MeshShape())
    program = binding.bind(PUBLISHED, PUBLISHED.data.schema(), mesh)
    shapes = {name: x.shape for name, x in program.abstract_batch().fields.items()}
    assert program.task.work(shapes).flops == pytest.approx(2.565e12 * BATCH, rel=0.001)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_block_a_depth_fits_at_511_pixels():
    backbone = dataclasses.replace(PUBLISHED.model.backbone, stacks=1, blocks=(1,) * 6)
    found = plan(changed(PUBLISHED, model__backbone=backbone), "v5e:2x2")
    assert found.memory.fits
    # The gradient of the pixels, of which nobody asks, is left out.
    assert found.flops == pytest.approx(found.model_flops, rel=0.005)
