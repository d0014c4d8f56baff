"""ResNets of other libraries: their names, there and back, and what is refused."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.llm import mapping, safetensors
from scalejax.models.vision import resnet, resnet_checkpoints
from scalejax.models.vision.resnet import ResNetConfig
from scalejax.surgery.heads import NewHead
from scalejax.train.checkpoints.trained import Trained
from scalejax.train.runs import run_state

SCHEMA = ImageSchema(
    height=32, width=40, channels=3, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 70.0), classes=("a", "b", "c", "d")
)
SMALL = {
    "basic": ResNetConfig(stem="imagenet", block="basic", depths=(1, 2), widths=(4, 6)),
    "bottleneck": ResNetConfig(stem="imagenet", block="bottleneck", depths=(2, 1), widths=(3, 4)),
}


def norm(name, width):
    return {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}


def of_torchvision(depths, widths, classes, bottleneck):
    """Names and shapes of `torchvision.models.resnet18().state_dict()` and so on, counters of batches left out."""
    found = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    inputs = 64
    for stage, (depth, width) in enumerate(zip(depths, widths, strict=True), 1):
        outputs = width * 4 if bottleneck else width
        for block in range(depth):
            kernels = (1, 3, 1) if bottleneck else (3, 3)
            sizes = (inputs, *((width, width) if bottleneck else (width,)), outputs)
            for i, (k, (before, after)) in enumerate(zip(kernels, itertools.pairwise(sizes), strict=True), 1):
                found[f"layer{stage}.{block}.conv{i}.weight"] = (after, before, k, k)
                found |= norm(f"layer{stage}.{block}.bn{i}", after)
            if inputs != outputs:
                found[f"layer{stage}.{block}.downsample.0.weight"] = (outputs, inputs, 1, 1)
                found |= norm(f"layer{stage}.{block}.downsample.1", outputs)
            inputs = outputs
    return {**found, "fc.weight": (classes, inputs), "fc.bias": (classes,)}


@pytest.mark.parametrize("size", ["resnet18", "resnet50"])
def test_torchvision_s_names_and_shapes_are_ours_one_to_one(size):
    config = resnet.SIZES[size]
    shapes = resnet_checkpoints.shapes_of(config, SCHEMA)
    entries, sizes = resnet_checkpoints.table(config, shapes, "torchvision")
    wanted = of_torchvision(config.depths, config.widths, 4, config.block == "bottleneck")
    assert mapping.shapes(entries, sizes, 0) == wanted
    assert sorted(entry.path for entry in entries) == sorted(shapes)
    assert len(entries) == len(wanted)


def drawn(config):
    """Parameters and running means by path."""
    rng = np.random.default_rng(0)
    shapes = resnet_checkpoints.shapes_of(config, SCHEMA)
    return {path: rng.uniform(0.5, 1.5, shape).astype(np.float32) for path, shape in shapes.items()}


@pytest.mark.parametrize("names", ["huggingface", "torchvision"])
@pytest.mark.parametrize("name", SMALL)
def test_there_and_back_again(name, names, tmp_path):
    config, arrays = SMALL[name], drawn(SMALL[name])
    resnet_checkpoints.write_folder(tmp_path / "x", config, SCHEMA, arrays, names)
    found = resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    assert found.params.keys() | found.variables.keys() == arrays.keys()
    assert all(path.endswith(("mean", "variance")) for path in found.variables)
    for path, array in {**found.params, **found.variables}.items():
        np.testing.assert_array_equal(array[...], arrays[path])
        assert array.shape == arrays[path].shape
    filters = found.params["stem/conv/kernel"]
    np.testing.assert_array_equal(filters[:, 1:3, 2], arrays["stem/conv/kernel"][:, 1:3, 2])
    stored = safetensors.open_folder(tmp_path / "x")
    counters = [tensor for tensor in stored.values() if tensor.name.endswith("num_batches_tracked")]
    assert {(tensor.kind, tensor.shape) for tensor in counters} == {("I64", ())}
    assert len(counters) == len(found.variables) // 2
    if names == "huggingface":
        said = json.loads((tmp_path / "x" / "config.json").read_text())
        assert said["id2label"] == {"0": "a", "1": "b", "2": "c", "3": "d"}
        said = json.loads((tmp_path / "x" / "preprocessor_config.json").read_text())
        np.testing.assert_allclose(said["image_mean"], np.array(SCHEMA.mean) / 255)
        assert said["size"] == {"height": 32, "width": 40}


def test_classes_come_to_the_order_of_the_data_by_name(tmp_path):
    config, arrays = SMALL["basic"], drawn(SMALL["basic"])
    theirs = dataclasses.replace(SCHEMA, classes=("d", "a", "b", "c"))
    resnet_checkpoints.write_folder(tmp_path / "x", config, theirs, arrays)
    found = resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    np.testing.assert_array_equal(found.params["head/kernel"][:, 1:], arrays["head/kernel"][:, [2, 3, 0]])
    np.testing.assert_array_equal(found.params["head/bias"][...], arrays["head/bias"][[1, 2, 3, 0]])
    assert found.identity == {}
    edited(tmp_path / "x", id2label={str(n): f"LABEL_{n}" for n in range(4)})
    found = resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    assert found.identity == {"data.classes": "LABEL_0, LABEL_1, LABEL_2, LABEL_3"}
    np.testing.assert_array_equal(found.params["head/bias"][...], arrays["head/bias"])
    edited(tmp_path / "x", id2label={"0": "a", "2": "b"})
    with pytest.raises(UserError, match=r"id2label must name classes 0, 1, 2, \.\.\.; got"):
        resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    edited(tmp_path / "x", id2label=["a", 1])
    with pytest.raises(UserError, match="names of classes must be texts"):
        resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)


def test_classes_of_other_names_are_refused_with_both_lists_unless_the_head_is_new(tmp_path):
    config = SMALL["basic"]
    theirs = dataclasses.replace(SCHEMA, classes=("zebra", "ant", "cat", "dog"))
    resnet_checkpoints.write_folder(tmp_path / "x", config, theirs, drawn(config))
    program = SimpleNamespace(task=config.task(SCHEMA), model=None)
    source = resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    with pytest.raises(
        UserError, match=r"'zebra, ant, cat, dog' in the checkpoint and 'a, b, c, d' here.*heads.NewHead"
    ):
        run_state.with_model(program, None, None, source, None, "init=x")
    fresh = Trained(params=drawn(config), step=0, origin="fresh")
    params = NewHead().operate(source, fresh).params
    assert params["head/bias"] is fresh.params["head/bias"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_mean": [0.5, 0.5, 0.5]}, r"by the mean 127.5,127.5,127.5 .*--set data.mean=127.5,127.5,127.5 --set"),
        ({"image_std": 0.25}, r"deviation 63.75,63.75,63.75, and here they are by 120,110,100 and 60,50,70"),
        ({"do_normalize": False}, r"by the mean 0,0,0 and the deviation 255,255,255"),
        ({"rescale_factor": 1 / 127.5}, r"by the mean 60,55,50 and the deviation 30,25,35"),
        ({"do_rescale": False}, r"by the mean 0.470588,0.431373,0.392157"),
        ({"image_mean": None}, r"mean and standard deviation of pixels must be 3 numbers each"),
        ({"image_std": [1, 0, 1]}, r"3 numbers each, the latter above 0; got"),
        ({"image_mean": [0.5, 0.5]}, r"3 numbers each"),
    ],
)
def test_pixels_that_were_standardised_otherwise_are_refused(tmp_path, fields, message):
    config = SMALL["basic"]
    resnet_checkpoints.write_folder(tmp_path / "x", config, SCHEMA, drawn(config))
    edited(tmp_path / "x", "preprocessor_config.json", **fields)
    with pytest.raises(UserError, match=message):
        resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)


def test_what_timm_says_of_pixels_and_classes_counts_too(tmp_path):
    config, arrays = SMALL["basic"], drawn(SMALL["basic"])
    resnet_checkpoints.write_folder(tmp_path / "x", config, SCHEMA, arrays, "torchvision")
    here = {"mean": [m / 255 for m in SCHEMA.mean], "std": [s / 255 for s in SCHEMA.std]}
    content = {"architecture": "resnet18", "pretrained_cfg": here, "label_names": ["b", "a", "c", "d"]}
    (tmp_path / "x" / "config.json").write_text(json.dumps(content))
    found = resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    np.testing.assert_array_equal(found.params["head/bias"][...], arrays["head/bias"][[1, 0, 2, 3]])
    edited(tmp_path / "x", pretrained_cfg={"mean": [0.5] * 3, "std": [0.5] * 3})
    with pytest.raises(UserError, match=r"x/config.json: pixels were standardised by the mean 127.5"):
        resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)


def edited(folder, name="config.json", **fields):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": [3, 2]}, r"depths is \[3, 2\] there and \[1, 2\] by the recipe. Set model.block, model.depths"),
        ({"model_type": "vit"}, "model_type must be 'resnet'; got 'vit'"),
        ({"downsample_in_bottleneck": True}, "downsample_in_bottleneck is True there and False by the recipe"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu' there and 'relu' by the recipe"),
        ({"embedding_size": 5}, "embedding_size is 5 there and 4 by the recipe"),
        ({"hidden_sizes": None}, r"hidden_sizes is None there and \[4, 6\] by the recipe"),
    ],
)
def test_refuses_another_architecture(tmp_path, fields, message):
    resnet_checkpoints.write_folder(tmp_path / "x", SMALL["basic"], SCHEMA, drawn(SMALL["basic"]))
    edited(tmp_path / "x", **fields)
    with pytest.raises(UserError, match=message):
        resnet_checkpoints.open_folder(tmp_path / "x", SMALL["basic"], SCHEMA)


def test_refuses_tensors_that_do_not_fit(tmp_path):
    config = SMALL["basic"]
    wider = dataclasses.replace(config, widths=(4, 8))
    resnet_checkpoints.write_folder(tmp_path / "x", wider, SCHEMA, drawn(wider), "torchvision")
    with pytest.raises(UserError, match=r"layer2.0.conv1.weight has shape \[8, 4, 3, 3\]"):
        resnet_checkpoints.open_folder(tmp_path / "x", config, SCHEMA)
    resnet_checkpoints.write_folder(tmp_path / "y", config, SCHEMA, drawn(config), "torchvision")
    with pytest.raises(UserError, match=r"lacks layer2\.2.conv1\.weight"):
        resnet_checkpoints.open_folder(tmp_path / "y", dataclasses.replace(config, depths=(1, 3)), SCHEMA)
    (tmp_path / "z").mkdir()
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        resnet_checkpoints.open_folder(tmp_path / "z", config, SCHEMA)


def test_refuses_a_net_that_transformers_does_not_have(tmp_path):
    config = resnet.cifar(8)
    with pytest.raises(UserError, match="transformers has only stem 'imagenet' with shortcut 'projection'"):
        resnet_checkpoints.write_folder(tmp_path / "x", config, SCHEMA, drawn(config))
    assert not (tmp_path / "x").exists()
    arrays = drawn(SMALL["basic"])
    arrays["head/bias"][0] = np.nan
    with pytest.raises(UserError, match="head/bias holds 1 values that are NaN"):
        resnet_checkpoints.write_folder(tmp_path / "x", SMALL["basic"], SCHEMA, arrays)
    assert not (tmp_path / "x").exists()
