"""Moves modules of the package and their tests, and rewrites every mention of them.

    python tools/move_modules.py tools/rooms.toml

The file has three tables: `packages` (new package -> first line of its docstring), `modules` (old dotted name -> new)
and `files` (old path -> new; for what is no module of the package). A module's test moves along: tests/a/test_b.py
mirrors scalejax/a/b.py. Rewritten are imports, dotted names in strings, comments and documents, and paths. It edits the
checkout that it is started in, which must have no uncommitted changes; `ruff check --fix` and `ruff format` come after.
"""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Mapping

TEXTS = {".py", ".md", ".toml", ".sh", ".ipynb", ".json", ".tsv", ""}
UNTOUCHED = ("CHANGELOG.md", "tests/full_tier.tsv", "tests/configs/earlier/", "tools/rooms")
"""They speak of what was then."""

_DONE = "scalejax."
_LINE_STARTS = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT)


def git(*arguments: str) -> list[str]:
    """Lines of what git prints."""
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.splitlines()


def path_of(module: str) -> str:
    """scalejax.a.b -> scalejax/a/b.py, or the folder of a package."""
    path = module.replace(".", "/")
    return path if pathlib.Path(path).is_dir() else f"{path}.py"


def test_of(module: str) -> str:
    """scalejax.a.b -> tests/a/test_b.py"""
    folder, _, stem = module.removeprefix("scalejax.").replace(".", "/").rpartition("/")
    return f"tests/{folder}/test_{stem}.py"


def moved(name: str, modules: Mapping[str, str]) -> str:
    """A dotted name, of a module or of something in one, as it is called now."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if new := modules.get(".".join(parts[:end])):
            return ".".join([new, *parts[end:]])
    return name


def imports(source: str, modules: Mapping[str, str]) -> str:
    """Rewrites `from PACKAGE import MODULE`, where dotted names do not show the module; its uses follow a new stem."""
    lines = source.splitlines(keepends=True)
    renamed: dict[str, str] = {}
    bound = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    bound |= {node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg | ast.keyword) and node.arg}
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        found = [(alias, modules.get(f"{node.module}.{alias.name}")) for alias in node.names]
        if not any(new for _, new in found):
            continue
        indent, statements = " " * node.col_offset, []
        if stayed := [alias for alias, new in found if not new]:
            names = ", ".join(alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in stayed)
            statements.append(f"{indent}from {node.module} import {names}\n")
        for alias, new in found:
            if not new:
                continue
            package, _, stem = new.rpartition(".")
            name = alias.asname or stem
            if alias.asname is None and stem != alias.name:
                if stem in bound:
                    name = alias.name
                else:
                    renamed[alias.name] = stem
            package = package.replace("scalejax.", _DONE, 1)  # or it would be taken for an old name
            statements.append(f"{indent}from {package} import {stem}" + (f" as {name}" if name != stem else "") + "\n")
        tail = lines[node.end_lineno - 1][node.end_col_offset :]  # pyright: ignore
        statements[-1] = statements[-1].rstrip("\n") + tail
        lines[node.lineno - 1 : node.end_lineno] = statements
    source = "".join(lines)
    return rename(source, renamed) if renamed else source


def rename(source: str, renamed: Mapping[str, str]) -> str:
    """Renames variables, by tokens: not attributes, not keywords of calls."""
    lines = source.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    uses = []
    importing = False
    for before, token, after in zip(tokens, tokens[1:], tokens[2:], strict=False):
        if token.string in ("import", "from") and before.type in _LINE_STARTS:
            importing = True
        if token.type == tokenize.NEWLINE:
            importing = False
        keyword = after.string == "=" and before.string in ("(", ",")
        if token.string in renamed and token.type == tokenize.NAME and before.string != "." and not keyword:
            uses += [] if importing else [token]
    for token in reversed(uses):
        row, column = token.start
        line = lines[row - 1]
        lines[row - 1] = line[:column] + renamed[token.string] + line[column + len(token.string) :]
    return "".join(lines)


def rewrite(text: str, suffix: str, modules: Mapping[str, str], files: Mapping[str, str]) -> str:
    """A file with the new names of what moves."""
    if suffix == ".py":
        text = imports(text, modules)
    text = re.sub(
        r"(?<![\w./])scalejax(?:\.[A-Za-z_]\w*)+",
        lambda match: moved(match[0], modules),
        text,
    )
    text = re.sub(
        r"`(?!scalejax)([a-z_]+(?:\.[A-Za-z_]\w*)+)",
        lambda match: "`" + moved(f"scalejax.{match[1]}", modules).removeprefix("scalejax."),
        text,
    )
    text = text.replace(_DONE, "scalejax.")
    return re.sub(
        r"(?<![\w.])((?:\.\./)*)((?:[A-Za-z_]\w*/)+[A-Za-z_]\w*(?:\.py)?)",
        lambda match: match[1] + files.get(match[2], match[2]),
        text,
    )


def main(plan: str) -> None:
    """Moves and rewrites."""
    given = tomllib.loads(pathlib.Path(plan).read_text())
    modules, packages = given["modules"], given.get("packages", {})
    files = {path_of(old): path_of(old).replace(*_ends(old, new)) for old, new in modules.items()}
    tests = {test_of(old): test_of(new) for old, new in modules.items() if pathlib.Path(test_of(old)).is_file()}
    files = {**files, **tests, **given.get("files", {})}
    texts = [name for name in git("ls-files") if pathlib.Path(name).suffix in TEXTS and not name.startswith(UNTOUCHED)]
    for name in texts:
        path = pathlib.Path(name)
        if path.is_symlink() or name == plan:
            continue
        before = path.read_text()
        after = rewrite(before, path.suffix, modules, files)
        if after != before:
            path.write_text(after)
    for old, new in files.items():
        pathlib.Path(new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
    for package, line in packages.items():
        init = pathlib.Path(package.replace(".", "/")) / "__init__.py"
        init.parent.mkdir(parents=True, exist_ok=True)
        if not init.exists():
            init.write_text(f'"""{line}"""\n')


def _ends(old: str, new: str) -> tuple[str, str]:
    return old.replace(".", "/"), new.replace(".", "/")


if __name__ == "__main__":
    main(sys.argv[1])
