"""Click logs made to the schemas of the readers, for tests and demonstrations: nothing of them is real data.

Values of a feature follow a Zipf law (probability of rank r proportional to r ** -exponent), numbers a log-normal, a
tenth of both is missing where the schema allows it. A click has the log-odds -1 plus an effect of each value of the
first features, so that there is something to learn. Equal arguments give equal files.
"""

import gzip
import pathlib
from collections.abc import Sequence

import numpy as np

from scalejax.data.click_logs import avazu, criteo_multi_hot
from scalejax.data.click_logs.criteo import HASHES, INTEGERS, LABEL
from scalejax.data.permutation import key_of, mix
from scalejax.data.tables.parquet_writing import writing

_EFFECTS = 4
_MISSING = 0.1


def write_criteo(path: str | pathlib.Path, *, rows: int, seed: int = 0, exponent: float = 1.2) -> None:
    """Writes lines of the Criteo schema (label, 13 integers, 26 hashes), gzipped if the name ends with .gz."""
    rng = np.random.default_rng(seed)
    integers = np.floor(rng.lognormal(1.0, 1.5, (rows, len(INTEGERS)))).astype(np.int64) - 2
    hashes = np.stack([_hashes(rng, c, rows, exponent) for c in range(len(HASHES))], axis=1)
    clicks = _clicks(rng, hashes)
    fields = [clicks.astype(str)]
    fields += [np.where(rng.random(rows) < _MISSING, "", column.astype(str)) for column in integers.T]
    fields += [np.where(rng.random(rows) < _MISSING, "", _hexadecimal(column)) for column in hashes.T]
    _write_text(pathlib.Path(path), "\t", None, fields)


def write_criteo_days(
    folder: str | pathlib.Path, *, days: int, rows_per_day: int, seed: int = 0, exponent: float = 1.2
) -> None:
    """Writes gzipped text files day_0.gz, day_1.gz, ... of the Criteo schema, each with rows of its own."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for day in range(days):
        write_criteo(folder / f"day_{day}.gz", rows=rows_per_day, seed=key_of(seed, day), exponent=exponent)


def write_multi_hot_days(
    folder: str | pathlib.Path,
    *,
    days: int,
    rows_per_day: int,
    sizes: tuple[int, ...] = criteo_multi_hot.MULTI_HOT_SIZES,
    table_rows: tuple[int, ...] = criteo_multi_hot.TABLE_ROWS,
    seed: int = 0,
    exponent: float = 1.2,
    row_group: int = 65_536,
) -> None:
    """Writes Parquet files day_0.parquet, ... of MLPerf's multi-hot schema; lists hold Zipf ids, repeats allowed."""
    schema = criteo_multi_hot.schema_of(sizes, table_rows)
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for day in range(days):
        rng = np.random.default_rng(key_of(seed, day))
        ids = {
            feature.name: _zipf(rng, (rows_per_day, feature.length or 0), feature.rows or 0, exponent)
            for feature in schema.categorical
        }
        clicks = _clicks(rng, np.stack([own[:, 0] for own in ids.values()], axis=1))
        columns: dict[str, np.ndarray] = {LABEL: clicks}
        for name in INTEGERS:
            columns[name] = np.log(np.floor(rng.lognormal(1.0, 1.5, rows_per_day)) + 3).astype(np.float32)
        for feature in schema.categorical:
            own = ids[feature.name]
            columns[feature.name] = own[:, 0] if feature.length == 1 else own
        with writing(folder / f"day_{day}.parquet", criteo_multi_hot.arrow_schema(schema), row_group) as writer:
            writer.write(columns)


def write_avazu(
    path: str | pathlib.Path,
    *,
    rows: int,
    hours: Sequence[int] = tuple(14_10_21_00 + 100 * day + hour for day in range(10) for hour in range(24)),
    seed: int = 0,
    exponent: float = 1.2,
) -> None:
    """Writes a CSV of the Avazu schema with its header, in the order of `hours` (YYMMDDHH, spread evenly)."""
    rng = np.random.default_rng(seed)
    features = np.stack([_hashes(rng, c, rows, exponent) for c in range(len(avazu.FEATURES))], axis=1)
    clicks = _clicks(rng, features)
    columns = {
        "id": rng.integers(0, 2**64, rows, np.uint64).astype(str),
        "click": clicks.astype(str),
        "hour": np.asarray(hours)[np.arange(rows) * len(hours) // max(rows, 1)].astype(str),
    }
    for name, values in zip(avazu.FEATURES, features.T, strict=True):
        # The integers of the log are small; -1 is among them and stands for itself.
        columns[name] = _hexadecimal(values) if name in avazu.HASHED else (values % 3000 - 1).astype(str)
    _write_text(pathlib.Path(path), ",", avazu.COLUMNS, [columns[name] for name in avazu.COLUMNS])


def _zipf(rng: np.random.Generator, shape: tuple[int, ...], rows: int, exponent: float) -> np.ndarray:
    """int64 ids in [0, rows): ranks of a Zipf law without end, wrapped round."""
    return (rng.zipf(exponent, shape) - 1) % rows


def _hashes(rng: np.random.Generator, column: int, rows: int, exponent: float) -> np.ndarray:
    """int64[rows] in [0, 2**32), another set of values for every column."""
    ranks = _zipf(rng, (rows,), 1 << 40, exponent)
    return (mix(ranks.astype(np.uint64) + np.uint64(key_of(column))) >> np.uint64(32)).astype(np.int64)


def _clicks(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """int64[N] of 0 and 1, from int64[N, F] values."""
    effects = mix(values[:, :_EFFECTS].astype(np.uint64) + np.arange(_EFFECTS, dtype=np.uint64)) / 2.0**64 - 0.5
    odds = -1.0 + 3.0 * effects.sum(axis=1)
    return (rng.random(len(values)) < 1 / (1 + np.exp(-odds))).astype(np.int64)


def _hexadecimal(values: np.ndarray) -> np.ndarray:
    return np.array([f"{value:08x}" for value in values.tolist()], dtype="U8")


def _write_text(path: pathlib.Path, delimiter: str, header: Sequence[str] | None, fields: Sequence[np.ndarray]) -> None:
    lines = [] if header is None else [delimiter.join(header)]
    lines += [delimiter.join(line) for line in zip(*(field.tolist() for field in fields), strict=True)]
    text = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
