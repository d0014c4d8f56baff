"""Documents of images and text as rows of tokens of two modalities: `TwoModalityData`."""

import contextlib
import dataclasses
import hashlib
import importlib.resources
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from scalejax.data.images import pictures
from scalejax.data.images.codebook import PATCH, PatchCodebook, train_codebook
from scalejax.data.images.interleaved import Caption, InterleavedRows, Material, RowStyle, capacities
from scalejax.data.images.sources import AnyImages, FashionMnist, GreyImages
from scalejax.data.kept_arrays import ArrayWriter, Verify, kept, open_arrays
from scalejax.data.permutation import key_of, mix
from scalejax.data.splits import SPLITS, Fractions
from scalejax.data.text.corpus import Corpus, Marks, Progress, cache_folder, tokenised
from scalejax.data.text.dataset import TokenDataSet
from scalejax.data.text.files import AnyTokenizer
from scalejax.data.text.modalities import InterleavedIds, check_image_share
from scalejax.data.text.packing import Positions
from scalejax.data.text.sources import SUFFIXES, TextFile, find_texts
from scalejax.data.text.tokenizer import ByteTokenizer
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError, check_at_least, check_one_of

CODEBOOK = "codebook.npz"
"""In a run folder: the codebook of the run's images."""

_FORMAT = 1
_SPLIT = 0x5B117
_SHOWN = 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoModalityData:
    """Images as codes among text, in rows of `length` tokens (`interleaved.py` says how a row is made).

    The codebook is trained on the training images, once, and kept in the folder of tokens; a run has a copy of it.

    Attributes:
      images: Where images come from.
      codes: Patches of the codebook.
      path: Text: a file or a folder, or several, as of `TextData`; None = the bundled tiny Shakespeare.
      tokenizer: Text to ids.
      length: Positions of a row, S.
      batch_size: Global batch size, in rows.
      image_share: Bounds of the share of image tokens, of every row; (0, 0) = text alone. The capacities of the schema
        follow from them.
      caption: Where the name of an image's class stands, on a line of its own; "either" = it is drawn.
      image_marks: The modality of the two marks around an image.
      positions: "document" = rotary positions restart with each document; "row" = they run through the row.
      split: Shares. Of text by position, of images by a hash of their pixels and the seed of the split, so that equal
        images fall into one split.
      vocabulary: Rows of the model's table, where they are more than there are ids.
      column: Field of JSONL and column of Parquet that holds the text.
      suffixes: Endings of the files that are taken of a folder.
      folder: Where tokens and the codebook are kept; None = scalejax/text in the user's cache folder.
      verify: As of `TextData`.
      seed: Of rows and of the codebook.
      threads: Reading threads.
    """

    images: AnyImages = FashionMnist()
    codes: int = 128
    path: str | tuple[str, ...] | None = None
    tokenizer: AnyTokenizer = ByteTokenizer()
    length: int = 256
    batch_size: int = 16
    image_share: tuple[float, float] = (0.3, 0.7)
    caption: Caption = "either"
    image_marks: Literal["text", "image"] = "text"
    positions: Positions = "document"
    split: Fractions = Fractions(by="position")
    vocabulary: int | None = None
    column: str = "text"
    suffixes: tuple[str, ...] = SUFFIXES
    folder: str | None = None
    verify: Verify = "checksums"
    seed: int = 0
    threads: int = 2

    @property
    def marks(self) -> Marks:
        """No mark of the tokenizer stands around a document."""
        return "none"

    def ids(self) -> InterleavedIds:
        """Where text, marks and codes lie; reads the tokenizer's file, if it has one."""
        return InterleavedIds(self.tokenizer.build().vocabulary, self.codes)

    def schema(self) -> TokenSchema:
        """What batches hold; reads the tokenizer's file, if it has one, and neither text nor images."""
        self._check()
        ids = self.ids()
        if self.vocabulary is not None and self.vocabulary < ids.vocabulary:
            raise UserError(
                f"data.vocabulary={self.vocabulary} is too small: text, marks and codes have {ids.vocabulary} ids "
                f"({ids.modalities(self.image_marks)}). Set it to {ids.vocabulary} or more, or leave it out."
            )
        modalities = ids.modalities(self.image_marks)
        return TokenSchema(
            self.vocabulary or ids.vocabulary,
            self.length,
            modalities.names,
            capacities(self.length, self.image_share),
            modalities.ranges,
        )

    def build(self, progress: Progress | None = None) -> "TwoModalityDataSet":
        """Opens images and tokenised text, and trains the codebook if this is its first use.

        Args:
          progress: Called with (bytes of files read, bytes in all) while text is tokenised.
        Raises:
          UserError: a file cannot be read, the fields contradict one another, or no row is inside of the bounds.
        """
        schema, ids = self.schema(), self.ids()
        corpus = self._corpus(progress)
        tokens = np.asarray(corpus.tokens)  # slices of a `memmap` cost much more
        text = {split: tokens[slice(*bounds)] for split, bounds in self.split.bounds(tokens.size).items()}
        found = self.images.read()
        images = self._by_split(found)
        if not len(images["train"]):
            raise UserError(f"data.split: none of {len(found)} images is in the training split. Give more images.")
        codebook = self._codebook(images["train"].pixels)
        material = {
            split: Material(codebook.encode(images[split].pixels), images[split].labels, text[split])
            for split in SPLITS
        }
        tokenizer = self.tokenizer.build()
        rows = InterleavedRows(
            schema,
            ids,
            ids.modalities(self.image_marks),
            material,
            [tokenizer.encode(f"\n{name}\n") for name in found.names],
            RowStyle(image_share=self.image_share, caption=self.caption, positions=self.positions, seed=self.seed),
            hashlib.sha256(repr((corpus.digest, self.split)).encode()).hexdigest(),
        )
        return TwoModalityDataSet(
            rows, batch_size=self.batch_size, threads=self.threads, codebook=codebook, images=images
        )

    def _check(self) -> None:
        check_at_least("data.length", self.length, 1)
        check_at_least("data.codes", self.codes, 1)
        for name, choices in (("caption", ("before", "after", "either", "none")), ("image_marks", ("text", "image"))):
            check_one_of(f"data.{name}", getattr(self, name), choices)
        check_image_share(self.image_share)
        if self.split.by != "position":
            raise UserError(
                f'data.split.by={self.split.by!r}: text is cut by position here. Set data.split.by="position".'
            )

    def _corpus(self, progress: Progress | None) -> Corpus:
        with _text_files(self.path, self.suffixes) as files:
            return tokenised(
                files,
                self.tokenizer.build(),
                column=self.column,
                marks=self.marks,
                folder=self._folder,
                verify=self.verify,
                progress=progress,
            )

    @property
    def _folder(self) -> pathlib.Path:
        return cache_folder() if self.folder is None else pathlib.Path(self.folder)

    def _by_split(self, images: GreyImages) -> dict[str, GreyImages]:
        digests = [hashlib.blake2b(image.tobytes(), digest_size=8).digest() for image in images.pixels]
        hashes = mix(np.frombuffer(b"".join(digests), "<u8") ^ np.uint64(key_of(_SPLIT, self.split.seed)))
        shares = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53  # in [0, 1)
        edges = [round(edge, 12) for edge in (self.split.train, self.split.train + self.split.validation)]
        of = np.digitize(shares, edges)
        return {
            split: dataclasses.replace(images, pixels=images.pixels[of == s], labels=images.labels[of == s])
            for s, split in enumerate(SPLITS)
        }

    def _codebook(self, pixels: np.ndarray) -> PatchCodebook:
        made_of = (_FORMAT, hashlib.sha256(pixels.tobytes()).hexdigest(), self.codes, self.seed)
        name = hashlib.sha256(repr(made_of).encode()).hexdigest()[:24]

        def make(path: pathlib.Path) -> None:
            out = ArrayWriter(path, {"centres": np.uint8})
            out.append("centres", train_codebook(pixels, self.codes, seed=self.seed).centres.reshape(-1))
            out.finish(format=_FORMAT)

        arrays, _ = open_arrays(kept(self._folder, f"codebook-{name}", make), self.verify)
        return PatchCodebook(np.array(arrays["centres"]).reshape(-1, PATCH * PATCH))


class TwoModalityDataSet(TokenDataSet):
    """Batches of images among text; a `TokenDataSet` that knows its codebook and images.

    Args:
      examples: Rows.
      batch_size: Global batch size.
      threads: Reading threads.
      codebook: Of the codes in the rows.
      images: Of each split.
    """

    def __init__(
        self,
        examples: InterleavedRows,
        *,
        batch_size: int,
        threads: int,
        codebook: PatchCodebook,
        images: Mapping[str, GreyImages],
    ) -> None:
        super().__init__(examples, batch_size=batch_size, threads=threads)
        self.codebook, self.images, self._tokens = codebook, images, examples.tokens_per_row
        self._errors = {s: codebook.error(found.pixels) for s, found in images.items() if len(found)}

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is said when a run begins: files that were left out, how well images are drawn, if rows are full."""
        read = self.images["train"].remarks
        errors = ", ".join(f"{error:.0f} ({split})" for split, error in self._errors.items())
        drawn = (
            f"Codebook of {len(self.codebook)} patches: mean squared error of the pixels of decoded images, of 255²: "
            f"{errors}."
        )
        if self._tokens == self.schema.length:
            return (*read, drawn)
        return (
            *read,
            drawn,
            f"Rows have {self._tokens} tokens and {self.schema.length - self._tokens} positions of padding: no whole "
            "number of images and text beside them fills a row inside of data.image_share.",
        )

    def files(self) -> dict[str, bytes]:
        """What a run folder is to hold of the data: the codebook."""
        return {CODEBOOK: self.codebook.to_bytes()}

    def pictures(self) -> Iterator[tuple[str, str, str, str]]:
        """(split, name, caption, SVG) of pictures for the report: held-out images, and below them decoded codes."""
        split = "validation" if "validation" in self._errors else "train"
        shown = self.images[split].pixels[:_SHOWN]
        both = np.concatenate([shown, self.codebook.decode(self.codebook.encode(shown))])
        caption = (
            f"Images, and below them what the codebook of {len(self.codebook)} patches makes of their codes; mean "
            f"squared error of a pixel {self._errors[split]:.0f} of 255²."
        )
        yield split, "reconstructions", caption, pictures.svg(pictures.sheet(both, len(shown)))


@contextlib.contextmanager
def _text_files(path: str | tuple[str, ...] | None, suffixes: Sequence[str]) -> Iterator[Sequence[TextFile]]:
    if path is not None:
        yield find_texts(path, suffixes)
        return
    bundled = importlib.resources.files("scalejax.data") / "bundled" / "tiny_shakespeare.txt.gz"
    with importlib.resources.as_file(bundled) as file:
        yield (TextFile(file, file.name),)
