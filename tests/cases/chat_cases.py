"""A small Llama with the files of a tokenizer and a chat template, as a folder of Hugging Face."""

import dataclasses
import json

from llama_cases import GQA, write_checkpoint

from scalejax.data.text import chat

NAMES = ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eom_id", "eot_id")
SPECIALS = tuple(f"<|{name}|>" for name in NAMES)
CONFIG = dataclasses.replace(GQA, vocabulary=320, layers=1, max_positions=2048)
"""More ids than the tokenizer has."""


def write_tokenizer(folder, template=chat.LLAMA3):
    """A token for each byte, and the special ones of Llama 3."""
    import tokenizers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.add_special_tokens(list(SPECIALS))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIALS[0], "eos_token": SPECIALS[1]}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def write_model(folder, template=chat.LLAMA3, **fields):
    """The folder."""
    write_checkpoint(folder, dataclasses.replace(CONFIG, **fields))
    write_tokenizer(folder, template)
    return folder
