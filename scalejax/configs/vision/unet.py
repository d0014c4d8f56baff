"""U-Net (O. Ronneberger et al., MICCAI 2015).

scalejax train unet-own --set data.source.path=FOLDER
"""

import dataclasses

from scalejax import optim
from scalejax.configs.vision import _common
from scalejax.data.images.augment import Augment
from scalejax.data.images.heads import TissueSlabs
from scalejax.data.images.nnunet import MaskedImages, NnUnetFolder
from scalejax.models.vision.segmentation import SegmentationSettings
from scalejax.models.vision.unet import UNetConfig
from scalejax.train.experiment import Experiment


def brain() -> Experiment:
    """Grey and white matter in slabs of one bundled head, ICBM 152."""
    return _common.experiment(
        model=UNetConfig(widths=(16, 32, 64, 128), segmentation=SegmentationSettings(deep_supervision=1)),
        data=TissueSlabs(),
        steps=400,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=3e-3, warmup=0.05)),
        every=100,
    )


def own() -> Experiment:
    """Your own masks, in a folder of the layout of nnU-Net: set data.source.path.

    Sizes are to be multiples of 16, which data.source.size cuts or fills up to. Pictures are not mirrored: that would
    exchange left and right; data.augment.flip=horizontal does it.
    """
    return _common.experiment(
        model=UNetConfig(segmentation=SegmentationSettings(deep_supervision=2)),
        data=MaskedImages(source=NnUnetFolder(path="dataset"), augment=Augment(turn=15, scale=(0.85, 1.15), shift=8)),
        steps=2000,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=1e-3, warmup=0.05)),
        every=200,
    )


def smoke() -> Experiment:
    """A few steps of a narrow one."""
    return dataclasses.replace(
        _common.shortened(brain(), steps=20, every=10),
        model=UNetConfig(widths=(4, 8, 16)),
        data=TissueSlabs(size=(64, 64)),
    )
