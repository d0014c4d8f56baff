"""Batches that the benchmarks work on: the shape of the flights data and of Criteo Terabyte, made or real."""

import itertools
import pathlib

import numpy as np

from scalejax.data import FlightsData
from scalejax.data.click_logs.criteo_terabyte import TABLE_ROWS
from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dedup import expand_batch
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError

CRITEO_DENSE = 13
CRITEO_MOST_ROWS = 100_000
"""Tables are cut off here, so that 26 of them with d=128 take 0.5 GB and not 105."""


_CRITEO_BATCH = 4096
_DISTINCT = 8
"""Batches that a training step cycles through."""


def criteo_schema() -> Schema:
    """26 one-hot categoricals, the largest cut to `CRITEO_MOST_ROWS` rows, and 13 numbers."""
    rows = [min(r, CRITEO_MOST_ROWS) for r in TABLE_ROWS]
    return Schema(
        categorical=tuple(Categorical(name=f"C{i + 1}", rows=r) for i, r in enumerate(rows)),
        dense=tuple(f"I{i + 1}" for i in range(CRITEO_DENSE)),
    )


def columns(schema: Schema, examples: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Made data: ids int32[F, N] with P(id = k) ~ 1 / (k + 1) (as in click logs), dense float32[N, D], labels [N].

    One example in four is positive, as in the flights data.
    """
    rng = np.random.default_rng(seed)
    ids = np.empty((len(schema.categorical), examples), np.int32)
    for row, feature in zip(ids, schema.categorical, strict=True):
        assert feature.rows is not None, f"feature {feature.name!r} has ids of any 64 bits"
        # exp(U * log(rows + 1)) is log-uniform: the continuous form of Zipf's law with exponent 1.
        row[:] = np.exp(rng.random(examples) * np.log(feature.rows + 1)).astype(np.int32) - 1
        np.clip(row, 0, feature.rows - 1, out=row)  # rounding of exp may touch the upper end
    dense = rng.standard_normal((examples, len(schema.dense)), np.float32)
    labels = (rng.random(examples) < 0.25).astype(np.float32)
    return ids, dense, labels


def batches(schema: Schema, batch_size: int, count: int, seed: int = 0) -> list[ClickBatch]:
    """`count` made batches of one-hot features."""
    ids, dense, labels = columns(schema, batch_size * count, seed)
    return [
        ClickBatch(
            features=KeyedJagged(
                keys=schema.keys,
                values=np.ascontiguousarray(ids[:, part]).reshape(-1),
                lengths=np.ones((len(ids), batch_size), np.int32),
            ),
            dense=dense[part],
            labels=labels[part, None],
            weights=np.ones(batch_size, np.float32),
        )
        for part in (slice(i * batch_size, (i + 1) * batch_size) for i in range(count))
    ]


def for_case(case: str, data: pathlib.Path | None) -> tuple[Schema, list[ClickBatch]]:
    """Schema and batches of a case of a training step: "b1024" and "b8192" (flights, real) or "criteo" (made).

    Raises:
      UserError: `data` is given for "criteo", or is not what the flights reader wants.
    """
    if case == "criteo":
        if data is not None:
            raise UserError(
                f"--data: the case criteo makes its own batches; got {data}. Choose --case b1024 or b8192, or leave "
                "--data out."
            )
        schema = criteo_schema()
        return schema, batches(schema, _CRITEO_BATCH, _DISTINCT)
    flights = FlightsData(path=None if data is None else str(data), batch_size=int(case[1:])).build()
    first = itertools.islice(flights.train_batches(start_example=0), _DISTINCT)
    return flights.schema, [expand_batch(batch) for batch in first]


def one_hot_ids(batch: ClickBatch) -> np.ndarray:
    """int64[B, F] ids of a batch whose features all have exactly one id an example."""
    assert (batch.features.lengths == 1).all(), "benchmarks use one-hot features"
    return np.ascontiguousarray(batch.features.values.reshape(len(batch.features.keys), -1).T, np.int64)
