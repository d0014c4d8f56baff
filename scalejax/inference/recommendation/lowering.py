"""A click model in the precisions that were chosen: what is served, what a search scores, and both as JAX functions."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.inference.recommendation import operators, precision
from scalejax.inference.recommendation.calibration import Limits
from scalejax.inference.recommendation.click_model import Inputs, ServedModel, Table, logits
from scalejax.inference.recommendation.precision import Precisions, TablePrecision
from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import dense
from scalejax.kernels.block_quant.dense import Int8Weight

Ranges = Literal["minmax", "greedy"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a lowered model, a pytree.

    Attributes:
      tables: Name -> float32 or float16 [V, D], or packed rows.
      params: Path -> parameter, float32 or float16; without the matrices of int8 operators.
      int8: Path of an operator -> its matrix.
      limits: Path of an operator -> range of its inputs, float32[] each; those without one take that of every batch.
    """

    tables: dict[str, Table]
    params: dict[str, jax.Array]
    int8: dict[str, Int8Weight]
    limits: dict[str, tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A model in the precisions that were chosen.

    Attributes:
      model: What it was made from.
      precisions: The choice.
      arrays: Its arrays.
    """

    model: ServedModel
    precisions: Precisions
    arrays: Arrays

    @functools.cached_property
    def score(self) -> Callable[[Arrays, Inputs], jax.Array]:
        """jitted (arrays, inputs) -> logits float32[B, T]."""
        return jax.jit(functools.partial(scores, self.model))


def lower(
    model: ServedModel, precisions: Precisions, limits: Limits | None = None, *, rows: Ranges = "minmax"
) -> Lowered:
    """Quantizes a trained model.

    Args:
      model: The model.
      precisions: One for every table and operator.
      limits: Ranges of the inputs of int8 operators, from `calibration.limits`; None = those of every batch.
      rows: "minmax" or "greedy", the ranges of the rows of int4 and int2 tables, see `block_quant.quantize_rows`; int8
        rows take min and max. "greedy" has the smaller squared error, which need not be the smaller loss of NE
        (benchmarks/results/recommendation_precision.md).

    Raises:
      UserError: the choice is not one for this model, limits lack an operator, or a number does not fit its precision.
    """
    precision.check(precisions, model)
    found = operators.find(model.shape)
    quantized = [path for path, chosen in precisions.operators.items() if chosen == "int8"]
    missing = [] if limits is None else [path for path in quantized if path not in limits]
    if missing:
        raise UserError(f"limits: operator {missing[0]} has no range. Calibrate it, or pass None for dynamic ranges.")
    params: dict[str, jax.Array] = {}
    int8: dict[str, Int8Weight] = {}
    for path, operator in found.items():
        for name in operator.params:
            value = model.params[name]
            if not np.isfinite(value).all():
                raise UserError(f"{name}: holds numbers that are not finite. Take an earlier checkpoint.")
            if path in quantized and value.ndim == 2:
                int8[path] = dense.quantize_weight(jnp.asarray(value))
            else:
                params[name] = _narrowed(name, value, precisions.operators[path])
    return Lowered(
        model,
        precisions,
        Arrays(
            tables={name: table_in(model, name, precisions.tables[name], rows) for name in model.tables},
            params=params,
            int8=int8,
            limits={p: (jnp.float32(a), jnp.float32(b)) for p, (a, b) in (limits or {}).items() if p in int8},
        ),
    )


def table_in(model: ServedModel, name: str, chosen: TablePrecision, rows: Ranges = "minmax") -> Table:
    """A table in a precision.

    Raises:
      UserError: a row is not finite, or its numbers or its range do not fit.
    """
    table = model.tables[name]
    broken = np.flatnonzero(~np.isfinite(table).all(axis=1))
    if broken.size:
        raise UserError(
            f"Table {name!r}: {broken.size} rows are not finite, row {broken[0]} first. Take an earlier checkpoint."
        )
    if chosen in ("float32", "float16"):
        return _narrowed(f"table {name!r}", table, chosen)
    whole = jnp.asarray(table)
    if chosen == "kmeans4" or chosen == "kmeans2":
        made = block_quant.quantize_rows_kmeans(whole, chosen)
    elif chosen == "kmeans4_shared" or chosen == "kmeans2_shared":
        made = block_quant.share_codebooks(whole, chosen)
    else:
        made = block_quant.quantize_rows(whole, chosen, range="minmax" if chosen == "int8" else rows)
    if count := int(block_quant.nonfinite_rows(made)):
        raise UserError(f"Table {name!r}: the range of {count} rows is too large for {chosen}. Keep it in float32.")
    return made


def scores(model: ServedModel, arrays: Arrays, inputs: Inputs) -> jax.Array:
    """Logits float32[B, T] of a lowered model."""
    return logits(model, arrays.tables, module_of(model, arrays), inputs)


def module_of(model: ServedModel, arrays: Arrays) -> nnx.Module:
    """The dense part with its int8 operators in place."""
    # A merge wants a value for every parameter; those of int8 operators are replaced below.
    unused = {name: jnp.zeros(()) for name in model.shape.names if name not in arrays.params}
    module = model.shape.merge({**arrays.params, **unused})
    found = operators.find(model.shape)
    for path, weight in arrays.int8.items():

        def make(old: nn.Linear, path: str = path, weight: Int8Weight = weight) -> operators.Int8Linear:
            return operators.Int8Linear(weight, arrays.limits.get(path), old)

        operators.replace(module, found[path].keys, make)
    return module


def _narrowed(name: str, value: np.ndarray, chosen: str) -> jax.Array:
    if chosen != "float16":
        return jnp.asarray(value)
    with np.errstate(over="ignore"):
        narrow = value.astype(np.float16)
    if not np.isfinite(narrow).all():
        raise UserError(f"{name}: {np.abs(value).max():g} does not fit float16. Keep it in float32.")
    return jnp.asarray(narrow)
