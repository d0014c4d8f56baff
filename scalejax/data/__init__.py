"""Host-side data: sources, splits, shuffling and batches, in NumPy. Nothing here imports jax.

Names load on first use, so that importing the package costs nothing. (Grain, which drives the read-ahead threads,
imports jax itself; it is loaded when the first batch is asked for.)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scalejax.data.click_logs.avazu import AvazuData as AvazuData
    from scalejax.data.click_logs.criteo import CriteoData as CriteoData
    from scalejax.data.click_logs.criteo_multi_hot import CriteoMultiHotData as CriteoMultiHotData
    from scalejax.data.click_logs.criteo_terabyte import CriteoTerabyteData as CriteoTerabyteData
    from scalejax.data.click_logs.flights import ByDate as ByDate
    from scalejax.data.click_logs.flights import FlightsData as FlightsData
    from scalejax.data.click_logs.flights import LaterDays as LaterDays
    from scalejax.data.click_logs.movielens import MovielensData as MovielensData
    from scalejax.data.examples.batch import ClickBatch as ClickBatch
    from scalejax.data.examples.coding import Counted as Counted
    from scalejax.data.examples.coding import Hashed as Hashed
    from scalejax.data.examples.dataset import BatchedDataSet as BatchedDataSet
    from scalejax.data.examples.dedup import DedupKeyedJagged as DedupKeyedJagged
    from scalejax.data.examples.dedup import Deduplicate as Deduplicate
    from scalejax.data.examples.jagged import KeyedJagged as KeyedJagged
    from scalejax.data.examples.memory import from_columns as from_columns
    from scalejax.data.examples.schema import Categorical as Categorical
    from scalejax.data.examples.schema import Schema as Schema
    from scalejax.data.images.augment import Augment as Augment
    from scalejax.data.images.codebook import PatchCodebook as PatchCodebook
    from scalejax.data.images.labelled import LabelledImages as LabelledImages
    from scalejax.data.images.labelled import LabelNoise as LabelNoise
    from scalejax.data.images.nnunet import MaskedImages as MaskedImages
    from scalejax.data.images.nnunet import NnUnetFolder as NnUnetFolder
    from scalejax.data.images.nuclei import NucleiTiles as NucleiTiles
    from scalejax.data.images.schema import ImageSchema as ImageSchema
    from scalejax.data.images.sources import Digits as Digits
    from scalejax.data.images.sources import FashionMnist as FashionMnist
    from scalejax.data.images.sources import IdxFolder as IdxFolder
    from scalejax.data.images.sources import ImageFolder as ImageFolder
    from scalejax.data.images.two_modality import TwoModalityData as TwoModalityData
    from scalejax.data.sessions.dataset import SessionData as SessionData
    from scalejax.data.sessions.generate import SessionLog as SessionLog
    from scalejax.data.splits import ByPosition as ByPosition
    from scalejax.data.splits import ByTime as ByTime
    from scalejax.data.splits import Fractions as Fractions
    from scalejax.data.tables.arrow import ArrowData as ArrowData
    from scalejax.data.tables.inference import TableColumn as TableColumn
    from scalejax.data.tables.parquet import ParquetData as ParquetData
    from scalejax.data.tables.table import TableData as TableData
    from scalejax.data.text.dataset import TokenDataSet as TokenDataSet
    from scalejax.data.text.files import TextData as TextData
    from scalejax.data.text.files import TextSplit as TextSplit
    from scalejax.data.text.huggingface_tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
    from scalejax.data.text.mixture import MixtureData as MixtureData
    from scalejax.data.text.modalities import ModalityMap as ModalityMap
    from scalejax.data.text.shards import TokenShards as TokenShards
    from scalejax.data.text.staged import StagedData as StagedData
    from scalejax.data.text.stages import Stage as Stage
    from scalejax.data.text.tokenizer import ByteTokenizer as ByteTokenizer
    from scalejax.data.text.tokenizer import CharacterTokenizer as CharacterTokenizer
    from scalejax.data.text.tokens import TokenBatch as TokenBatch
    from scalejax.data.text.tokens import TokenSchema as TokenSchema

_HOMES = {
    "ArrowData": "tables.arrow",
    "Augment": "images.augment",
    "AvazuData": "click_logs.avazu",
    "ClickBatch": "examples.batch",
    "BatchedDataSet": "examples.dataset",
    "ByDate": "click_logs.flights",
    "LaterDays": "click_logs.flights",
    "ByPosition": "splits",
    "ByTime": "splits",
    "ByteTokenizer": "text.tokenizer",
    "Categorical": "examples.schema",
    "CharacterTokenizer": "text.tokenizer",
    "Counted": "examples.coding",
    "CriteoData": "click_logs.criteo",
    "CriteoMultiHotData": "click_logs.criteo_multi_hot",
    "CriteoTerabyteData": "click_logs.criteo_terabyte",
    "DedupKeyedJagged": "examples.dedup",
    "Deduplicate": "examples.dedup",
    "Digits": "images.sources",
    "FashionMnist": "images.sources",
    "FlightsData": "click_logs.flights",
    "Fractions": "splits",
    "Hashed": "examples.coding",
    "HuggingFaceTokenizer": "text.huggingface_tokenizer",
    "IdxFolder": "images.sources",
    "ImageFolder": "images.sources",
    "ImageSchema": "images.schema",
    "KeyedJagged": "examples.jagged",
    "LabelNoise": "images.labelled",
    "LabelledImages": "images.labelled",
    "MaskedImages": "images.nnunet",
    "MixtureData": "text.mixture",
    "ModalityMap": "text.modalities",
    "MovielensData": "click_logs.movielens",
    "NnUnetFolder": "images.nnunet",
    "NucleiTiles": "images.nuclei",
    "ParquetData": "tables.parquet",
    "PatchCodebook": "images.codebook",
    "Schema": "examples.schema",
    "SessionData": "sessions.dataset",
    "SessionLog": "sessions.generate",
    "Stage": "text.stages",
    "StagedData": "text.staged",
    "TableColumn": "tables.inference",
    "TableData": "tables.table",
    "TextData": "text.files",
    "TextSplit": "text.files",
    "TokenBatch": "text.tokens",
    "TokenDataSet": "text.dataset",
    "TokenSchema": "text.tokens",
    "TokenShards": "text.shards",
    "TwoModalityData": "images.two_modality",
    "from_columns": "examples.memory",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(f"scalejax.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'scalejax.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
