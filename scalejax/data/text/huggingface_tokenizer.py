"""Tokenizers of Hugging Face checkpoints: a `tokenizer.json`, read by the `tokenizers` library (extra `llm`).

Around the library stands what a model needs besides: which ids open and end a document (`tokenizer_config.json`,
`special_tokens_map.json`), at which generation stops (`generation_config.json`), the chat template. All of it is data
of the checkpoint; nothing about a particular model is written here.

Truncation and padding that a `tokenizer.json` may ask for are switched off: they would lose text in silence.
"""

import dataclasses
import datetime
import hashlib
import importlib
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from scalejax import json_reading
from scalejax.data.text.chat import ChatTemplate
from scalejax.data.text.sources import pieces
from scalejax.data.text.tokenizer import Specials, check_ids, utf8
from scalejax.errors import UserError

# Runs without a change between space and other characters are cut as well: merging a run takes time quadratic in it.
_RUN_CHARACTERS = 25_000
_RUNS = re.compile(r"\s+|\S+")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib")
# How checkpoints spell the end of a turn or of a text, where generation_config.json does not list it.
_END_NAMES = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|endoftext|>", "<|im_end|>", "</s>")
_LARGEST_ID = 2**31 - 2  # so that the number of ids is an int32 too
_REPLACEMENT = "\ufffd"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HuggingFaceTokenizer:
    """A tokenizer as `tokenizer.json` holds it; files beside it say the rest.

    Attributes:
      path: `tokenizer.json`, or the folder it lies in (that of a checkpoint).
      bos: Name of the token that opens a document; None = as the files beside it say.
      eos: Name of the token that ends a document; None = likewise.
      pad: Name of the token for padding; None = likewise.
      chat_template: Jinja source of the chat template; None = likewise.
    """

    path: str
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    chat_template: str | None = None

    @classmethod
    def load(cls, path: str) -> "HuggingFaceTokenizer":
        """The tokenizer of a file, so that --set data.tokenizer=PATH/tokenizer.json names it."""
        return cls(path=path)

    def build(self) -> "HuggingFace":
        """Reads the files.

        Raises:
          UserError: a file is missing or of another kind, a named token does not exist, or `tokenizers` is not
            installed.
        """
        path = _find(pathlib.Path(self.path))
        source = path.read_bytes()
        _check_content(path, source)
        library = _library()
        try:
            tokenizer = library.Tokenizer.from_str(source.decode())
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"{path}: the tokenizers library {library.__version__} cannot read it ({error}). Is it complete? A "
                "newer format needs pip install --upgrade tokenizers."
            ) from error
        if not tokenizer.get_vocab_size():
            raise UserError(f"{path}: has no token. Copy it again from its source.")
        last, largest = max(tokenizer.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        if largest > _LARGEST_ID:
            raise UserError(
                f"{path}: the token {last!r} has id {largest}, but ids must be at most {_LARGEST_ID}, as they are "
                "int32. Copy the file again from its source."
            )
        beside = _Beside(path.parent)
        names = {role: getattr(self, role) or beside.token(f"{role}_token") for role in ("bos", "eos", "pad")}
        ids = {role: _token_id(tokenizer, role, name, path) for role, name in names.items() if name}
        digest = hashlib.sha256(source)
        return HuggingFace(
            tokenizer,
            ids,
            stop_ids=beside.stop_ids(),
            template=ChatTemplate(self.chat_template, str(path)) if self.chat_template else beside.chat_template(),
            fingerprint=hashlib.sha256(repr((digest.hexdigest(), sorted(ids.items()))).encode()).hexdigest(),
            where=str(path),
        )


class HuggingFace:
    """See `HuggingFaceTokenizer`; implements `Tokenizer`.

    Args:
      tokenizer: A `tokenizers.Tokenizer`, which is changed.
      ids: Ids of "bos", "eos" and "pad", as far as they are known.
      stop_ids: Further ids at which generation ends.
      template: The chat template, or None.
      fingerprint: Hex digest of the files.
      where: For messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        ids: Mapping[str, int],
        *,
        stop_ids: Sequence[int],
        template: ChatTemplate | None,
        fingerprint: str,
        where: str,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._parsing = type(tokenizer).from_str(tokenizer.to_str())
        tokenizer.encode_special_tokens = True  # the library's name for: names of special tokens are ordinary text
        self._tokenizer = tokenizer
        self.vocabulary = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos, self.eos, self.pad = (ids.get(role) for role in ("bos", "eos", "pad"))
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids: Mapping[str, int] = {t.content: i for i, t in sorted(added.items()) if t.special}
        ends = [self.special_ids[name] for name in _END_NAMES if name in self.special_ids]
        own = [] if self.eos is None else [self.eos]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *stop_ids, *ends]))
        self._template, self._fingerprint, self._where = template, fingerprint, where
        self._names = {role: tokenizer.id_to_token(i) for role, i in ids.items()}

    def encode(self, text: str, *, specials: Specials = "text") -> np.ndarray:
        """int32[N] ids; adds no special token, and reads none unless specials="parse"."""
        tokenizer = self._tokenizer if specials == "text" else self._parsing
        return self._joined(self._encoded(tokenizer, self._cut(text)))

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, in the library's threads."""
        cut = [self._cut(text) for text in texts]
        flat = iter(self._encoded(self._tokenizer, [part for parts in cut for part in parts]))
        return [self._joined(itertools.islice(flat, len(parts))) for parts in cut]

    def decode(self, ids: Iterable[int], *, specials: Literal["skip", "show"] = "skip") -> str:
        """Text of ids; special tokens become nothing, or their names."""
        array = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), np.int64).reshape(-1)
        check_ids(array, self.vocabulary)
        return self._tokenizer.decode(array.tolist(), skip_special_tokens=specials == "skip")

    def stream(self) -> "HuggingFaceStream":
        """A decoder for ids that come one by one."""
        return HuggingFaceStream(self)

    def fingerprint(self) -> str:
        """Hex digest of `tokenizer.json` and the ids of bos, eos and pad."""
        return self._fingerprint

    def check_chat(self) -> ChatTemplate:
        """The chat template.

        Raises:
          UserError: there is none.
        """
        if self._template is None:
            raise UserError(
                f"{self._where}: there is no chat template (tokenizer_config.json or chat_template.jinja beside it). "
                "Use a checkpoint that is tuned for chat, or give HuggingFaceTokenizer(chat_template=...)."
            )
        return self._template

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        reply: Literal["open", "none"] = "open",
        variables: Mapping[str, object] | None = None,
        now: datetime.datetime | None = None,
    ) -> str:
        """The text of a conversation by the checkpoint's template; encode it with specials="parse".

        Args:
          messages: Each with "role" and "content", and whatever else the template knows.
          reply: "open" = ends with the header of the answer that is to be generated.
          variables: More for the template: tools, documents, date_string.
          now: The time, for templates that write it; None = they take their fixed date.
        Raises:
          UserError: there is no template, or it refuses the messages.
        """
        template = self.check_chat()
        names = {f"{role}_token": name for role, name in self._names.items()}
        return template.render(messages, reply=reply, variables=names | dict(variables or {}), now=now)

    def _cut(self, text: str) -> list[str]:
        utf8(text)  # the library would fail
        return [part for piece in pieces(text) for part in _short_runs(piece)]

    def _encoded(self, tokenizer: Any, parts: list[str]) -> list[Any]:
        try:
            return tokenizer.encode_batch_fast(parts, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"encode: {self._where} cannot represent the text ({error}). It has a character that is not in the "
                "vocabulary: leave it out, or take another tokenizer."
            ) from error

    @staticmethod
    def _joined(encodings: Iterable[Any]) -> np.ndarray:
        parts = [np.array(encoding.ids, np.int32) for encoding in encodings]
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int32), *parts])


class HuggingFaceStream:
    """Implements `TextStream`: the text by which an id lengthens what the ids before it say.

    A tail that ends in U+FFFD may be half a character and waits for the next id. Only the ids since the last text that
    was given out, and those before them that it came from, are decoded again.
    """

    def __init__(self, tokenizer: HuggingFace) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._given = 0  # ids of the front whose text has been given out

    def push(self, ids: Iterable[int]) -> str:
        """As `TextStream.push`."""
        out = []
        for i in ids:
            self._ids.append(int(i))
            text, before = self._tokenizer.decode(self._ids), self._before()
            if len(text) > len(before) and not text.endswith(_REPLACEMENT):
                out.append(text[len(before) :])
                self._ids, self._given = self._ids[self._given :], len(self._ids) - self._given
        return "".join(out)

    def finish(self) -> str:
        """As `TextStream.finish`."""
        text = self._tokenizer.decode(self._ids)[len(self._before()) :]
        self._ids, self._given = [], 0
        return text

    def _before(self) -> str:
        return self._tokenizer.decode(self._ids[: self._given])


class _Beside:
    """The files beside a `tokenizer.json`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._config = self._read("tokenizer_config.json")
        self._map = self._read("special_tokens_map.json")

    def token(self, name: str) -> str | None:
        for source in (self._config, self._map):
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
        return None

    def stop_ids(self) -> list[int]:
        name = "generation_config.json"
        value = self._read(name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(i) is int and -1 <= i <= _LARGEST_ID for i in ids):  # older files say -1 where there is none
            raise UserError(
                f"{self._folder / name}: eos_token_id must be a token id or a list of them; got {value!r}. Copy it "
                "again from its source."
            )
        return ids

    def chat_template(self) -> ChatTemplate | None:
        file = self._folder / "chat_template.jinja"
        if file.is_file():
            try:
                return self._template(file.read_text(encoding="utf-8"), file)
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{file}: cannot be read as UTF-8 text ({error}). Copy it again.") from error
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        file = self._folder / "tokenizer_config.json"
        if not isinstance(template, str | None):
            raise UserError(f"{file}: chat_template must be text; got {template!r}. Copy it again.")
        return None if template is None else self._template(template, file)

    @staticmethod
    def _template(source: str, file: pathlib.Path) -> ChatTemplate:
        if not source.strip():
            raise UserError(f"{file}: the chat template is empty, which makes every prompt the same. Copy it again.")
        return ChatTemplate(source, str(file))

    def _read(self, name: str) -> dict[str, Any]:
        file = self._folder / name
        if not file.is_file():
            return {}
        try:
            content = json_reading.read(file)
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: is not JSON ({error}); truncated? Copy it again from its source.") from error
        if not isinstance(content, dict):
            raise UserError(f"{file}: wanted a JSON object; got {type(content).__name__}. Copy it from its source.")
        return content


def _find(path: pathlib.Path) -> pathlib.Path:
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return path / "tokenizer.json"
        others = sorted(file.name for file in path.glob("token*"))
        raise UserError(
            f"{path}: the folder has no tokenizer.json; it has {', '.join(others) or 'no tokenizer file'}. "
            "A SentencePiece or tiktoken model (tokenizer.model) must be converted first: transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...) writes a tokenizer.json."
        )
    if not path.is_file():
        raise UserError(f"{path}: does not exist. Name a tokenizer.json, or the folder of a checkpoint that has one.")
    return path


def _check_content(path: pathlib.Path, source: bytes) -> None:
    if path.suffix in _PICKLES or source[:1] == b"\x80" or source[:2] == b"PK":
        raise UserError(
            f"{path}: looks like a pickle, which can run code as you when it is loaded, so it never is. Name a "
            "tokenizer.json."
        )
    try:
        content = json_reading.parse(source)
    except ValueError as error:
        raise UserError(
            f"{path}: is not a tokenizer.json ({error}). A SentencePiece or tiktoken model must be converted first: "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes a tokenizer.json."
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise UserError(f"{path}: is JSON but describes no tokenizer (no 'model'). Name the tokenizer.json beside it.")
    vocabulary = content["model"].get("vocab")
    tokens: dict[object, str] = {}
    for token, number in vocabulary.items() if isinstance(vocabulary, dict) else ():
        if type(number) is int and tokens.setdefault(number, token) != token:
            raise UserError(
                f"{path}: the tokens {tokens[number]!r} and {token!r} have one id, {number}: the file is damaged. Copy "
                "it again from its source."
            )


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise UserError(
            "HuggingFaceTokenizer needs the library tokenizers, which is not installed: pip install 'scalejax[llm]'. "
            "ByteTokenizer() needs none."
        ) from error


def _token_id(tokenizer: Any, role: str, name: str, path: pathlib.Path) -> int:
    found = tokenizer.token_to_id(name)
    if found is None:
        raise UserError(
            f"{path}: has no token {name!r}, which {role} names. Set {role} to one of its special tokens, or copy the "
            "files of one checkpoint."
        )
    return found


def _short_runs(text: str) -> Iterator[str]:
    """Cuts a text inside runs of space or of other characters that are longer than `_RUN_CHARACTERS`."""
    start = 0
    if len(text) > _RUN_CHARACTERS:
        for run in _RUNS.finditer(text):
            for cut in range(run.start() + _RUN_CHARACTERS, run.end(), _RUN_CHARACTERS):
                yield text[start:cut]
                start = cut
    yield text[start:]
