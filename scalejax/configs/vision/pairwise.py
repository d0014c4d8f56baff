"""Shape priors by pairwise comparison (C. Xie et al., 2022, arXiv 2204.11090): a U-Net beside a template.

scalejax train pairwise-brain
scalejax train pairwise-brain --set model.comparison=none            # the plain U-Net; early, concatenation
"""

import dataclasses

from scalejax import optim
from scalejax.configs.vision import _common
from scalejax.data.images.augment import Augment
from scalejax.data.images.heads import TissueSlabs, TwoHeads
from scalejax.data.images.nnunet import MaskedImages, NnUnetFolder
from scalejax.models.vision.pairwise_unet import PairwiseUNetConfig, Templates
from scalejax.models.vision.segmentation import SegmentationSettings
from scalejax.models.vision.unet import UNetConfig
from scalejax.train.experiment import Experiment


def brain() -> Experiment:
    """Grey and white matter in slabs of one bundled head, ICBM 152."""
    return _common.experiment(
        model=PairwiseUNetConfig(
            unet=UNetConfig(widths=(16, 32, 64, 128), segmentation=SegmentationSettings(deep_supervision=1)),
            templates=Templates(count=6, alike=8),
        ),
        data=TissueSlabs(),
        steps=400,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=3e-3, warmup=0.05)),
        every=100,
    )


def two_heads() -> Experiment:
    """Deep structures, learnt from 16 slices of Colin27 (Debian's mricron-data), tested on ICBM 152.

    Three minutes on two cores. What it reaches against plain U-Nets is in benchmarks/results/pairwise_brain.md.
    """
    return _common.experiment(
        model=PairwiseUNetConfig(
            unet=UNetConfig(widths=(8, 16, 32, 64)), templates=Templates(at_test="nearest", count=8, alike=4)
        ),
        data=TwoHeads(batch_size=4),
        steps=1000,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=3e-3, warmup=0.05)),
        every=250,
    )


def own() -> Experiment:
    """Your own masks beside templates, in a folder of the layout of nnU-Net: set data.source.path.

    A case is a subject: a target's template is a slice of another case. Sizes are to be multiples of 16, which
    data.source.size cuts or fills up to.
    """
    return _common.experiment(
        model=PairwiseUNetConfig(templates=Templates(count=8, alike=16)),
        data=MaskedImages(source=NnUnetFolder(path="dataset"), augment=Augment(turn=15, scale=(0.85, 1.15), shift=8)),
        steps=2000,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=1e-3, warmup=0.05)),
        every=200,
    )


def smoke() -> Experiment:
    """A few steps of a narrow one."""
    return dataclasses.replace(
        _common.shortened(brain(), steps=20, every=10),
        model=PairwiseUNetConfig(unet=UNetConfig(widths=(4, 8, 16)), templates=Templates(count=2)),
        data=TissueSlabs(size=(64, 64)),
    )
