"""`--set path=value`: a change to one field of an experiment, typed by the annotation of that field.

    steps=2000                                  int, float, bool (true/false), str as the field says; never coerced
    model.hidden=512,256                        tuples; also [512,256]; `[]` is the empty one; nested ones with brackets
    model.hidden.0=1024                         one item of a tuple, by position
    data.path=none                              None, where the field allows it
    optimizer=AdamW                             another member of a union of dataclasses, with its defaults
    quantization=QuantizationRule               a tuple of dataclasses, with their defaults; several with commas
    optimizer.learning_rate.peak=1e-3           a field of whatever is there by then: sets apply in order
    tables.sharding=plan.json                   a file, where the type of the field has `load`
    optimizer.learning_rate=1e-3                short for the only member that has a single field: Constant(value=1e-3)
    phase=head                                  no field: the run as it is in this one of its phases, and no other

Fields annotated with a protocol (`model`, `data`) go by the type that the recipe put there.
"""

import ast
import contextlib
import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, TypeVar

from scalejax.errors import UserError

if typing.TYPE_CHECKING:
    from scalejax.train.experiment import Experiment

T = TypeVar("T")

_EXAMPLES: dict[object, tuple[str, str]] = {
    bool: ("true or false", "true"),
    int: ("an integer", "8"),
    float: ("a number", "1e-3"),
    str: ("a text", "name"),
    types.NoneType: ("none", "none"),
}
_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")
_SHOWN = 6  # nearest paths in a message


def apply(experiment: "Experiment", sets: Sequence[str]) -> "Experiment":
    """Applies `path=value` overrides in order and returns the new experiment.

    Raises:
      UserError: a path that does not exist (names the nearest), a value of the wrong type (says what was wanted, with
        an example), or a value that the dataclass refuses.
    """
    for text in sets:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise UserError(f"--set {text}: must be path=value, for example --set steps=2000; got no '='.")
        if path.strip() == "phase":
            from scalejax.train import phases

            experiment = phases.named(experiment, value.strip(), f"--set {text}")
            continue
        change = _Change(root=experiment, path=path.strip(), text=value.strip())
        experiment = change.into(experiment, type(experiment), change.path.split("."), "")
    return experiment


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every path that can be set, with its value: dataclasses before their fields, tuples of plain values whole."""
    if prefix:
        yield prefix, value
    if _is_config(value):
        for field in dataclasses.fields(value):  # pyright: ignore[reportArgumentType]
            if field.init:
                yield from flatten(getattr(value, field.name), f"{prefix}.{field.name}" if prefix else field.name)
    elif isinstance(value, tuple) and any(_is_config(item) for item in value):
        for i, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{i}")


def show(value: object) -> str:
    """A value as it would be written after `path=`; the type name for a dataclass."""
    if _is_config(value):
        return type(value).__name__
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        flat = all(isinstance(item, (int, float)) for item in value) and len(value) > 1
        return ",".join(map(show, value)) if flat else "[" + ",".join(map(_show_item, value)) + "]"
    return str(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Change:
    """One `path=text` on its way down the tree; `root` is only there for messages."""

    root: "Experiment"
    path: str
    text: str

    def into(self, value: Any, annotation: object, segments: list[str], done: str) -> Any:
        """Returns `value`, annotated as `annotation` and reached by `done`, with the change applied."""
        if not segments:
            return self.convert(value, annotation, done)
        name, rest = segments[0], segments[1:]
        here = f"{done}.{name}" if done else name
        if isinstance(value, tuple) and re.fullmatch(r"\d+", name):
            if int(name) >= len(value):
                raise self.error(f"{done} has {len(value)} items, the last is {done}.{len(value) - 1}; got {here}.")
            i = int(name)
            item = self.into(value[i], _item_annotation(annotation, i), rest, here)
            return (*value[:i], item, *value[i + 1 :])
        if not _is_config(value) or name not in _settable(value):
            raise self.unknown(value, annotation, name, done)
        hint = typing.get_type_hints(type(value))[name]
        new = self.into(getattr(value, name), hint, rest, here)
        return self.construct(lambda: dataclasses.replace(typing.cast(Any, value), **{name: new}))

    def convert(self, value: object, annotation: object, path: str) -> object:
        """Turns the text into a value of type `annotation`; `value` is what is there now."""
        members = _members(annotation)
        configs = [m for m in members if _is_config_type(m)]
        plain = [m for m in members if not _is_config_type(m)]
        for member in configs:
            if self.text == member.__name__:
                return self.default(member, path)
            if self.text.endswith(".json") and hasattr(member, "load"):
                return self.construct(functools.partial(typing.cast(Any, member).load, self.text))
        items = self.items(plain, path)
        if items is not None:
            return items
        if _is_config(value) and not configs:  # a protocol: any type would do, and none can be named by a text
            raise self.error(
                f"{path} is of type {type(value).__name__} and cannot be set as a whole. Set its fields "
                f"({self.fields(value, path)}), or choose another recipe."
            )
        if plain:
            found, result = _parse(self.text, typing.Union[tuple(plain)])  # noqa: UP007 (members known at run time only)
            if found:
                return result
        if not plain or not _is_simple(value):
            short = []
            for member in configs:
                hints = {f.name: typing.get_type_hints(member)[f.name] for f in dataclasses.fields(member) if f.init}
                if len(hints) == 1:
                    ((name, hint),) = hints.items()
                    found, result = _parse(self.text, hint)
                    if found:
                        short.append((member, name, result))
            if len(short) == 1:
                member, name, result = short[0]
                return self.construct(lambda: member(**{name: result}))
        raise self.error(f"{path} must be {self.wanted(value, annotation)}; got {self.text!r}.")

    def items(self, members: list[object], path: str) -> tuple[object, ...] | None:
        """The tuple of dataclasses that a list of type names stands for; None = the text is no such list."""
        words = [word.strip() for word in self.text.strip("[]").split(",")]
        for member in members:
            arguments = typing.get_args(member)
            if typing.get_origin(member) is tuple and arguments[1:] == (Ellipsis,):
                types = {m.__name__: m for m in _members(arguments[0]) if _is_config_type(m)}
                if types and words == [""]:
                    return ()
                if types and all(word in types for word in words):
                    return tuple(self.default(types[word], f"{path}.{i}") for i, word in enumerate(words))
        return None

    def default(self, member: type, path: str) -> object:
        missing = [
            f.name
            for f in dataclasses.fields(member)
            if f.init and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise self.error(
                f"{path} cannot become a {member.__name__} by name: it needs {', '.join(missing)}. "
                "Write a recipe of your own that constructs it."
            )
        return self.construct(member)

    def construct(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except (ValueError, TypeError) as error:
            raise self.error(str(error)) from error

    def wanted(self, value: object, annotation: object) -> str:
        words, example = _describe(annotation)
        if _is_simple(value) and value not in (None, "", ()):
            example = show(value)
        return f"{words}, for example --set {self.path}={example}"

    def unknown(self, value: object, annotation: object, name: str, done: str) -> UserError:
        where = done or type(value).__name__
        if not _is_config(value):
            kind = "a tuple: give a position" if isinstance(value, tuple) else f"{show(value)!r} and has no fields"
            return self.error(f"{where} is {kind}; got {self.path!r}.")
        others = [m for m in _members(annotation) if _is_config_type(m) and name in _settable(m)]
        if others and done:
            choices = " or ".join(f"--set {done}={m.__name__}" for m in others)
            reason = getattr(type(value), "WITHOUT", {}).get(name)
            return self.error(
                f"{done} is of type {type(value).__name__}, which has no field {name!r}"
                f"{'' if reason is None else f' ({reason})'}; put {choices} before it. "
                f"Fields here: {self.fields(value, done)}."
            )
        from scalejax.configs import earlier

        moved = earlier.path(self.path)
        nearest = _nearest(self.path, [path for path, _ in flatten(self.root)])
        if moved != self.path:
            nearest = f" It is {moved} now."
        return self.error(
            f"{where} has no field {name!r}.{nearest} Fields here: {self.fields(value, done)}. "
            "`scalejax recipes NAME` shows every path with its value."
        )

    def fields(self, value: object, path: str) -> str:
        return ", ".join(f"{path}.{name}" if path else name for name in _settable(value))

    def error(self, message: str) -> UserError:
        return UserError(f"--set {self.path}={self.text}: {message}")


def _is_config_type(annotation: object) -> TypeGuard[type]:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _is_config(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_simple(value: object) -> bool:
    return not _is_config(value) and not (isinstance(value, tuple) and any(_is_config(item) for item in value))


def _settable(config: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(config) if f.init]


def _members(annotation: object) -> list[object]:
    """Members of a union, or the annotation alone."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [m for argument in typing.get_args(annotation) for m in _members(argument)]
    return [annotation]


def _item_annotation(annotation: object, i: int) -> object:
    for member in _members(annotation):
        arguments = typing.get_args(member)
        if typing.get_origin(member) is tuple and arguments:
            return arguments[0] if arguments[-1] is Ellipsis else arguments[i]
    return Any


def _parse(text: str, annotation: Any) -> tuple[bool, object]:
    """(whether the text can be read as `annotation`, the value). Strict: no reading coerces one type into another."""
    import pydantic

    try:
        adapter = pydantic.TypeAdapter(annotation)
    except pydantic.errors.PydanticSchemaGenerationError:  # a protocol or another class: no text stands for it
        return False, None
    for candidate in _readings(text):
        try:
            value = adapter.validate_python(candidate, strict=True)
        except pydantic.ValidationError:
            continue
        return not _has_nan(value), value  # NaN is never a setting, however it was spelt
    return False, None


def _has_nan(value: object) -> bool:
    return any(map(_has_nan, value)) if isinstance(value, tuple) else value != value


def _readings(text: str) -> Iterator[object]:
    """What a text may mean, most specific first; the annotation picks."""
    lowered = text.lower()
    if lowered == "none":
        yield None
    if lowered in ("true", "false"):
        yield lowered == "true"
    if _INTEGER.fullmatch(text):
        yield int(text)
    with contextlib.suppress(ValueError):
        yield float(text)
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        yield _tuples(ast.literal_eval(text))  # quoted text, nested tuples
    inner = text[1:-1] if text[:1] + text[-1:] in ("[]", "()") else text
    words = [word.strip() for word in inner.removesuffix(",").split(",")] if inner.strip() else []
    yield tuple(_literal(word) for word in words)
    yield tuple(words)
    yield text


def _literal(word: str) -> object:
    return next(iter(_readings_of_item(word)))


def _readings_of_item(word: str) -> Iterator[object]:
    if word.lower() in ("true", "false"):
        yield word.lower() == "true"
    if word.lower() == "none":
        yield None
    try:
        yield ast.literal_eval(word)
    except (ValueError, SyntaxError):
        yield word


def _tuples(value: object) -> object:
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


def _describe(annotation: object) -> tuple[str, str]:
    """(what is wanted in words, an example)."""
    words, examples = [], []
    for member in _members(annotation):
        origin, arguments = typing.get_origin(member), typing.get_args(member)
        if origin is typing.Literal:
            words.append("one of " + ", ".join(map(show, arguments)))
            examples.append(show(arguments[0]))
        elif origin is tuple and arguments and arguments[-1] is Ellipsis:
            of, example = _describe(arguments[0])
            words.append(f"a list, each item {of}")
            examples.append(f"{example},{example}" if arguments[0] in (int, float, str) else "[]")
        elif origin is tuple:
            parts = [_describe(argument) for argument in arguments]
            words.append(f"{len(parts)} items ({', '.join(of for of, _ in parts)})")
            examples.append(",".join(example for _, example in parts))
        elif _is_config_type(member):
            file = hasattr(member, "load")
            words.append(f"the type name {member.__name__}" + " or a .json file of one" * file)
            examples.append("FILE.json" if file else member.__name__)
        else:
            of, example = _EXAMPLES.get(member, (str(getattr(member, "__name__", member)), "..."))
            words.append(of)
            examples.append(example)
    return " or ".join(words), examples[0]


def _show_item(item: object) -> str:
    if isinstance(item, str):
        return f'"{item}"'
    return "[" + ",".join(map(_show_item, item)) + "]" if isinstance(item, tuple) else show(item)


def _nearest(path: str, paths: list[str]) -> str:
    """Nearest full paths: by spelling, and those that end in the same field."""
    last = path.rpartition(".")[2]
    close = [p for p in paths if p.rpartition(".")[2] == last]
    close += [p for p in difflib.get_close_matches(path, paths, n=_SHOWN, cutoff=0.6) if p not in close]
    return f" Nearest: {', '.join(close[:_SHOWN])}." if close else ""
