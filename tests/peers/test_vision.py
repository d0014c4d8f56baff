"""ResNets and U-Nets against transformers and PyTorch: logits of equal weights, and twenty steps of training."""

import dataclasses
import json

import pytest

pytest.importorskip("torch", reason="torch is not installed; benchmarks/peers.sh installs it")
pytest.importorskip("transformers", reason="transformers is not installed; benchmarks/peers.sh installs it")

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx

from scalejax import optim
from scalejax.bench.peers import torch_vision
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision import resnet_checkpoints
from scalejax.models.vision.resnet import ResNet, ResNetConfig
from scalejax.models.vision.unet import UNetConfig
from scalejax.nn import FLOAT32
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.batches import convert
from scalejax.train.experiment import Experiment
from scalejax.train.runs.run import Run

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SCHEMA = ImageSchema(
    height=48, width=40, channels=3, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 70.0), classes=tuple("abcde")
)
CONFIGS = {
    "basic": ResNetConfig(stem="imagenet", block="basic", depths=(1, 2, 1), widths=(8, 12, 16)),
    "bottleneck": ResNetConfig(stem="imagenet", block="bottleneck", depths=(2, 1), widths=(8, 12)),
}


def of_transformers(config):
    """Their net with weights and running means drawn at random."""
    wider = 4 if config.block == "bottleneck" else 1
    theirs = transformers.ResNetForImageClassification(
        transformers.ResNetConfig(
            embedding_size=config.widths[0],
            hidden_sizes=[wider * width for width in config.widths],
            depths=list(config.depths),
            layer_type=config.block,
            num_labels=5,
        )
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if "normalization" in name and tensor.is_floating_point():
                tensor.uniform_(0.5, 1.5)
    return theirs.eval()


def model_of(folder, config):
    """Our net with what a folder holds."""
    model = ResNet(config, SCHEMA, nnx.Rngs(0), FLOAT32)
    found = resnet_checkpoints.open_folder(folder, config, SCHEMA)
    for path, variable in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat))):
        name = "/".join(map(str, path))
        variable[...] = jnp.asarray({**found.params, **found.variables}[name][...])
        nnx.update(model, nnx.from_flat_state([(path, variable)]))
    return model


def pictures(count=4):
    return np.random.default_rng(0).integers(0, 256, (count, *SCHEMA.shape), np.uint8)


def logits(theirs, images):
    pixels = (images - np.array(SCHEMA.mean)) / np.array(SCHEMA.std)
    with torch.no_grad():
        return theirs(torch.tensor(pixels.transpose(0, 3, 1, 2), dtype=torch.float32)).logits.numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_transformers_give_its_logits(name, tmp_path):
    theirs = of_transformers(CONFIGS[name])
    theirs.save_pretrained(tmp_path)
    ours = model_of(tmp_path, CONFIGS[name])(jnp.asarray(pictures()), "evaluation")
    wanted = logits(theirs, pictures())
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_is_written(name, tmp_path):
    config, rng = CONFIGS[name], np.random.default_rng(1)
    shapes = resnet_checkpoints.shapes_of(config, SCHEMA)
    arrays = {
        path: (rng.normal(0, 0.2, shape) if "kernel" in path else rng.uniform(0.5, 1.5, shape)).astype(np.float32)
        for path, shape in shapes.items()
    }
    resnet_checkpoints.write_folder(tmp_path / "x", config, SCHEMA, arrays)
    theirs, info = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "x", output_loading_info=True)
    assert not any(info.values()), info
    ours = model_of(tmp_path / "x", config)(jnp.asarray(pictures()), "evaluation")
    wanted = logits(theirs.eval(), pictures())
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
    assert theirs.config.id2label[2] == "c"


def test_a_processor_of_transformers_reads_how_pixels_are_standardised(tmp_path):
    config = CONFIGS["basic"]
    arrays = {path: np.ones(shape, np.float32) for path, shape in resnet_checkpoints.shapes_of(config, SCHEMA).items()}
    resnet_checkpoints.write_folder(tmp_path / "x", config, SCHEMA, arrays)
    said = json.loads((tmp_path / "x" / "preprocessor_config.json").read_text())
    assert hasattr(transformers, said["image_processor_type"])
    pixels = pictures() * said["rescale_factor"]
    made = (pixels - np.array(said["image_mean"])) / np.array(said["image_std"])
    np.testing.assert_allclose(made, (pictures() - np.array(SCHEMA.mean)) / np.array(SCHEMA.std), atol=1e-5)


ROWS, SIDE = 16, 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise:
    """Random pictures and labels; gives `ImageDataSet`."""

    batch_size: int = ROWS

    def schema(self):
        return dataclasses.replace(SCHEMA, height=SIDE, width=SIDE, batch_size=ROWS)

    def build(self):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (4 * ROWS, SIDE, SIDE, 3), np.uint8)
        labels = rng.integers(0, 5, len(images)).astype(np.int32)
        arrays = {"train": {"images": images, "labels": labels}}
        return ImageDataSet(arrays, batch_size=ROWS, schema=self.schema(), augment=Augment())


@pytest.fixture(scope="module")
def sides():
    """Twenty steps from the same weights: [(our loss, theirs)], both models, and a batch."""
    experiment = Experiment(
        model=ResNetConfig(stem="cifar", block="basic", depths=(1, 1), widths=(8, 16)),
        data=Noise(),
        steps=20,
        optimizer=optim.Sgd(learning_rate=optim.Constant(value=0.05), momentum=0.9),
    )
    run = Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:1]))
    state = run.program.init()
    theirs = torch_vision.TrainingStep(
        torch_vision.load(
            torch_vision.ResNet(experiment.model, 3, 5),
            resnet_checkpoints.renamed(experiment.model, {**state.params, **state.variables}, "torchvision"),
        ),
        experiment.data.schema(),
        learning_rate=0.05,
        momentum=0.9,
    )
    lines = []
    for _, batch in zip(range(20), run.program.task.train_batches(run.data, run.mesh, 0), strict=False):
        placed = convert.to_device(batch, run.program)
        state, loss = run.program.train_step(state, placed)
        other, _ = theirs.step(theirs.place(batch["images"], batch["labels"]))
        lines.append((float(loss), other))
    return lines, run, state, theirs, batch


def test_losses_of_twenty_steps_are_those_of_pytorch(sides):
    ours, theirs = np.array(sides[0]).T
    assert theirs[-1] < theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_parameters_after_twenty_steps_are_those_of_pytorch(sides):
    _, run, state, theirs, _ = sides
    found = resnet_checkpoints.renamed(run.experiment.model, {**state.params, **state.variables}, "torchvision")
    wanted = theirs.module.state_dict()
    for name, array in found.items():
        if "running" not in name:
            np.testing.assert_allclose(array, wanted[name].numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


def test_running_means_are_those_of_pytorch_and_its_variances_are_unbiased(sides):
    """PyTorch's momentum of 0.1 is ours of 0.9. It divides by n - 1 for the running variance alone, we by n: over equal
    batches of n values a channel the two differ by the factor (n - 1) / n, apart from what was there at first.
    """
    _, run, state, theirs, _ = sides
    found = resnet_checkpoints.renamed(run.experiment.model, dict(state.variables), "torchvision")
    at_first = 0.9**20
    for name, wanted in theirs.module.state_dict().items():
        if name.endswith("running_mean"):
            np.testing.assert_allclose(found[name], wanted.numpy(), rtol=1e-4, atol=1e-4)
        if name.endswith("running_var"):
            values = ROWS * SIDE**2 // (4 if name.startswith("layer2") else 1)
            biased = (wanted.numpy() - at_first) * (values - 1) / values + at_first
            np.testing.assert_allclose(found[name], biased, rtol=1e-4)
            assert np.abs(found[name] / wanted.numpy() - 1).min() > 0.1 / values


def test_scores_with_running_means_are_those_of_pytorch(sides):
    _, run, state, theirs, batch = sides
    model = run.program.model.merge(dict(state.params), dict(state.variables))
    ours = np.asarray(model(jnp.asarray(batch["images"]), "evaluation"))
    placed = theirs.place(batch["images"], batch["labels"])
    # Their variances are larger by one part in 576 or more.
    np.testing.assert_allclose(ours, theirs.logits(placed), rtol=5e-3, atol=5e-3)
    torch_vision.load(
        theirs.module,
        resnet_checkpoints.renamed(run.experiment.model, {**state.params, **state.variables}, "torchvision"),
    )
    wanted = theirs.logits(placed)
    np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(ours.argmax(1), wanted.argmax(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masks(Noise):
    """Random pictures with a class for each pixel."""

    def schema(self):
        return dataclasses.replace(SCHEMA, height=16, width=16, batch_size=ROWS)

    def build(self):
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (4 * ROWS, 16, 16, 3), np.uint8)
        # What can be learnt: the class of a pixel follows from how bright it is.
        masks = (images.mean(-1) // 52).astype(np.int32)
        arrays = {"train": {"images": images, "masks": masks, "cases": np.arange(len(images), dtype=np.int32)}}
        return ImageDataSet(arrays, batch_size=ROWS, schema=self.schema(), augment=Augment())


def test_losses_and_parameters_of_a_unet_are_those_of_pytorch_over_twenty_steps():
    experiment = Experiment(
        model=UNetConfig(widths=(4, 8, 12)),
        data=Masks(),
        steps=20,
        optimizer=optim.Sgd(learning_rate=optim.Constant(value=0.05), momentum=0.9),
    )
    run = Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:1]))
    state = run.program.init()
    arrays = {path: np.array(array) for path, array in state.params.items()}
    theirs = torch_vision.TrainingStep(
        torch_vision.load(torch_vision.UNet(experiment.model, 3, 5), torch_vision.unet_tensors(arrays)),
        experiment.data.schema(),
        criterion=torch_vision.dice_and_cross_entropy,
        learning_rate=0.05,
        momentum=0.9,
    )
    lines = []
    for _, batch in zip(range(20), run.program.task.train_batches(run.data, run.mesh, 0), strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        lines.append((float(loss), theirs.step(theirs.place(batch["images"], batch["masks"]))[0]))
    ours, wanted = np.array(lines).T
    assert wanted[-1] < 0.9 * wanted[0]
    np.testing.assert_allclose(ours, wanted, rtol=1e-4)
    found = torch_vision.unet_tensors({path: np.array(array) for path, array in state.params.items()})
    for name, array in theirs.module.state_dict().items():
        np.testing.assert_allclose(found[name], array.numpy(), rtol=1e-3, atol=1e-4, err_msg=name)
