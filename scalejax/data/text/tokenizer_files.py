"""The tokenizers of bytes and of characters as files that other libraries read: tokenizer.json and its config."""

import json

from scalejax.data.text.tokenizer import Bytes, Characters, Tokenizer


def of(tokenizer: Tokenizer, begins: str) -> dict[str, str]:
    """Files that other libraries read for tokenizers that have none: {} for one that has.

    Args:
      tokenizer: Any.
      begins: What comes before a text: "bos", or "nothing".
    """
    if isinstance(tokenizer, Bytes):
        return _byte_tokenizer(begins)
    return _character_tokenizer(tokenizer.alphabet) if isinstance(tokenizer, Characters) else {}


def _character_tokenizer(alphabet: str) -> dict[str, str]:
    """Characters as words of one character; others are errors, as the token for unknown words does not exist."""
    one = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}
    words = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(alphabet)}, "unk_token": "<|unknown|>"}
    return _files(specials=[], before=one, after={"type": "Fuse"}, model=words, config={})


def _byte_tokenizer(begins: str) -> dict[str, str]:
    """The tokenizer of bytes as the files of a byte-level BPE without merges, which other libraries read."""
    specials = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for name, i in Bytes.special_ids.items()
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": {c: byte for byte, c in enumerate(_byte_characters())}, "merges": []}
    config = {"eos_token": "<|eos|>", "pad_token": "<|pad|>"} | ({"bos_token": "<|bos|>"} if begins == "bos" else {})
    return _files(specials=specials, before=level, after=level, model=model, config=config)


def _files(
    *,
    specials: list[dict[str, object]],
    before: dict[str, object],
    after: dict[str, object],
    model: dict[str, object],
    config: dict[str, str],
) -> dict[str, str]:
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [token | {"special": True} for token in specials],
        "normalizer": None,
        "pre_tokenizer": before,
        "post_processor": None,
        "decoder": after,
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=1) + "\n",
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies (those of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
