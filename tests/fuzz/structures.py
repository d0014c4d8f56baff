"""Files of the right form with content that hypothesis makes up: name of a reader -> bytes of its target."""

import gzip
import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

_NUMBERS = st.one_of(
    st.integers(-2, 30),
    st.sampled_from([2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**400]),
    st.floats(),
    st.sampled_from([1e300, -1e300, 2.0**53, 0.5]),
)
_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
_DEEP = st.integers(50, 100_000).map(lambda depth: "[" * depth + "]" * depth)


def _object(**known: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """An object of which each field may be missing or something else."""
    return st.fixed_dictionaries({}, optional={name: kind | _JSON for name, kind in known.items()})


def _text(value: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    return (value.map(json.dumps) | _DEEP).map(str.encode)


_ARRAY = st.sampled_from(["i4", "i8", "u8", "f4", "f8", "?", "U3", "c16", "M8[s]"]).flatmap(
    lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6))
)
_SMALL = arrays_of.arrays("i8", st.integers(0, 6), elements=st.integers(-1, 6) | st.sampled_from([2**31, 2**40, 2**62]))
_NAMES = ("edge_src", "edge_dst", "edge_weight", "num_nodes", "features", "labels", "train_idx", "val_idx", "test_idx")
_SPARSE = ("feat_indptr", "feat_indices", "feat_values", "num_features")


def _npz(arrays: dict[str, np.ndarray]) -> bytes:
    data = io.BytesIO()
    np.savez(data, **arrays)
    return data.getvalue()


_TENSOR = _object(
    dtype=st.sampled_from(["F32", "I8", "F64", "X1"]),
    shape=st.lists(st.integers(0, 3) | _NUMBERS, max_size=3) | st.just([1] * 70),
    data_offsets=st.lists(st.integers(0, 40) | _NUMBERS, min_size=2, max_size=2),
)


def _safetensors(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


_FIELD = st.one_of(
    _NUMBERS.map(str),
    st.sampled_from(["", "true", "2020-01-01", "nan", "inf", "0x1", "\x00", "#"]),
    st.text(max_size=4),
)
_LINES = st.lists(st.lists(_FIELD, max_size=4), max_size=8)


def _lines(lines: list[list[str]], between: str) -> bytes:
    return "\n".join(between.join(line) for line in lines).encode("utf-8", "surrogatepass")


_COLUMN = st.sampled_from(
    [
        pa.array([1, 2, 60]),
        pa.array([1, None, 3]),
        pa.array([2**40, 1, 1]),
        pa.array([2**64 - 1, 1, 1], pa.uint64()),
        pa.array([1e300, 0.0, -1.0]),
        pa.array([float("nan"), float("inf"), 1.0]),
        pa.array([0, 1, 1]),
        pa.array([True, False, None]),
        pa.array(["a", "b", None]),
        pa.array([[1], [], [2, 3]]),
        pa.array([[1], None, [2]]),
        pa.array([[1, None], [], [2]]),
        pa.array([[[1]], [], [[2]]]),
        pa.array([{"a": 1}, {"a": 2}, None]),
        pa.array([0, 1, 2], pa.timestamp("s")),
        pa.array(["a", "b", "a"]).dictionary_encode(),
        pa.nulls(3),
    ]
)


def _parquet(columns: dict[str, pa.Array]) -> bytes:
    data = io.BytesIO()
    pq.write_table(pa.table(columns), data)
    return data.getvalue()


STRUCTURES: dict[str, st.SearchStrategy[bytes]] = {
    "npz": st.fixed_dictionaries(
        {"edge_src": _SMALL | _ARRAY, "edge_dst": _SMALL | _ARRAY},
        optional={name: _SMALL | _ARRAY for name in (*_NAMES[2:], *_SPARSE)},
    ).map(_npz),
    "safetensors": st.builds(
        _safetensors,
        st.dictionaries(st.text(max_size=3), _TENSOR | _JSON, max_size=3) | _DEEP.map(str.encode),
        st.binary(max_size=40),
    ),
    "shards": _text(_object(weight_map=st.dictionaries(st.text(max_size=3), st.text(max_size=300), max_size=3))),
    "plan": _text(
        _object(tables=st.lists(_object(table=st.just("a"), kind=st.just("row_wise"), ranks=_JSON))),
    ),
    "towers": _text(_object(towers=st.lists(st.lists(st.sampled_from("abcd"), max_size=2), max_size=3))),
    "manifest": _text(_object(sha256=st.text(), content=_JSON)),
    "jsonl": st.lists(_text(_object(text=st.text(max_size=9))), max_size=4).map(b"\n".join),
    "edges": _LINES.map(lambda lines: _lines(lines, " ")),
    "ogb": _LINES.map(lambda lines: gzip.compress(_lines(lines, ","), mtime=0)),
    "parquet": st.fixed_dictionaries(
        {"user": _COLUMN, "tag": _COLUMN, "x": _COLUMN, "label": _COLUMN | st.just(pa.array([0, 1, 1]))}
    ).map(_parquet),
}
