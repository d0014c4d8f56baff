"""A model as the search sees it: one compiled program that scores every choice.

Rows are decoded, so that a table has one shape and dtype whatever its precision, and gathering from it gives the bits
that a lookup in the packed rows gives; int8 operators are their float32 form on decoded matrices (`FakeInt8Linear`).
What is served is packed and sums integers; `report` scores that.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import nn
from scalejax.errors import UserError, check_one_of
from scalejax.inference.recommendation import lowering, operators, precision
from scalejax.inference.recommendation import search as searches
from scalejax.inference.recommendation.calibration import Limits
from scalejax.inference.recommendation.click_model import Gap, Inputs, Labelled, ServedModel, Table, embed, logits
from scalejax.inference.recommendation.precision import Precisions, TablePrecision
from scalejax.kernels import block_quant
from scalejax.kernels.block_quant import PackedRows, dense
from scalejax.parallel.embedding.config import TableConfig

Objective = Literal["bytes", "latency"]

TABLE_CHOICES = ("float32", "int8", "int4")
DENSE_CHOICES = ("float32", "float16", "int8")


@dataclasses.dataclass(frozen=True, eq=False)
class Emulation:
    """Scores of any choice without packing it.

    Attributes:
      model: The model.
      limits: Ranges of the inputs of linear operators.
      rows: "minmax" or "greedy", see `lowering.lower`.
    """

    model: ServedModel
    limits: Limits
    rows: lowering.Ranges = "minmax"

    @functools.cached_property
    def _kept(self) -> dict[tuple[str, str], Any]:
        return {}

    @functools.cached_property
    def score(self) -> Callable[..., jax.Array]:
        """jitted (tables, params, on, inputs) -> logits float32[B, T]."""

        def score(
            tables: dict[str, jax.Array], params: dict[str, jax.Array], on: dict[str, jax.Array], inputs: Inputs
        ) -> jax.Array:
            module = self.model.shape.merge(params)
            for path, operator in operators.find(self.model.shape).items():
                if operator.kind == "linear":
                    ends = tuple(map(jnp.float32, self.limits[path]))

                    def make(
                        old: nn.Linear, path: str = path, ends: tuple[jax.Array, jax.Array] = ends
                    ) -> operators.FakeInt8Linear:
                        return operators.FakeInt8Linear(old, on[path], ends)

                    operators.replace(module, operator.keys, make)
            return logits(self.model, tables, module, inputs)

        return jax.jit(score)

    def scores(self, precisions: Precisions, examples: Labelled) -> np.ndarray:
        """float32[N, T]."""
        tables = {name: self._table(name, chosen) for name, chosen in precisions.tables.items()}
        params: dict[str, jax.Array] = {}
        for path, chosen in precisions.operators.items():
            params |= self._operator(path, chosen)
        found = operators.find(self.model.shape)
        on = {p: jnp.asarray(c == "int8") for p, c in precisions.operators.items() if found[p].kind == "linear"}
        return examples.scores(lambda inputs: self.score(tables, params, on, inputs))

    def _table(self, name: str, chosen: TablePrecision) -> jax.Array:
        if (name, chosen) not in self._kept:
            made = lowering.table_in(self.model, name, chosen, self.rows)
            whole = block_quant.dequantize_rows(made) if isinstance(made, PackedRows) else made.astype(jnp.float32)
            self._kept[name, chosen] = whole
        return self._kept[name, chosen]

    def _operator(self, path: str, chosen: str) -> dict[str, jax.Array]:
        if (path, chosen) not in self._kept:
            arrays = {}
            for name in operators.find(self.model.shape)[path].params:
                value = jnp.asarray(self.model.params[name])
                if chosen == "int8" and value.ndim == 2:
                    value = dense.dequantize_weight(dense.quantize_weight(value))
                arrays[name] = value.astype(jnp.float16).astype(jnp.float32) if chosen == "float16" else value
            self._kept[path, chosen] = arrays
        return self._kept[path, chosen]


def study(
    model: ServedModel,
    limits: Limits,
    calibration: Labelled,
    held_out: Labelled,
    *,
    objective: Objective = "bytes",
    tables: tuple[str, ...] = TABLE_CHOICES,
    dense_choices: tuple[str, ...] = DENSE_CHOICES,
) -> searches.PrecisionStudy:
    """What `search.search` wants.

    Args:
      model: The model.
      limits: Of its linear operators.
      calibration: Examples that the search looks at.
      held_out: Examples that confirm it.
      objective: What is made small: "bytes" at rest, or "latency", measured operator by operator on this machine.
      tables: Precisions of tables to try, the widest first.
      dense_choices: Precisions of operators to try, the widest first.

    Raises:
      UserError: an unknown objective, or examples that all have one label, for which there is no NE.
    """
    check_one_of("--objective", objective, ("bytes", "latency"))
    for name, examples in (("the validation split", calibration), ("the test split", held_out)):
        for task, labels in zip(model.schema.labels, examples.labels.T, strict=True):
            if labels.min() == labels.max():
                raise UserError(
                    f"All {len(labels):,} examples of {name} have {labels[0]:g} as their {task!r}: normalised entropy "
                    "says nothing there. Take more examples (--examples), or another split."
                )
    emulation = Emulation(model, limits)

    @functools.cache
    def choices(name: tuple[str, str]) -> tuple[str, ...]:
        wanted = tables if name[0] == "table" else dense_choices
        known = tuple(c for c in wanted if c in precision.choices(model, name)) or wanted[:1]
        if name[0] != "table":
            return known
        sizes = [precision.bytes_of(model, name, c) for c in known]
        # Of short rows a narrow precision may have more bytes than a wider one, for its scales or its codebook.
        return tuple(c for i, c in enumerate(known) if i == 0 or sizes[i] < min(sizes[:i]))

    seconds = latencies(model, limits, calibration.inputs[0], choices) if objective == "latency" else {}

    def cost(name: tuple[str, str], chosen: str) -> float:
        return seconds[name, chosen] if seconds else precision.bytes_of(model, name, chosen)

    def gap(examples: Labelled) -> Callable[[Precisions], Gap]:
        # Of the program that scores the others, so that only numbers that were rounded differ.
        wanted = emulation.scores(precision.uniform(model), examples)
        return lambda precisions: examples.gap(wanted, emulation.scores(precisions, examples))

    return searches.PrecisionStudy(
        start=precision.uniform(model),
        names=precision.names(model),
        choices=choices,
        cost=cost,
        gap=gap(calibration),
        gap_held_out=gap(held_out),
    )


def latencies(
    model: ServedModel,
    limits: Limits,
    inputs: Inputs,
    choices: Callable[[searches.Name], Sequence[str]],
    *,
    repeats: int = 15,
) -> dict[tuple[tuple[str, str], str], float]:
    """Seconds of every table's lookups and every operator by itself in each of its precisions, medians of `repeats`.

    Operators are given the inputs that they have in the float model. A program of one operator alone pays for its own
    start and its own memory, so that the sum over all is more than the model takes.
    """
    found = operators.find(model.shape)
    tables, params = model.arrays
    module = model.shape.merge(params)
    recorders = operators.record(module, found)
    logits(model, tables, module, inputs)
    times: dict[tuple[tuple[str, str], str], float] = {}
    for config in model.configs:
        for chosen in choices(("table", config.name)):
            table = lowering.table_in(model, config.name, chosen, "minmax")  # pyright: ignore[reportArgumentType]

            def look_up(table: Table, inputs: Inputs, config: TableConfig = config) -> dict[str, jax.Array]:
                return embed((config,), {config.name: table}, inputs)

            times[("table", config.name), chosen] = median_seconds(jax.jit(look_up), table, inputs, repeats=repeats)
    for path, operator in found.items():
        for chosen in choices(("operator", path)):
            if path not in recorders or not recorders[path].calls:
                times[("operator", path), chosen] = 0.0
                continue
            args, kwargs, _ = recorders[path].calls[0]
            one = precision.uniform(model).with_one(("operator", path), chosen)
            arrays = dataclasses.replace(lowering.lower(model, one, limits).arrays, tables={})

            def run(
                arrays: lowering.Arrays,
                args: tuple[object, ...],
                operator: operators.Operator = operator,
                kwargs: dict[str, object] = kwargs,
            ) -> jax.Array:
                return operators.get(lowering.module_of(model, arrays), operator.keys)(*args, **kwargs)

            times[("operator", path), chosen] = median_seconds(jax.jit(run), arrays, args, repeats=repeats)
    return times


def median_seconds(function: Callable[..., object], *args: object, repeats: int) -> float:
    """Median seconds of a call that is compiled, warm and awaited."""
    jax.block_until_ready(function(*args))
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(function(*args))
        taken.append(time.perf_counter() - begun)
    return float(np.median(taken))
