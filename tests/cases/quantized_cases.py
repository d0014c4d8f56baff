"""A small Llama that blocks of 32 fit, with a tokenizer of bytes, and what quantization makes of it."""

import dataclasses
import json

import numpy as np
from llama_cases import tensors, tokens, write_checkpoint

from scalejax.data.text import tokenizer_files
from scalejax.data.text.tokenizer import Bytes
from scalejax.models.llm import model_folder, safetensors
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.models.llm.packed_layouts.known import find_layout
from scalejax.surgery.quantize import checkpoint, quantization_plan

SMALL = LlamaConfig(layers=2, dim=64, ffn_dim=96, heads=4, kv_heads=2, vocabulary=264, max_positions=512)
MATRICES = 7 * SMALL.layers
EXPERTS = dataclasses.replace(SMALL, mlp=Experts(count=4, router=TopK(k=2)))


def write_model(folder, config=SMALL, *, dtype="float32", weights=None, **more):
    """A folder of Hugging Face with a tokenizer; returns the weights as written."""
    weights = write_checkpoint(folder, config, weights or tensors(config), dtype=dtype, **more)
    for name, text in tokenizer_files.of(Bytes(), "bos").items():
        (folder / name).write_text(text)
    return weights


def quantize(source, target, format, *, given=(), layout="scalejax", quantizer=None, **calibration):
    """The report of a quantized folder."""
    from scalejax.surgery.quantize.calibration import Calibration

    model, stored = model_folder.open_folder(source), find_layout(layout)
    weights = quantization_plan.make(model, format, given, stored)
    made = checkpoint.DirectCast(model, Calibration(**calibration)) if quantizer is None else quantizer(model)
    return checkpoint.write(model, target, weights, made, stored)


def quantize_with_inputs(source, target, format, inputs, *, given=(), layout="scalejax"):
    """The same with static scales of activations in the format `inputs`."""
    from scalejax.surgery.quantize.inputs import WithInputs

    model, stored = model_folder.open_folder(source), find_layout(layout, inputs)
    weights = quantization_plan.make(model, format, given, stored, inputs)
    text = tokens(model.config, 6, 32)
    made = WithInputs(model, weights, text, checkpoint.DirectCast(model))
    return checkpoint.write(model, target, weights, made, stored)


def read_weights(folder):
    """{name of Hugging Face: array}, decoded."""
    source = model_folder.open_folder(folder).source
    return {name: tensor.read() for name, tensor in source.tensors.items()}


def change_config(folder, **fields):
    """Changes fields of quantization_config."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    content["quantization_config"] |= fields
    path.write_text(json.dumps(content))


def rewrite(folder, change):
    """Writes the tensors of a folder anew, after change(names) has had the dict of arrays."""
    arrays = {name: np.array(tensor.read()) for name, tensor in safetensors.open_folder(folder).items()}
    change(arrays)
    written = tuple(safetensors.Written(name, array.dtype, array.shape) for name, array in arrays.items())
    safetensors.write_folder(folder, written, arrays.__getitem__)


def is_matrix(name):
    """Whether a tensor is quantized without rules."""
    return "_proj." in name


def gaussian(seed, *shape):
    """float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
