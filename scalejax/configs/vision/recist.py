"""RECIST-Net (Xie et al., 2021): lesions by the ends of their diameters.

scalejax train recist-nuclei
"""

import dataclasses

from scalejax import optim
from scalejax.configs.vision import _common
from scalejax.data.images.augment import Augment
from scalejax.data.images.recist import DeepLesion, NucleiCrosses
from scalejax.models.vision import hourglass
from scalejax.models.vision.recist_net import RecistNetConfig
from scalejax.train.experiment import Experiment


def nuclei() -> Experiment:
    """A small hourglass on tiles of the bundled nuclei."""
    return _common.experiment(
        model=RecistNetConfig(backbone=hourglass.SIZES["small"], head=12),
        data=NucleiCrosses(
            augment=Augment(
                window=(128, 128), flip="both", quarter_turns=True, scale=(0.85, 1.2), brightness=(0.8, 1.25)
            ),
        ),
        steps=500,
        optimizer=optim.Adam(learning_rate=optim.WarmupCosine(peak=2e-3)),
        every=100,
    )


def deep_lesion() -> Experiment:
    """ExtremeNet's network on DeepLesion, which you bring: set data.path. Nobody has run this one."""
    return _common.experiment(
        model=RecistNetConfig(padding=5.0),
        data=DeepLesion(augment=Augment(flip="horizontal")),
        steps=100_000,
        optimizer=optim.Adam(learning_rate=optim.Constant(value=2.5e-4)),
        every=5000,
    )


def smoke() -> Experiment:
    """A few steps of a narrow one, with a batch that eight devices can share."""
    tiny = hourglass.HourglassConfig(stacks=1, widths=(8, 8, 12), blocks=(1, 1, 1), stem=8, features=8)
    return dataclasses.replace(
        _common.shortened(nuclei(), steps=6, every=3),
        model=RecistNetConfig(backbone=tiny, head=8),
        data=NucleiCrosses(augment=Augment(window=(128, 128), flip="both"), batch_size=8),
        log_every=3,
    )
