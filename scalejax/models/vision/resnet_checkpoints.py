"""Folders of others that hold a ResNet, read and written: `model.safetensors` by the names of two libraries.

    huggingface    resnet.encoder.stages.1.layers.0.layer.0.convolution.weight    (ResNetForImageClassification)
    torchvision    layer2.0.conv1.weight                                          (timm's ResNets have these, too)

Which names a folder has is seen from them. With those of Hugging Face config.json says the architecture, which must be
that of the recipe, and the names of the classes; preprocessor_config.json says how pixels are standardised, which must
be as in the data. timm's config.json may say both, too. The head is brought to the order of the data's classes.
"""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy as np
from flax import nnx

from scalejax import json_reading
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.llm import mapping, safetensors
from scalejax.models.llm.mapping import Entry, TensorSource
from scalejax.models.llm.safetensors import Written
from scalejax.nn import counts
from scalejax.numerics.dtypes import Dtypes
from scalejax.train import disk
from scalejax.train.checkpoints.array_store import AnyArray, LazyArray
from scalejax.train.checkpoints.trained import Trained

Names = Literal["huggingface", "torchvision"]

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
_MODEL = "ResNetForImageClassification"
_COUNTER = "num_batches_tracked"
"""How many batches a norm of PyTorch has seen, which nothing here asks for."""

_STEMS = {
    "huggingface": ("resnet.embedder.embedder.convolution", "resnet.embedder.embedder.normalization"),
    "torchvision": ("conv1", "bn1"),
}
_HEADS = {"huggingface": "classifier.1", "torchvision": "fc"}
_DEFAULTS = {
    "embedding_size": 64,
    "hidden_sizes": [256, 512, 1024, 2048],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "hidden_act": "relu",
    "downsample_in_first_stage": False,
    "downsample_in_bottleneck": False,
}
_NORM = {"scale": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}


class ResNetShape(Protocol):
    """What is known of `resnet.ResNetConfig`, which knows this file."""

    @property
    def stem(self) -> str: ...
    @property
    def block(self) -> str: ...
    @property
    def depths(self) -> tuple[int, ...]: ...
    @property
    def widths(self) -> tuple[int, ...]: ...
    @property
    def shortcut(self) -> str: ...
    @property
    def expansion(self) -> int: ...
    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module: ...


def _convolutions(config: ResNetShape, names: Names) -> Iterator[tuple[str, str, str]]:
    """(path of ours, name of the convolution, name of its norm) of all."""
    yield "stem", *_STEMS[names]
    in_block = 2 if config.block == "basic" else 3
    for stage, depth in enumerate(config.depths):
        for block in range(depth):
            path = f"stages/{stage}/{block}"
            if names == "huggingface":
                below = f"resnet.encoder.stages.{stage}.layers.{block}"
                for i in range(in_block):
                    yield f"{path}/convs/{i}", f"{below}.layer.{i}.convolution", f"{below}.layer.{i}.normalization"
                shortcut = f"{below}.shortcut.convolution", f"{below}.shortcut.normalization"
            else:
                below = f"layer{stage + 1}.{block}"
                for i in range(in_block):
                    yield f"{path}/convs/{i}", f"{below}.conv{i + 1}", f"{below}.bn{i + 1}"
                shortcut = f"{below}.downsample.0", f"{below}.downsample.1"
            yield f"{path}/shortcut", *shortcut


def table(
    config: ResNetShape, shapes: Mapping[str, tuple[int, ...]], names: Names
) -> tuple[tuple[Entry, ...], dict[str, int]]:
    """What a parameter or a running mean is called there: (a line each, the sizes of their axes).

    Args:
      config: ResNetShape.
      shapes: Path of ours -> shape; paths that are not in it have no line.
      names: Whose.
    """
    found: list[Entry] = []
    sizes: dict[str, int] = {}

    def add(path: str, name: str, theirs: str, ours: str) -> None:
        if path in shapes:
            axes = dict(zip(ours.split(), shapes[path], strict=True))
            sizes.update({f"{path}.{axis}": size for axis, size in axes.items()})
            left, right = (" ".join(f"{path}.{axis}" for axis in side.split()) for side in (theirs, ours))
            found.append(Entry(path, name, f"{left} -> {right}"))

    for path, conv, norm in _convolutions(config, names):
        add(f"{path}/conv/kernel", f"{conv}.weight", "O I H W", "H W I O")
        for own, theirs in _NORM.items():
            add(f"{path}/norm/{own}", f"{norm}.{theirs}", "C", "C")
    add("head/kernel", f"{_HEADS[names]}.weight", "O I", "I O")
    add("head/bias", f"{_HEADS[names]}.bias", "O", "O")
    return tuple(found), sizes


def shapes_of(config: ResNetShape, schema: ImageSchema) -> dict[str, tuple[int, ...]]:
    """Path -> shape of the parameters and running means of a model."""
    state = nnx.to_flat_state(nnx.state(counts.abstract(config.build, schema), (nnx.Param, nnx.BatchStat)))
    return {"/".join(map(str, path)): variable.get_value().shape for path, variable in state}


def open_folder(folder: pathlib.Path, config: ResNetShape, schema: ImageSchema) -> Trained:
    """A ResNet of others as something to begin with; arrays are read when they are indexed.

    Its head may be for other classes, which its `identity` then says: `surgery.heads.NewHead` begins with all but that.

    Args:
      folder: Has model.safetensors, or shards with an index.
      config: What it must be.
      schema: Of the pictures.

    Raises:
      UserError: the folder is damaged, holds another model, or was trained with pixels that were standardised by other
        numbers; says in what.
    """
    tensors = safetensors.open_folder(folder)
    names: Names = "torchvision" if f"{_STEMS['torchvision'][0]}.weight" in tensors else "huggingface"
    said = _read(folder / CONFIG) if names == "huggingface" or (folder / CONFIG).exists() else {}
    if names == "huggingface":
        _check_same(config, schema, said, folder / CONFIG)
    classes = _classes(said, names, folder / CONFIG)
    _check_pixels(folder, said, schema)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(f".{_COUNTER}")}
    shapes = shapes_of(config, schema)
    head = tensors.get(f"{_HEADS[names]}.weight")
    if head is not None and len(head.shape) == 2:
        shapes |= {"head/kernel": head.shape[::-1], "head/bias": head.shape[:1]}
    entries, sizes = table(config, shapes, names)
    mapping.check(entries, sizes, 0, tensors, str(folder))
    source = TensorSource({entry.path: entry for entry in entries}, sizes, tensors)

    def array(path: str) -> LazyArray:
        return LazyArray(shapes[path], source.dtype(path), lambda index: source.read(path, None)[index])

    arrays = {entry.path: array(entry.path) for entry in entries}
    outputs = shapes["head/kernel"][-1]
    permuted = len(set(classes)) == outputs and sorted(classes) == sorted(schema.classes)
    if permuted:
        order = np.array([classes.index(name) for name in schema.classes])
        for path in ("head/kernel", "head/bias"):
            arrays[path] = _reordered(arrays[path], order)
    means = {path for path in arrays if path.endswith(("/mean", "/variance"))}
    return Trained(
        params={path: a for path, a in arrays.items() if path not in means},
        variables={path: arrays[path] for path in means},
        step=0,
        identity={"data.classes": ", ".join(classes)} if classes and not permuted else {},
        origin=f"folder {folder}",
    )


def _reordered(array: LazyArray, order: np.ndarray) -> LazyArray:
    """An array with other places along its last axis."""
    return LazyArray(array.shape, array.dtype, lambda index: np.asarray(array[...])[..., order][index])


def renamed(config: ResNetShape, arrays: Mapping[str, AnyArray], names: Names) -> dict[str, np.ndarray]:
    """Arrays by path of ours as tensors by the names of others."""
    entries, sizes = table(config, {path: tuple(a.shape) for path, a in arrays.items()}, names)
    return {entry.name: entry.to_tensor(np.asarray(arrays[entry.path][...]), sizes) for entry in entries}


def write_folder(
    folder: pathlib.Path,
    config: ResNetShape,
    schema: ImageSchema,
    arrays: Mapping[str, AnyArray],
    names: Names = "huggingface",
) -> None:
    """Writes a ResNet as others read it, with config.json and preprocessor_config.json for Hugging Face.

    Args:
      folder: Is not there yet, or is empty.
      config: Its architecture.
      schema: Of its pictures.
      arrays: Parameters and running means by path.
      names: Whose.

    Raises:
      UserError: the library has no such net, a value is not finite, or the disk refuses.
    """
    if names == "huggingface" and (config.stem != "imagenet" or config.shortcut != "projection"):
        raise UserError(
            f"ResNet with stem {config.stem!r} and shortcut {config.shortcut!r}: transformers has only stem 'imagenet' "
            "with shortcut 'projection'. Train one of these (SIZES['resnet18']), or use the run folder as it is."
        )
    entries, sizes = table(config, {path: tuple(a.shape) for path, a in arrays.items()}, names)
    named = {entry.name: entry for entry in entries}
    counters = [f"{norm}.{_COUNTER}" for path, _, norm in _convolutions(config, names) if f"{path}/norm/mean" in arrays]

    def produce(name: str) -> np.ndarray:
        if name not in named:
            return np.zeros((), np.int64)
        array = np.asarray(arrays[named[name].path][...])
        mapping.check_finite(array, named[name].path)
        return named[name].to_tensor(array, sizes)

    tensors = [Written(e.name, np.dtype(arrays[e.path].dtype), e.tensor_shape(sizes)) for e in entries]
    tensors += [Written(name, np.dtype(np.int64), ()) for name in counters]
    with disk.appearing(folder) as made:
        safetensors.write_folder(made, tuple(tensors), produce)
        if names == "huggingface":
            dtype = str(arrays["stem/conv/kernel"].dtype)
            disk.write_json(made / CONFIG, config_json(config, schema) | {"dtype": dtype})
            disk.write_json(made / PREPROCESSOR, _preprocessor(schema))


def config_json(config: ResNetShape, schema: ImageSchema) -> dict[str, object]:
    """The content of config.json."""
    return {
        "architectures": [_MODEL],
        "model_type": "resnet",
        "num_channels": schema.channels,
        "embedding_size": config.widths[0],
        "hidden_sizes": [config.expansion * width for width in config.widths],
        "depths": list(config.depths),
        "layer_type": config.block,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": False,
        "id2label": {str(number): name for number, name in enumerate(schema.classes)},
        "label2id": {name: number for number, name in enumerate(schema.classes)},
    }


def _preprocessor(schema: ImageSchema) -> dict[str, object]:
    """What makes of pixels what the network gets, for a processor of transformers."""
    whole = 255 if schema.dtype == "uint8" else 1
    size = {"height": schema.height, "width": schema.width}
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": size,
        "resample": 2,
        "do_rescale": whole != 1,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [value / whole for value in schema.mean],
        "image_std": [value / whole for value in schema.std],
    }


def read_shape(folder: pathlib.Path) -> dict[str, Any] | None:
    """Block, depths and widths by the config.json of a folder; None where it has none or says what is not known here.

    What is not known here `open_folder` refuses.

    Raises:
      UserError: the file cannot be read.
    """
    if not (folder / CONFIG).is_file():
        return None
    content = {**_DEFAULTS, **_read(folder / CONFIG)}
    if content.get("model_type") != "resnet" or content["layer_type"] not in ("basic", "bottleneck"):
        return None
    narrow = 4 if content["layer_type"] == "bottleneck" else 1
    try:
        widths = tuple(width // narrow for width in content["hidden_sizes"])
        return {"block": content["layer_type"], "depths": tuple(content["depths"]), "widths": widths}
    except TypeError:
        return None


def _read(where: pathlib.Path) -> dict[str, Any]:
    try:
        content: Any = json_reading.read(where)
        return {**content}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{where}: cannot be read as a JSON object: {error}. Copy the file anew.") from error


def _classes(content: dict[str, Any], names: Names, where: pathlib.Path) -> tuple[str, ...]:
    """Names of the outputs of the head in their order; () = the folder has none."""
    generic = {"0": "LABEL_0", "1": "LABEL_1"}  # what transformers leaves out
    said: Any = content.get("id2label", generic) if names == "huggingface" else content.get("label_names", ())
    if isinstance(said, dict):
        if sorted(said) != sorted(map(str, range(len(said)))):
            raise UserError(f"{where}: id2label must name classes 0, 1, 2, ...; got {said}. Mend it, or copy it anew.")
        said = [said[str(number)] for number in range(len(said))]
    if not isinstance(said, list | tuple) or not all(isinstance(name, str) for name in said):
        raise UserError(f"{where}: names of classes must be texts; got {said!r}. Mend them, or copy the file anew.")
    return tuple(said)


def _check_pixels(folder: pathlib.Path, content: dict[str, Any], schema: ImageSchema) -> None:
    """Refuses pixels that are standardised by other numbers than those which a folder names, if it names some."""
    where, timm = folder / PREPROCESSOR, content.get("pretrained_cfg")
    if where.exists():
        said = _read(where)
        unit = said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 1.0
        plain = not said.get("do_normalize", True)
        mean, std = (0.0, 1.0) if plain else (said.get("image_mean"), said.get("image_std"))
    elif isinstance(timm, dict) and "mean" in timm:
        where, unit, mean, std = folder / CONFIG, 1 / 255, timm["mean"], timm.get("std")
    else:
        return
    try:
        both = (np.broadcast_to(np.asarray(value, np.float64), schema.channels) for value in (mean, std))
        values = np.stack(list(both)) / unit
        sound = bool(np.isfinite(values).all() and (values[1] > 0).all())
    except (TypeError, ValueError, ZeroDivisionError):
        sound, values = False, np.zeros((2, 0))
    if not sound:
        raise UserError(
            f"{where}: mean and standard deviation of pixels must be {schema.channels} numbers each, the latter above "
            f"0; got {mean} and {std}, of pixels times {unit}. Mend the file, or copy it anew."
        )
    here = np.array([schema.mean, schema.std])
    if (np.abs(values - here) > 1e-3 * values[1]).any():
        theirs, ours = ([",".join(f"{value:g}" for value in row) for row in rows] for rows in (values, here))
        raise UserError(
            f"{where}: pixels were standardised by the mean {theirs[0]} and the deviation {theirs[1]}, and here they "
            f"are by {ours[0]} and {ours[1]}. Take what the model was trained with: --set data.mean={theirs[0]} --set "
            f"data.std={theirs[1]}."
        )


def _check_same(config: ResNetShape, schema: ImageSchema, content: dict[str, Any], where: pathlib.Path) -> None:
    """Compares what a config.json says with what the recipe asks for; their defaults are those of transformers."""
    kind = content.get("model_type")
    if kind != "resnet":
        raise UserError(f"{where}: model_type must be 'resnet'; got {kind!r}. Give the folder of a {_MODEL}.")
    wanted, found = config_json(config, schema), {**_DEFAULTS, **content}
    different = [name for name in _DEFAULTS if found[name] != wanted[name]]
    if different:
        said = "; ".join(f"{name} is {found[name]!r} there and {wanted[name]!r} by the recipe" for name in different)
        raise UserError(
            f"{where}: {said}. Set model.block, model.depths and model.widths to what it is: the widths are "
            "hidden_sizes, with bottlenecks a quarter of them. Other fields cannot be set here."
        )
