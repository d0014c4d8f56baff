"""Rows of tokens from text on disk: documents packed, or cut from one stream, against windows of a mapped file.

The unit of work is one batch of 16 rows of 2,048 tokens, and "examples" are tokens. Text is the standard library's,
byte by byte, unless `--data` names other text; it is tokenised before anything is timed, and the figures say how fast.
The peer hands over tokens and targets of a stream alone; ours come with weights, segments and positions, and with every
token once in an epoch.
"""

import contextlib
import dataclasses
import functools
import pathlib
import tempfile
import time
from typing import Any

import numpy as np

from scalejax.bench import machine, peers
from scalejax.bench.harness import Contest, OutputsDiffer, repeated
from scalejax.data.text.corpus import open_corpus
from scalejax.data.text.dataset import Counts, TokenDataSet
from scalejax.data.text.files import TextData, TextSplit
from scalejax.data.text.packing import fewest_rows

CASES = ("best-fit", "first-fit", "concatenate", "random-crops")
PEERS = ("torch",)
ON_CPU = True
TAKES_DATA = True

ROWS = 16
LENGTH = 2048


def prepare(case: str, against: str | None, data: pathlib.Path | None) -> Contest:
    """The contest of a case.

    Raises:
      UserError: `data` cannot be read as text.
    """
    with contextlib.ExitStack() as held:
        folder = pathlib.Path(held.enter_context(tempfile.TemporaryDirectory(prefix="scalejax-bench-"))) / "text"
        config = TextData(
            path=None if data is None else str(data),
            length=LENGTH,
            batch_size=ROWS,
            split=TextSplit(train=1.0, validation=0.0),
            folder=str(folder),
            packing="concatenate" if case == "random-crops" else case,  # pyright: ignore[reportArgumentType]
            order="random-crops" if case == "random-crops" else "shuffled",
        )
        start = time.perf_counter()
        ours = config.build()
        tokenising_s = time.perf_counter() - start
        corpus = open_corpus(next(folder.glob("corpus-*")))
        peer = None if against is None else peers.load("torch_text").Windows(corpus.tokens, LENGTH, ROWS)
        keep = held.pop_all()
    batches = ours.train_batches()
    return Contest(
        ours=repeated(lambda: next(batches)),
        peer=None if peer is None else peer.take,
        check=functools.partial(_check, config, peer),
        examples=ROWS * LENGTH,
        device=machine.device_name(None),
        close=keep.close,
        figures=functools.partial(_figures, ours, np.diff(corpus.offsets), tokenising_s),
    )


def _check(config: TextData, peer: Any) -> None:
    """Raises OutputsDiffer unless rows of a stream in file order are those of the peer, wherever a target counts."""
    ours = dataclasses.replace(config, packing="concatenate", order="file").build().examples
    rows = min(64, ours.num_examples("train") - 1)
    batch = ours.held("train", 0, rows)
    tokens, targets = (t.numpy() for t in peer.at([r * LENGTH for r in range(rows)]))
    counts = batch.weights > 0
    if not (np.array_equal(batch.tokens, tokens) and np.array_equal(batch.targets[counts], targets[counts])):
        raise OutputsDiffer("rows of the stream differ from those of the peer")


def _figures(ours: TokenDataSet, sizes: np.ndarray, tokenising_s: float) -> dict[str, float]:
    rows = ours.num_examples("train")
    counts = Counts.of(ours.examples.held("train", 0, rows))
    fewest = fewest_rows(sizes, LENGTH)  # that cut no document which fits into a row
    return {
        "tokens": counts.tokens,
        "documents": sizes.size,
        "tokenised, tokens/s": counts.tokens / tokenising_s,
        "padding": 1 - counts.tokens / (rows * LENGTH),
        "rows over the fewest without cuts": rows / fewest,
    }
