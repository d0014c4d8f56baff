"""Host-side data: sources, splits, shuffling and batches, in NumPy. Nothing here imports jax.

Names load on first use, so that importing the package costs nothing. (Grain, which drives the read-ahead threads,
imports jax itself; it is loaded when the first batch is asked for.)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scalejax.data.arrow import ArrowData as ArrowData
    from scalejax.data.avazu import AvazuData as AvazuData
    from scalejax.data.batch import Batch as Batch
    from scalejax.data.coding import Counted as Counted
    from scalejax.data.coding import Hashed as Hashed
    from scalejax.data.criteo import CriteoData as CriteoData
    from scalejax.data.criteo_multi_hot import CriteoMultiHotData as CriteoMultiHotData
    from scalejax.data.criteo_terabyte import CriteoTerabyteData as CriteoTerabyteData
    from scalejax.data.dataset import BatchedDataSet as BatchedDataSet
    from scalejax.data.dedup import DedupKeyedJagged as DedupKeyedJagged
    from scalejax.data.dedup import Deduplicate as Deduplicate
    from scalejax.data.flights import FlightsData as FlightsData
    from scalejax.data.huggingface_tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
    from scalejax.data.jagged import KeyedJagged as KeyedJagged
    from scalejax.data.memory import from_columns as from_columns
    from scalejax.data.mixture import MixtureData as MixtureData
    from scalejax.data.movielens import MovielensData as MovielensData
    from scalejax.data.parquet import ParquetData as ParquetData
    from scalejax.data.schema import Categorical as Categorical
    from scalejax.data.schema import Schema as Schema
    from scalejax.data.session_data import SessionData as SessionData
    from scalejax.data.sessions import SessionLog as SessionLog
    from scalejax.data.splits import ByPosition as ByPosition
    from scalejax.data.splits import ByTime as ByTime
    from scalejax.data.splits import Fractions as Fractions
    from scalejax.data.staged import StagedData as StagedData
    from scalejax.data.stages import Stage as Stage
    from scalejax.data.text import TextData as TextData
    from scalejax.data.text import TextSplit as TextSplit
    from scalejax.data.token_dataset import TokenDataSet as TokenDataSet
    from scalejax.data.tokenizer import ByteTokenizer as ByteTokenizer
    from scalejax.data.tokenizer import CharacterTokenizer as CharacterTokenizer
    from scalejax.data.tokens import TokenBatch as TokenBatch
    from scalejax.data.tokens import TokenSchema as TokenSchema

_HOMES = {
    "ArrowData": "arrow",
    "AvazuData": "avazu",
    "Batch": "batch",
    "BatchedDataSet": "dataset",
    "ByPosition": "splits",
    "ByTime": "splits",
    "ByteTokenizer": "tokenizer",
    "Categorical": "schema",
    "CharacterTokenizer": "tokenizer",
    "Counted": "coding",
    "CriteoData": "criteo",
    "CriteoMultiHotData": "criteo_multi_hot",
    "CriteoTerabyteData": "criteo_terabyte",
    "DedupKeyedJagged": "dedup",
    "Deduplicate": "dedup",
    "FlightsData": "flights",
    "Fractions": "splits",
    "Hashed": "coding",
    "HuggingFaceTokenizer": "huggingface_tokenizer",
    "KeyedJagged": "jagged",
    "MixtureData": "mixture",
    "MovielensData": "movielens",
    "ParquetData": "parquet",
    "Schema": "schema",
    "SessionData": "session_data",
    "SessionLog": "sessions",
    "Stage": "stages",
    "StagedData": "staged",
    "TextData": "text",
    "TextSplit": "text",
    "TokenBatch": "tokens",
    "TokenDataSet": "token_dataset",
    "TokenSchema": "tokens",
    "from_columns": "memory",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"scalejax.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'scalejax.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
