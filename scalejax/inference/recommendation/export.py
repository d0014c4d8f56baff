"""A click model as a folder that jax and numpy alone can score with, see `inference.program_folder`."""

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from scalejax.inference import program_folder, reload
from scalejax.inference.recommendation import lowering
from scalejax.inference.recommendation.click_model import Inputs, ServedModel, Table
from scalejax.inference.recommendation.lowering import Arrays, Lowered
from scalejax.kernels.block_quant import PackedRows
from scalejax.kernels.block_quant.dense import Int8Weight

LARGEST_DIFFERENCE = 1e-6
"""Of a probability that is scored again; not where operators are int8: sums round otherwise, and a code may move."""


def write(
    lowered: Lowered, folder: pathlib.Path, *, platforms: Sequence[str] = program_folder.PLATFORMS
) -> dict[str, object]:
    """Writes a lowered model.

    Args:
      lowered: The model.
      folder: Must not be there yet.
      platforms: That the program is lowered for; none of them has to be here.

    Returns:
      The signature, as signature.json has it.

    Raises:
      UserError: the folder is there already, or the disk refuses.
    """
    model, inputs = lowered.model, _abstract_inputs(lowered.model)

    def score(weights: dict[str, jax.Array], given: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logits = lowering.scores(model, _unflatten(lowered.arrays, weights), _as_inputs(given))
        return logits, jax.nn.sigmoid(logits)

    schema = model.schema
    described = {
        "format": reload.FORMAT,
        "model": type(getattr(model.task, "model", model.task)).__name__,
        "step": model.step,
        "labels": list(schema.labels),
        "dense": list(schema.dense),
        "features": {f.name: {"rows": f.rows, "length": f.length} for f in schema.categorical},
        "precisions": {"tables": lowered.precisions.tables, "operators": lowered.precisions.operators},
    }
    outputs = ("logits", "probabilities")
    weights = flatten(lowered.arrays)
    return program_folder.write(folder, score, weights, inputs, outputs, described=described, platforms=platforms)


def flatten(arrays: Arrays) -> dict[str, jax.Array]:
    """Name in the file -> array: table.NAME, or that and .codes and so on of packed rows; dense.PATH or its parts."""
    found: dict[str, jax.Array] = {}
    for name, table in arrays.tables.items():
        if isinstance(table, PackedRows):
            found |= {f"table.{name}.{part}": getattr(table, part) for part in _parts(table)}
        else:
            found[f"table.{name}"] = table
    found |= {f"dense.{name}": array for name, array in arrays.params.items()}
    for path, weight in arrays.int8.items():
        parts = {"codes": weight.codes, "scales": weight.scales, "sums": weight.sums}
        found |= {f"dense.{path}.{part}": array for part, array in parts.items()}
    return found | {f"dense.{path}.limits": jnp.stack(ends) for path, ends in arrays.limits.items()}


def _unflatten(like: Arrays, found: dict[str, jax.Array]) -> Arrays:
    tables: dict[str, Table] = {}
    for name, table in like.tables.items():
        if isinstance(table, PackedRows):
            parts = {part: found[f"table.{name}.{part}"] for part in _parts(table)}
            tables[name] = dataclasses.replace(table, **parts)
        else:
            tables[name] = found[f"table.{name}"]
    return Arrays(
        tables=tables,
        params={name: found[f"dense.{name}"] for name in like.params},
        int8={p: Int8Weight(**{k: found[f"dense.{p}.{k}"] for k in ("codes", "scales", "sums")}) for p in like.int8},
        limits={p: (found[f"dense.{p}.limits"][0], found[f"dense.{p}.limits"][1]) for p in like.limits},
    )


def _parts(rows: PackedRows) -> list[str]:
    """Names of its arrays."""
    return [field.name for field in dataclasses.fields(rows) if field.name not in ("format", "dim")]


def _abstract_inputs(model: ServedModel) -> dict[str, jax.ShapeDtypeStruct]:
    scope = jax.export.SymbolicScope()
    (batch,) = jax.export.symbolic_shape("batch", scope=scope)
    found: dict[str, jax.ShapeDtypeStruct] = {}
    for i, feature in enumerate(model.schema.categorical):
        if feature.length is not None:
            found[f"ids/{feature.name}"] = jax.ShapeDtypeStruct((batch, feature.length), jnp.int32)
        else:
            (count,) = jax.export.symbolic_shape(f"ids{i}", scope=scope)
            found[f"ids/{feature.name}"] = jax.ShapeDtypeStruct((count,), jnp.int32)
            found[f"lengths/{feature.name}"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return found | {"dense": jax.ShapeDtypeStruct((batch, len(model.schema.dense)), jnp.float32)}


def _as_inputs(given: dict[str, jax.Array]) -> Inputs:
    ids = {name.removeprefix("ids/"): x for name, x in given.items() if name.startswith("ids/")}
    lengths = {name.removeprefix("lengths/"): x for name, x in given.items() if name.startswith("lengths/")}
    return Inputs(ids, lengths, given["dense"])


def difference(model: reload.Model, lowered: Lowered, inputs: Inputs) -> float:
    """Largest difference of a probability between a model that was loaded again and what it was written from."""
    lengths = {name: np.asarray(x) for name, x in inputs.lengths.items()}
    ids = {
        name: np.asarray(x)[: lengths[name].sum()] if name in lengths else np.asarray(x)
        for name, x in inputs.ids.items()
    }
    theirs = model(ids, np.asarray(inputs.dense), lengths)["probabilities"]
    ours = np.asarray(jax.nn.sigmoid(lowered.score(lowered.arrays, inputs)))
    return float(np.abs(theirs - ours).max())
