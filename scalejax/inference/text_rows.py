"""Rows of tokens from text, for looking at what a model makes of it: calibration, perplexity."""

import pathlib

import numpy as np

from scalejax.data.text import sources
from scalejax.data.text.tokenizer import check_vocabulary
from scalejax.errors import UserError, check_at_least
from scalejax.models.llm.model_folder import LanguageModel

LENGTH = 512
"""Positions of a row, at most."""


def read_rows(model: LanguageModel, text: pathlib.Path | None, tokens: int) -> np.ndarray:
    """int32[rows, positions]: the beginning of a text, documents one behind the other, cut into rows.

    Args:
      model: Whose tokenizer reads it; each row begins as its texts begin.
      text: A file or folder, as of `data.text.sources`; None = the sources of Python's standard library.
      tokens: How many, at most; what is left of a row is dropped.

    Raises:
      UserError: the model has no tokenizer, the text cannot be read, or it is shorter than two tokens.
    """
    check_at_least("--tokens", tokens, 2)
    if model.tokenizer is None:
        raise UserError(
            f"{model.path} has no tokenizer.json, which --text needs. Copy the files of the tokenizer into it "
            "(tokenizer.json, tokenizer_config.json)."
        )
    if text is not None and not text.exists():
        raise UserError(f"--text {text} does not exist. Name a file or a folder of text, JSONL or Parquet.")
    tokenizer = model.tokenizer.build()
    assert model.config.vocabulary is not None
    check_vocabulary(tokenizer, model.config.vocabulary, f"{model.path}: vocabulary")
    begin = [tokenizer.bos] if model.begins == "bos" and tokenizer.bos is not None else []
    found: list[np.ndarray] = []
    count = 0
    files = sources.find_texts(None if text is None else str(text), sources.SUFFIXES)
    for block in (block for file in files for block in sources.read_documents(file, "text")):
        ids = tokenizer.encode(block.text)
        found.append(np.asarray(ids, np.int32))
        count += len(ids)
        if count >= tokens:
            break
    ids = np.concatenate(found) if found else np.zeros(0, np.int32)
    length = min(LENGTH, model.config.max_positions, tokens, max(count + len(begin), 1))
    own = length - len(begin)
    rows = min(len(ids), tokens) // max(own, 1)
    if rows < 1 or own < 1 or length < 2:
        raise UserError(f"--text: has {count:,} tokens for this model, and at least 2 are needed. Give more text.")
    body = ids[: rows * own].reshape(rows, own)
    return np.concatenate([np.tile(np.asarray(begin, np.int32), (rows, 1)), body], axis=1)
