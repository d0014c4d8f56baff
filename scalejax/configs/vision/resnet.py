"""Residual networks (He et al., CVPR 2016).

scalejax train resnet-fashion
"""

import dataclasses

from scalejax.configs.vision import _common
from scalejax.data.images.augment import Augment
from scalejax.data.images.labelled import LabelledImages
from scalejax.data.images.sources import FashionMnist, IdxFolder, ImageFolder
from scalejax.models.vision import resnet
from scalejax.train.experiment import Experiment


def fashion() -> Experiment:
    """ResNet-20 on the bundled 5,000 pictures of Fashion-MNIST."""
    return _common.experiment(
        model=resnet.SIZES["resnet20"],
        data=LabelledImages(source=FashionMnist(), batch_size=64, augment=Augment(crop=2, flip="horizontal")),
        steps=1120,  # 20 epochs
        optimizer=_common.sgd(peak=0.1),
        every=112,
    )


def fashion_all() -> Experiment:
    """The same on all 70,000 pictures, as Debian's package dataset-fashion-mnist installs them, or data.source.path."""
    return dataclasses.replace(
        _common.shortened(fashion(), steps=6900, every=690),  # 15 epochs
        data=LabelledImages(
            source=IdxFolder(names=FashionMnist.names),
            validation=1 / 60,
            batch_size=128,
            augment=Augment(crop=2, flip="horizontal"),
        ),
    )


def own() -> Experiment:
    """ResNet-18 on a folder of class folders of your own pictures: set data.source.path.

    Pictures are scaled to 144 x 144; training sees a window of 128, the other splits their middle. `model.stem=cifar`
    suits pictures of some 30 pixels.
    """
    return _common.experiment(
        model=resnet.SIZES["resnet18"],
        data=LabelledImages(
            source=ImageFolder(path="images"),
            size=(144, 144),
            batch_size=32,
            augment=Augment(window=(128, 128), flip="horizontal"),
        ),
        steps=1000,
        optimizer=_common.sgd(peak=0.05, weight_decay=1e-4, warmup=0.05),
        every=100,
    )


def smoke() -> Experiment:
    """A few steps of a ResNet-8."""
    return dataclasses.replace(_common.shortened(fashion(), steps=30, every=15), model=resnet.cifar(8))
