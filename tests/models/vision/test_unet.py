"""U-Net: its literal sums, its published size, and runs of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import segmentation_cases
from changes import changed
from flax import nnx
from scipy import signal
from segmentation_cases import SCHEMA, drawn, experiment

from scalejax import optim
from scalejax.errors import UserError
from scalejax.models.vision.segmentation import SegmentationSettings
from scalejax.models.vision.unet import UNet, UNetConfig
from scalejax.nn import counts
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.experiment import Gradients, Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run

SMALL = UNetConfig(widths=(3, 4, 6), segmentation=SegmentationSettings(deep_supervision=1))
STRATEGIES = {"implicit": Fsdp(), "explicit": Fsdp(form="explicit"), "ddp": Ddp()}


def literal_layer(x, layer, groups):
    """float64[H, W, in] through convolution, normalisation and ReLU."""
    kernel = np.asarray(layer.conv.kernel[...], np.float64)
    y = np.zeros((*x.shape[:2], kernel.shape[-1]))
    for i, o in np.ndindex(kernel.shape[2:]):
        y[..., o] += signal.correlate2d(x[..., i], kernel[..., i, o], "same")
    scale, bias = (np.asarray(p[...], np.float64) for p in (layer.norm.scale, layer.norm.bias))
    for own in np.split(np.arange(y.shape[-1]), groups or y.shape[-1]):
        y[..., own] = (y[..., own] - y[..., own].mean()) / np.sqrt(y[..., own].var() + 1e-5)
    return np.maximum(y * scale + bias, 0)


def literal_up(x, up):
    kernel = np.asarray(up.kernel[...], np.float64).reshape(x.shape[-1], 2, 2, -1)
    y = np.zeros((2 * x.shape[0], 2 * x.shape[1], kernel.shape[-1]))
    for row, column in np.ndindex(y.shape[:2]):
        y[row, column] = x[row // 2, column // 2] @ kernel[:, row % 2, column % 2] + np.asarray(up.bias[...])
    return y


def literal_unet(model, image, groups=None):
    """Logits of one picture, level by level as the file says."""
    x = (np.asarray(image, np.float64) - SCHEMA.mean) / SCHEMA.std
    x = literal_layer(literal_layer(x, model.stem, groups), model.encoder.first, groups)
    features = [x]
    for block in model.encoder.blocks:
        rows, columns = x.shape[0] // 2, x.shape[1] // 2
        x = np.array(
            [[x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].max((0, 1)) for j in range(columns)] for i in range(rows)]
        )
        for layer in block:
            x = literal_layer(x, layer, groups)
        features.append(x)
    logits = []
    for level in (1, 0):
        x = np.concatenate([features[level], literal_up(x, model.decoder.ups[level])], -1)
        for layer in model.decoder.blocks[level]:
            x = literal_layer(x, layer, groups)
        head = model.decoder.heads[level]
        logits.insert(0, x @ np.asarray(head.kernel[...], np.float64)[0, 0] + np.asarray(head.bias[...]))
    return logits


def built(config, seed=0):
    """A model whose normalisations are not all alike."""
    model = config.build(SCHEMA, nnx.Rngs(seed), Dtypes())
    rng = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if path[-1] in ("scale", "bias"):
            leaf[...] = leaf[...] + jnp.asarray(rng.normal(0, 0.3, leaf[...].shape), leaf[...].dtype)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("groups", [None, 1])
def test_is_what_the_file_says(groups):
    config = SMALL if groups is None else dataclasses.replace(SMALL, norm="group", groups=groups)
    model, image = built(config), drawn(1, 0)["images"]
    found = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(image))
    wanted = literal_unet(model, image[0], groups)
    assert [x.shape for x in found] == [(1, 16, 16, 3), (1, 8, 8, 3)]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one[0], other, atol=2e-4)  # ten layers in float32, each normalised


def test_parameters_of_the_published_size():
    schema = dataclasses.replace(SCHEMA, channels=3, height=512, width=512, mean=(0.0,) * 3, std=(1.0,) * 3)
    schema = dataclasses.replace(schema, classes=("background", "car"))
    config = UNetConfig(widths=(64, 128, 256, 512, 1024), norm="batch")
    model = counts.abstract(config.build, schema)
    # milesial/Pytorch-UNet, 3 channels and 2 classes, transposed convolutions: 31,037,698.
    assert counts.parameters(model) == 31_037_698


def test_work_is_counted():
    task = SMALL.task(SCHEMA)
    shapes = {name: (5, *field.shape) for name, field in task.fields().items()}
    per_pixel = {
        1: 9 * (1 * 3 + 3 * 3) + 9 * (6 * 3 + 3 * 3) + 3 * 3,  # encoder, decoder, head
        4: 9 * (3 * 4 + 4 * 4) + 9 * (8 * 4 + 4 * 4) + 4 * 3 + 4 * 4 * 3,  # and up to the finest
        16: 9 * (4 * 6 + 6 * 6) + 6 * 4 * 4,
    }
    macs = sum(256 // fewer * each for fewer, each in per_pixel.items())
    assert task.work(shapes).flops == 6 * 5 * macs
    assert task.work(shapes).count == 5


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"widths": (8,)}, "at least 2; got 1"),
        ({"widths": (8, 12), "norm": "group"}, "groups=8 must divide all widths"),
        ({"norm": "group", "groups": 0}, "groups must be at least 1; got 0"),
        ({"norm": "layer"}, "norm must be one of instance, group, batch; got 'layer'"),
        (
            {"widths": (8, 8), "segmentation": SegmentationSettings(deep_supervision=1)},
            "deep_supervision=1 is too much",
        ),
    ],
)
def test_levels_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        UNetConfig(**wrong)


def test_sizes_that_cannot_be_halved_are_refused_with_those_that_can():
    with pytest.raises(UserError, match=r"100 x 16 pixels .* multiples of 8, 96 x 16 say"):
        UNetConfig(widths=(4, 4, 4, 4)).task(dataclasses.replace(SCHEMA, height=100))


# Runs.


def bound(config, devices=None, **changes):
    run = changed(experiment(config), **changes)
    return Run.bind(run, run.data.build(), make_mesh(MeshShape(), jax.devices()[:devices]))


@pytest.mark.slow
def test_it_learns_and_a_run_in_two_halves_has_the_same_bits(tmp_path):
    run = experiment(UNetConfig(widths=(8, 16)), steps=40)
    whole = loop.train(run, workdir=tmp_path / "whole")
    assert whole["test_dice"] > 0.85
    assert whole["test_dice/square"] > 0.85
    assert whole["test_cases"] == 5
    assert whole["test_hd95"] < 6
    loop.train(changed(run, steps=20), workdir=tmp_path / "halves")
    again = loop.train(run, workdir=tmp_path / "halves", resume="must")
    assert again["test_dice"] == whole["test_dice"]
    assert again["test_loss"] == whole["test_loss"]
    assert (tmp_path / "whole" / "evaluation" / "pictures" / "test-masks.json").exists()


def learnt(config, devices, strategy, **changes):
    """(Losses, parameters and running means) after three steps in float64."""
    plain = optim.Sgd(learning_rate=optim.Constant(value=1e-2))
    run = bound(config, devices, strategy=strategy, precision=Precision(params="float64"), optimizer=plain, **changes)
    state, losses = run.program.init(), []
    for _, batch in zip(range(3), run.program.task.train_batches(run.data, run.mesh, 0), strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, {**state.params, **state.variables})


ON_DEVICES = {
    "two levels": UNetConfig(widths=(3, 4), norm="batch"),
    **{norm: dataclasses.replace(SMALL, norm=norm) for norm in ("batch", "instance")},
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "form"),
    [("two levels", "ddp"), ("batch", "implicit"), ("instance", "explicit")],
)
def test_eight_devices_learn_what_one_does(name, form):
    config = ON_DEVICES[name]
    found, wanted = learnt(config, 8, STRATEGIES[form]), learnt(config, 1, Fsdp())
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-11), found[1], wanted[1])


@pytest.mark.slow
def test_a_plan_knows_its_step_from_the_schema_alone():
    run = experiment(SMALL)
    program = binding.bind(run, run.data.schema(), make_mesh(MeshShape()), abstract=True)
    state, loss = jax.eval_shape(program.train_step, program.abstract_state(), program.abstract_batch())
    assert loss.shape == ()
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*the means of a BatchNorm are those of a part")
@pytest.mark.parametrize("changes", [{"data__batch_size": 1}, {"gradients": Gradients(microbatch=1)}])
def test_batch_norm_of_one_picture_is_refused(changes):
    run = bound(dataclasses.replace(SMALL, norm="batch"), 1, **changes)
    state, host = run.begin()
    with run.feed(host, 1) as feed:
        feed.take()
        with pytest.raises(UserError, match=r"a BatchNorm in training normalises over the examples of a batch, and"):
            feed.step(state)


@pytest.mark.slow
def test_one_picture_at_a_time_is_scored_with_batch_norm():
    run = bound(dataclasses.replace(SMALL, norm="batch"), 1, data__batch_size=1)
    assert np.isfinite(run.score(run.begin()[0], "validation")["val_loss"])


def test_a_label_that_the_schema_lacks_is_refused():
    data = segmentation_cases.Drawn(schema_=dataclasses.replace(SCHEMA, classes=("background", "square")))
    with pytest.raises(UserError, match=r"split 'train': masks of example 0 has 2, .* 0 to 1 \(background, square\)"):
        bound(SMALL, 1, data=data)


def test_masks_without_classes_are_refused():
    with pytest.raises(UserError, match="needs the background and a class at least; the masks have none"):
        SMALL.task(dataclasses.replace(SCHEMA, classes=()))


@pytest.mark.slow
def test_bfloat16_gives_logits_in_float32():
    model = UNet(SMALL, SCHEMA, nnx.Rngs(0), Dtypes(compute=jnp.bfloat16))
    image = jnp.asarray(drawn(2, 0)["images"])
    call = nnx.jit(lambda model, x: model(x)[0])
    found, wanted = call(model, image), call(UNet(SMALL, SCHEMA, nnx.Rngs(0)), image)
    assert found.dtype == jnp.float32
    assert np.abs(found - wanted).mean() < 0.05 * np.abs(wanted).mean()
