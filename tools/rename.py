"""Renames classes, functions, arguments and words, where they are defined and wherever they are used.

    python tools/rename.py tools/words.toml

The file has three tables. `definitions` ("module:Name" = "New") follows imports, so that two classes of one name are
told apart; a package that imports a name hands it on. `identifiers` are tables by glob of files ("*" = all) of old =
new: renamed wherever they stand in code, as variables, attributes, arguments and in single backticks. `phrases`
(text = text) are replaced in comments, docstrings, messages and documents alike, in order. It edits the checkout that
it is started in.
"""

import ast
import fnmatch
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping

TEXTS = {".py", ".md", ".toml", ".sh", ".ipynb"}
UNTOUCHED = ("CHANGELOG.md", "tests/configs/earlier/", "tools/", "docs/vocabulary.md")

Definitions = Mapping[tuple[str, str], str]
Edit = tuple[int, int, str, str]
"""Line, column in bytes, old text, new text."""


def module_of(path: pathlib.Path) -> str:
    """scalejax/a/__init__.py -> scalejax.a"""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def handed_on(paths: list[pathlib.Path], definitions: Definitions) -> dict[tuple[str, str], str]:
    """The definitions, and the same names in packages that import them to hand them on."""
    found = dict(definitions)
    for path in paths:
        if path.name != "__init__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    if new := definitions.get((node.module, alias.name)):
                        found[module_of(path), alias.name] = new
    return found


def edits(source: str, module: str, definitions: Definitions) -> Iterator[Edit]:
    """What of the definitions a file uses."""
    tree = ast.parse(source)
    names = {name: new for (home, name), new in definitions.items() if home == module}
    modules: dict[str, str] = {}
    homes = {home for home, _ in definitions}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                new = definitions.get((node.module, alias.name))
                if new:
                    yield alias.lineno, alias.col_offset, alias.name, new
                    if alias.asname == alias.name:
                        yield alias.lineno, alias.end_col_offset - len(alias.name), alias.name, new  # pyright: ignore
                    if alias.asname in (None, alias.name):
                        names[alias.name] = new
                if f"{node.module}.{alias.name}" in homes:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in names:
            yield node.lineno, node.col_offset, node.id, names[node.id]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names and node.col_offset == 0:
            column = len("class " if isinstance(node, ast.ClassDef) else "def ")
            yield node.lineno, column, node.name, names[node.name]
        elif isinstance(node, ast.Attribute):
            new = definitions.get((modules.get(ast.unparse(node.value), ""), node.attr))
            if new:
                yield node.end_lineno, node.end_col_offset - len(node.attr), node.attr, new  # pyright: ignore
    for node in ast.walk(tree):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None), _cast(node)):
            for text in ast.walk(part) if part is not None else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.lineno == text.end_lineno:
                    yield from _in_text(source, text, names, modules, definitions)
    for node in ast.walk(tree):  # names that a package loads lazily, by their text
        lazy = node.keys if isinstance(node, ast.Dict) and module.count(".") == 1 else []
        for key in [*lazy, *_listed(node)]:
            if isinstance(key, ast.Constant) and key.value in names:
                yield key.lineno, key.col_offset + 1, str(key.value), names[key.value]


def _listed(node: ast.AST) -> list[ast.expr]:
    listed = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return node.value.elts if listed and isinstance(node.value, ast.List | ast.Tuple) else []


def _cast(node: ast.AST) -> ast.AST | None:
    cast = isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "typing.cast")
    return node.args[0] if cast else None


def _in_text(
    source: str, text: ast.Constant, names: Mapping[str, str], modules: Mapping[str, str], definitions: Definitions
) -> Iterator[Edit]:
    line = source.splitlines()[text.lineno - 1]
    for match in re.finditer(r"[A-Za-z_][\w.]*", line[text.col_offset : text.end_col_offset]):
        head, _, name = match[0].rpartition(".")
        new = definitions.get((modules.get(head, ""), name)) if head else names.get(name)
        if new:
            yield text.lineno, text.col_offset + match.end() - len(name), name, new


def apply(source: str, changes: Iterator[Edit]) -> str:
    """The source with the edits made; each must meet what it expects."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for row, column, old, new in sorted(set(changes), reverse=True):
        line = lines[row - 1]
        assert line[column:].startswith(old.encode()), (row, column, old, line)
        lines[row - 1] = line[:column] + new.encode() + line[column + len(old) :]
    return b"".join(lines).decode()


def in_backticks(text: str, pairs: Mapping[str, str]) -> str:
    """Code in single backticks with identifiers renamed."""
    if not pairs:
        return text
    words = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, pairs)) + r")(?!\w)")
    return re.sub(r"`[^`\n]+`", lambda match: words.sub(lambda word: pairs[word[0]], match[0]), text)


def everywhere(source: str, pairs: Mapping[str, str]) -> str:
    """Renames identifiers by tokens."""
    changes = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in pairs:
            changes.append((*token.start, token.string, pairs[token.string]))
        elif token.type == tokenize.STRING and token.start[0] == token.end[0]:
            changes.append((*token.start, token.string, _in_string(token.string, pairs)))
    lines = source.splitlines(keepends=True)
    for row, column, old, new in reversed(changes):
        lines[row - 1] = lines[row - 1][:column] + new + lines[row - 1][column + len(old) :]
    return "".join(lines)


def _in_string(text: str, pairs: Mapping[str, str]) -> str:
    """A string that is nothing but a name, and the expressions of a formatted one."""
    words = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, pairs)) + r")(?!\w)") if pairs else re.compile(r"(?!)")

    def new(match: re.Match[str]) -> str:
        return words.sub(lambda word: pairs[word[0]], match[0])

    if re.fullmatch(r"[A-Za-z]*[\"']\w+[\"']", text):
        return words.sub(lambda word: pairs[word[0]], text)
    return re.sub(r"\{[^{}]*\}", new, text) if text[:1] in "fF" else text


def main(plan: str) -> None:
    """Renames."""
    given = tomllib.loads(pathlib.Path(plan).read_text())
    definitions = {tuple(name.split(":")): new for name, new in given.get("definitions", {}).items()}
    identifiers, phrases = given.get("identifiers", {}), given.get("phrases", {})
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [pathlib.Path(name) for name in listed if not name.startswith(UNTOUCHED)]
    paths = [path for path in paths if path.suffix in TEXTS and path.is_file() and not path.is_symlink()]
    package = [path for path in paths if path.parts[0] == "scalejax" and path.suffix == ".py"]
    known = handed_on(package, definitions)  # pyright: ignore[reportArgumentType]
    known = handed_on(package, known)
    for path in paths:
        before = text = path.read_text()
        named = [pairs for files, pairs in identifiers.items() if fnmatch.fnmatch(str(path), files)]
        renamed = {old: new for pairs in named for old, new in pairs.items()}
        if path.suffix == ".py":
            text = apply(text, edits(text, module_of(path), known))
            text = everywhere(text, renamed)
        dotted = {f"{home}.{name}": f"{home}.{new}" for (home, name), new in known.items()}
        dotted |= {
            key.rsplit(".", 2)[-2] + "." + key.rsplit(".", 1)[1]: value.rsplit(".", 2)[-2]
            + "."
            + value.rsplit(".", 1)[1]
            for key, value in dotted.items()
        }
        for old, new in dotted.items():
            text = re.sub(rf"(?<![\w.]){re.escape(old)}(?!\w)", new, text) if "scalejax." in old else text
        own = {name: new for (home, name), new in definitions.items() if home == module_of(path)}
        text = in_backticks(text, {**{k: v for k, v in dotted.items() if "scalejax." not in k}, **renamed, **own})
        for old, new in phrases.items():
            text = text.replace(old, new)
        if path.suffix == ".ipynb":
            json.loads(text)
        if text != before:
            path.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1])
