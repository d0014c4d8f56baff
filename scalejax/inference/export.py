"""A language model as a folder that jax and numpy alone can score tokens with, see `program_folder`.

What is quantized stays packed and is decoded as it is used, as in generation.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError, check_at_least
from scalejax.inference import program_folder, reload
from scalejax.inference.generate import Engine
from scalejax.models.llm import families

Logits = Literal["last", "all"]

LARGEST_DIFFERENCE, LARGEST_DIFFERENCE_IN_16_BITS = 1e-5, 0.02
"""Of a probability that is computed again, in float32 or not: programs sum in other orders, and round elsewhere."""


def write(
    engine: Engine,
    folder: pathlib.Path,
    *,
    rows: int = 1,
    length: int = 512,
    logits: Logits = "last",
    platforms: Sequence[str] = program_folder.PLATFORMS,
) -> dict[str, object]:
    """Writes a model.

    Args:
      engine: The model, on one device.
      folder: Must not be there yet.
      rows: Texts that the program scores at once; loaded, it takes any number and fills the last rows up.
      length: Tokens of a text, at most.
      logits: Of what follows the "last" token of each text, or "all" of them.
      platforms: That the program is lowered for; none of them has to be here.

    Returns:
      The signature, as signature.json has it.

    Raises:
      UserError: the model cannot do without later tokens, is not meant for so many positions, or is on several
        devices; the folder is there already, or the disk refuses.
    """
    check_at_least("--rows", rows, 1)
    config, family = engine.config, families.of(engine.config)
    if not 1 <= length <= config.max_positions:
        raise UserError(f"--length must be from 1 to {config.max_positions:,}, the model's positions; got {length:,}.")
    if engine.mesh.size > 1:
        raise UserError(f"export: the model is on {engine.mesh.size} devices. Load it on one: its program is for one.")
    # Refuses a model that cannot do without later tokens, which scores of whole texts would hide.
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
    jax.eval_shape(engine.score, dict(engine.params), *one)
    leaves, structure = jax.tree_util.tree_flatten_with_path(dict(engine.params))
    weights = {_name(path): leaf for path, leaf in leaves}
    inputs = {"tokens": jax.ShapeDtypeStruct((rows, length), jnp.int32)}
    if logits == "last":
        inputs["lengths"] = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def score(arrays: dict[str, jax.Array], given: dict[str, jax.Array]) -> tuple[jax.Array]:
        params: dict[str, Any] = jax.tree.unflatten(structure, [arrays[name] for name in weights])
        return (engine.score(params, given["tokens"], given.get("lengths")),)

    described = {
        "format": reload.LANGUAGE_FORMAT,
        "model": family.name,
        "vocabulary": config.vocabulary,
        "logits": logits,
    }
    return program_folder.write(folder, score, weights, inputs, ("logits",), described=described, platforms=platforms)


def difference(model: reload.TextModel, engine: Engine) -> float:
    """Largest difference of a probability between a model that was loaded again and the one it was written from."""
    rows, length = model.signature["inputs"]["tokens"]["shape"]
    tokens = np.random.default_rng(0).integers(0, model.signature["vocabulary"], (rows, length), np.int32)
    theirs, ours = model(tokens)["logits"], np.asarray(engine.logits(tokens))
    ours = ours[:, -1] if model.signature["logits"] == "last" else ours
    return float(np.abs(_softmax(theirs) - _softmax(ours)).max())


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def _name(path: Sequence[Any]) -> str:
    """Of an array: the path of its parameter, and which part it is of one that is packed."""
    return ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)
