"""Documents that are tokens already, of one modality or several, as rows: `TokenShards`.

    TokenShards(path="shards", ranges=(("text", 0, 32_000), ("image", 32_000, 40_192)), separator=2)

Files of a folder are read in the order of their names:

    .parquet  a column of lists of ids, a document a row
    .npy      ids [N], whose documents end with the separator; or [D, S], a document a row
    .bin      ids alone, of the type `dtype`, as nanoGPT and others write them; documents end with the separator

They are copied into one corpus, once, and checked: an id that the map lacks is refused.
"""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from scalejax.data.kept_arrays import ArrayWriter, Verify, kept
from scalejax.data.text.corpus import Corpus, Marks, Progress, cache_folder, open_corpus
from scalejax.data.text.dataset import TokenDataSet
from scalejax.data.text.files import PackedText, TextSplit
from scalejax.data.text.modalities import ModalityMap, check_image_share
from scalejax.data.text.packing import ModalityRoom, Positions
from scalejax.data.text.sources import TextFile, find_texts
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError, check_at_least, check_one_of

SUFFIXES = (".parquet", ".npy", ".bin")
_FORMAT = 1
_AT_ONCE = 1 << 24  # ids that are read together


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenShards:
    """Documents of token ids, laid into rows of `length` tokens.

    Attributes:
      path: A file or a folder, or several.
      ranges: Of which modality an id is, (modality, first id, id behind the last); text alone is one range.
      image_share: Bounds of the share of tokens of the modality "image" in the positions of a row: of them at most so
        many, and of the other modality at most what the lower bound leaves. So every row that is full keeps both. A
        lower bound above 0 wants two modalities.
      separator: The id that ends a document in .npy files of one axis and in .bin files; it stays its last token.
      dtype: Of .bin files.
      column: Of Parquet files.
      length: Positions of a row, S.
      batch_size: Global batch size, in rows.
      window: Documents that may share rows, after they are shuffled; a row takes the next that it has room for. Longer
        ones are cut, text anywhere and images between two.
      positions: "document" = rotary positions restart with each document; "row" = they run through the row.
      order: "shuffled" = documents are shuffled once, and rows anew every epoch; "file" = neither.
      split: How documents are divided.
      vocabulary: Rows of the model's table, where they are more than the map has ids.
      folder, verify, seed, threads: As of `TextData`.
    """

    path: str | tuple[str, ...]
    ranges: tuple[tuple[str, int, int], ...]
    image_share: tuple[float, float] = (0.0, 1.0)
    separator: int | None = None
    dtype: Literal["uint16", "uint32"] = "uint16"
    column: str = "tokens"
    length: int = 1024
    batch_size: int = 16
    window: int = 16_384
    positions: Positions = "document"
    order: Literal["shuffled", "file"] = "shuffled"
    split: TextSplit = TextSplit()
    vocabulary: int | None = None
    folder: str | None = None
    verify: Verify = "checksums"
    seed: int = 0
    threads: int = 2

    @property
    def packing(self) -> Literal["first-fit"]:
        """See `packing.fit`."""
        return "first-fit"

    @property
    def marks(self) -> Marks:
        """What stands around documents is in the files."""
        return "none"

    def modalities(self) -> ModalityMap:
        """Of which modality an id is."""
        return ModalityMap(ranges=self.ranges)

    def schema(self) -> TokenSchema:
        """What batches hold; reads no file.

        Raises:
          UserError: fields contradict one another.
        """
        for name in ("length", "window"):
            check_at_least(f"data.{name}", getattr(self, name), 1)
        check_one_of("data.dtype", self.dtype, ("uint16", "uint32"))
        check_one_of("data.order", self.order, ("shuffled", "file"))
        found = self.modalities()
        if self.vocabulary is not None and self.vocabulary < found.vocabulary:
            raise UserError(
                f"data.vocabulary={self.vocabulary} is too small: data.ranges has {found.vocabulary} ids ({found}). "
                "Set it to as many or more, or leave it out."
            )
        check_image_share(self.image_share)
        low, high = self.image_share
        if (low, high) != (0, 1) and "image" not in found.names:
            raise UserError(
                f"data.image_share={self.image_share} is of the modality image, and data.ranges has "
                f"{', '.join(found.names)}. Name one so, or leave image_share out."
            )
        if low > 0 and len(found.names) != 2:
            raise UserError(
                f"data.image_share={self.image_share}: a lower bound above 0 is kept in rows of two modalities, and "
                f"data.ranges has {len(found.names)} ({', '.join(found.names)}). Set it to 0, or give two."
            )
        vocabulary = self.vocabulary or found.vocabulary
        if len(found.names) == 1:
            return TokenSchema(vocabulary, self.length)
        # 1e-9: 10 * (1 - 0.3) is 6.999..., which means 7.
        most = {True: int(self.length * high + 1e-9), False: int(self.length * (1 - low) + 1e-9)}
        capacities = tuple(most[name == "image"] for name in found.names)
        return TokenSchema(vocabulary, self.length, found.names, capacities, found.ranges)

    def build(self, progress: Progress | None = None) -> TokenDataSet:
        """Opens the documents, which are copied if this is their first use.

        Args:
          progress: Called with (bytes of files read, bytes in all) meanwhile.
        Raises:
          UserError: a file cannot be read or holds an id that the map lacks, or an image is larger than a row's bounds.
        """
        schema, found = self.schema(), self.modalities()
        corpus = self._corpus(found, progress)
        several = len(found.names) > 1
        room = ModalityRoom(found.of_ids, schema.capacities or (), self.length, found.names) if several else None
        rows = PackedText(corpus, schema, self, room)
        return TokenDataSet(rows, batch_size=self.batch_size, threads=self.threads)

    def _corpus(self, found: ModalityMap, progress: Progress | None) -> Corpus:
        files = find_texts(self.path, SUFFIXES, of="token ids (.parquet, .npy, .bin)")
        status = [file.path.stat() for file in files]
        made_of = [
            (f.name, str(f.path.resolve()), s.st_size, s.st_mtime_ns, s.st_ctime_ns)
            for f, s in zip(files, status, strict=True)
        ]
        how = (found.ranges, self.separator, self.dtype, self.column)
        key = hashlib.sha256(repr(("shards", _FORMAT, made_of, how)).encode()).hexdigest()[:24]

        def make(path: pathlib.Path) -> None:
            dtype = np.uint16 if found.vocabulary <= 1 << 16 else np.uint32
            out = ArrayWriter(path, {"tokens": dtype, "offsets": np.int64, "hashes": np.uint64})
            out.append("offsets", [0])
            done, total = 0, sum(s.st_size for s in status)
            for file, own in zip(files, status, strict=True):
                for number, document in enumerate(self._documents(file)):
                    _check_ids(document, found, f"{file.path}, document {number}")
                    out.append("tokens", document)
                    out.append("offsets", [out.sizes["tokens"]])
                    digest = hashlib.blake2b(document.astype("<u4").tobytes(), digest_size=8).digest()
                    out.append("hashes", [int.from_bytes(digest, "little")])
                done += own.st_size
                if progress is not None:
                    progress(done, total)
            out.finish(format=_FORMAT, vocabulary=found.vocabulary)

        folder = cache_folder() if self.folder is None else pathlib.Path(self.folder)
        return open_corpus(kept(folder, f"shards-{key}", make), self.verify)

    def _documents(self, file: TextFile) -> Iterator[np.ndarray]:
        """int[n] each."""
        path = file.path
        if path.suffix == ".parquet":
            yield from _parquet(path, self.column)
            return
        if path.suffix not in SUFFIXES:
            raise UserError(f"{path}: wanted a file that ends in {', '.join(SUFFIXES)}. Unpack or rename it.")
        try:
            if path.suffix == ".npy":
                ids = np.load(path, mmap_mode="r", allow_pickle=False)
            else:
                ids = np.memmap(path, np.dtype(self.dtype).newbyteorder("<"), "r") if path.stat().st_size else None
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path}: cannot be read as token ids ({error}). Write it again, or leave it out."
            ) from error
        if ids is None:
            return
        if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
            raise UserError(
                f"{path}: wanted whole numbers [N] or [documents, tokens]; got {ids.dtype} {list(ids.shape)}."
            )
        if ids.ndim == 2:
            yield from (np.asarray(row) for row in ids)
            return
        if self.separator is None:
            raise UserError(
                f"{path}: documents lie one behind the other, and data.separator=None does not say where they end. Set "
                "it to the id of the last token of a document (eos)."
            )
        yield from _cut(ids, self.separator)


def _cut(ids: np.ndarray, separator: int) -> Iterator[np.ndarray]:
    """Documents, each up to its separator; what lies behind the last is one, too."""
    held: list[np.ndarray] = []
    for start in range(0, ids.size, _AT_ONCE):
        part = np.asarray(ids[start : start + _AT_ONCE])
        begin = 0
        for end in (np.flatnonzero(part == separator) + 1).tolist():
            yield np.concatenate([*held, part[begin:end]])
            held, begin = [], end
        if begin < part.size:
            held.append(part[begin:])
    if held:
        yield np.concatenate(held)


def _parquet(path: pathlib.Path, column: str) -> Iterator[np.ndarray]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
        kinds: dict[str, Any] = {field.name: field.type for field in file.schema_arrow}
        kind = kinds.get(column)
        if kind is None or not _is_list(kind) or not pa.types.is_integer(kind.value_type):
            has = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
            raise UserError(
                f"{path}: wanted a column {column!r} of lists of whole numbers; the file has {has}. Set data.column."
            )
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[column]):
            values = batch.column(0)
            if values.null_count or values.flatten().null_count:
                raise UserError(f"{path}, rows from {row}: column {column!r} has null. Leave such rows out.")
            ids, ends = values.flatten().to_numpy(zero_copy_only=False), np.diff(values.offsets.to_numpy())
            yield from np.split(ids, np.cumsum(ends)[:-1]) if ends.size else ()
            row += len(values)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: cannot be read as Parquet ({error}). Write it again, or leave it out.") from error


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _check_ids(document: np.ndarray, found: ModalityMap, where: str) -> None:
    try:
        found.of(document[None].astype(np.int64), np.ones((1, document.size), np.int64))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
