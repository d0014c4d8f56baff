"""The training step of a network for pictures against the same network in PyTorch.

One step is forward, backward and SGD with momentum on random pictures, which lie on the device already as stored
pixels; both sides start from the same parameters. PyTorch has its arrays in the order [B, H, W, C], in which oneDNN was
faster in all cases. Cases:

    resnet20    32 x 32 pixels, 128 pictures
    resnet18    64 x 64 pixels, 32 pictures, the stem of ImageNet
    unet        128 x 128 pixels, 4 pictures, widths from 16 to 128; cross-entropy and Dice of four classes
    resnet50    224 x 224 pixels, 128 pictures, bfloat16, on an accelerator

Figures: `cpu_ratio` is the ratio of CPU seconds of the process, median over turns, which other programs on the machine
disturb less than they do the clock.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np

from scalejax import optim
from scalejax.bench import machine, peers, training_step
from scalejax.bench.harness import Contest, OutputsDiffer, Timed, Unsuited, repeated
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision import resnet, resnet_checkpoints
from scalejax.models.vision.resnet import ResNetConfig
from scalejax.models.vision.unet import UNetConfig
from scalejax.parallel import mesh as meshes
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment, Precision
from scalejax.train.protocols import ModelConfig
from scalejax.train.runs import binding

PEERS = ("torch", "torch-compile")

LEARNING_RATE, MOMENTUM = 0.001, 0.9

LOSS_TOLERANCE = 1e-4
"""Relative, over `CHECKED_STEPS` steps: float32 sums in another order."""

CHECKED_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A network and its pictures.

    Attributes:
      model: Of ours.
      side: Height and width.
      channels: Of a picture.
      classes: Number of them.
      rows: Pictures of a batch.
      peer: (the peer's library of networks, model, channels, classes, parameters and running means by path) -> the
        same network in PyTorch, and its loss of logits and labels.
      labels: "labels" = a class a picture, "masks" = one a pixel.
      compute: Dtype of the operands; what is narrow runs on accelerators alone.
    """

    model: ModelConfig
    side: int
    channels: int
    classes: int
    rows: int
    peer: Callable[[Any, Any, int, int, dict[str, np.ndarray]], tuple[Any, Any]]
    labels: Literal["labels", "masks"] = "labels"
    compute: Literal["float32", "bfloat16"] = "float32"


def _resnet(
    theirs: Any, model: ResNetConfig, channels: int, classes: int, arrays: dict[str, np.ndarray]
) -> tuple[Any, Any]:
    tensors = resnet_checkpoints.renamed(model, arrays, "torchvision")
    return theirs.load(theirs.ResNet(model, channels, classes), tensors), theirs.nn.functional.cross_entropy


def _unet(
    theirs: Any, model: UNetConfig, channels: int, classes: int, arrays: dict[str, np.ndarray]
) -> tuple[Any, Any]:
    network = theirs.load(theirs.UNet(model, channels, classes), theirs.unet_tensors(arrays))
    return network, theirs.dice_and_cross_entropy


_CASES = {
    "resnet20": Case(resnet.SIZES["resnet20"], 32, 3, 10, 128, _resnet),
    "resnet18": Case(resnet.SIZES["resnet18"], 64, 3, 10, 32, _resnet),
    "unet": Case(UNetConfig(widths=(16, 32, 64, 128)), 128, 1, 4, 4, _unet, "masks"),
    "resnet50": Case(resnet.SIZES["resnet50"], 224, 3, 1000, 128, _resnet, compute="bfloat16"),
}
CASES = tuple(_CASES)


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case.

    Raises:
      UserError: a peer on an accelerator.
      Unsuited: the case of an accelerator on a CPU.
    """
    if _CASES[case].compute != "float32" and jax.default_backend() == "cpu":
        raise Unsuited(f"--case {case}: is for an accelerator, and jax has none here. Leave it out.")
    return contest(_CASES[case], against)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Random pictures and classes; gives `ImageDataSet`."""

    case: Case
    batch_size: int

    def schema(self) -> ImageSchema:
        """Of the pictures."""
        case = self.case
        return ImageSchema(
            height=case.side,
            width=case.side,
            channels=case.channels,
            mean=(127.5,) * case.channels,
            std=(74.0,) * case.channels,
            classes=tuple(map(str, range(case.classes))),
            batch_size=self.batch_size,
        )

    def build(self) -> ImageDataSet:
        """One batch."""
        rng, schema = np.random.default_rng(0), self.schema()
        images = rng.integers(0, 256, (self.batch_size, *schema.shape), np.uint8)
        shape = images.shape[: 3 if self.case.labels == "masks" else 1]
        labels = rng.integers(0, self.case.classes, shape).astype(np.int32)
        arrays = {"train": {"images": images, self.case.labels: labels}}
        if self.case.labels == "masks":
            arrays["train"]["cases"] = np.arange(self.batch_size, dtype=np.int32)
        return ImageDataSet(arrays, batch_size=self.batch_size, schema=schema, augment=Augment())


def contest(case: Case, against: str | None) -> Contest:
    """Our step, and the peer's."""
    device = jax.devices()[0]
    if against is not None:
        training_step.check_peer_device(device)
    experiment = Experiment(
        model=case.model,
        data=Noise(case=case, batch_size=case.rows),
        steps=1_000_000,
        optimizer=optim.Sgd(learning_rate=optim.Constant(value=LEARNING_RATE), momentum=MOMENTUM),
        precision=Precision(compute=case.compute),
    )
    data = experiment.data.build()
    mesh = meshes.make_mesh(None, [device])
    program = binding.bind(experiment, data.schema, mesh, data)
    batch: Any = next(program.task.train_batches(data, mesh, 0))
    placed, state, loss = convert.to_device(batch, program), program.init(), None
    arrays = {path: np.array(x) for path, x in {**state.params, **state.variables}.items()}

    def steps(count: int) -> None:
        nonlocal state, loss
        for _ in range(count):
            state, loss = program.train_step(state, placed)
        jax.block_until_ready(state)

    ours = Timed(steps, time.process_time)
    alone = Contest(ours, examples=case.rows, device=machine.device_name(device))
    if against is None:
        return alone
    library = peers.load("torch_vision")
    module, criterion = case.peer(library, case.model, case.channels, case.classes, arrays)
    theirs = library.TrainingStep(
        module,
        data.schema,
        criterion=criterion,
        learning_rate=LEARNING_RATE,
        momentum=MOMENTUM,
        compiled=against == "torch-compile",
        threads=len(machine.usable_cpus()),
        channels_last=True,
    )
    given = theirs.place(batch["images"], batch[case.labels])
    peer = Timed(repeated(lambda: theirs.step(given)), time.process_time)

    def check() -> None:
        for step in range(1, CHECKED_STEPS + 1):
            steps(1)
            mine, other = float(np.asarray(loss)), theirs.step(given)[0]
            if not abs(mine - other) <= LOSS_TOLERANCE * abs(other):
                raise OutputsDiffer(f"losses of step {step} differ: {mine:.7f} here, {other:.7f} in the peer")

    def figures() -> dict[str, float]:
        return {"cpu_ratio": peer.seconds() / ours.seconds()}

    return dataclasses.replace(alone, peer=peer, check=check, figures=figures)
