"""Prints the tests that a change can reach, as arguments for pytest.

    python -m tests.affected              # of what is not committed
    python -m tests.affected main         # of all since a commit
    python -m pytest -n 2 $(python -m tests.affected)

A change is a set of names: the functions, classes and constants at the top of a file whose code differs. A test file is
reached if it uses one of them, or what uses them in turn. `__init__` files are looked through: who takes `Adam` from
`scalejax.optim` uses `scalejax.optim.optimizers.Adam` and nothing beside it. Annotations, and unions of types such as
`Optimizer = Sgd | Adam`, are not uses.

What is loaded by its name (a command, a recipe, a benchmark, a Pallas backend; a class for `--set`) is reached by the
tests that have this name in their text. What neither shows is stated in `STATED` and `READ`.

A change that reaches most of the tests is one of a hub. It says so on standard error, and prints the quick tier and the
tests of the hub's own folder.
"""

import argparse
import ast
import dataclasses
import fnmatch
import functools
import gc
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent

HUB = 0.4
"""Share of the seconds of the default tier, or of its files, from which on a change is one of a hub."""

EVERYTHING = ("pyproject.toml", "tests/conftest.py", "tests/tiers.py")

BY_NAME = (
    "scalejax.cli.commands.*", "scalejax.configs.*.*", "scalejax.bench.cases.*", "scalejax.bench.peers.*",
    "scalejax.kernels.*.pallas_*",
)  # fmt: skip
"""Modules that are loaded by their names."""

STATED: dict[str, tuple[str, ...]] = {
    # Tests -> modules of which they use everything: commands run in processes of their own.
    "tests/cli/*": ("scalejax.cli.app", "scalejax.__main__", "scalejax.configs.discovery"),
    "tests/configs/test_discovery.py": ("scalejax.configs.*",),
    "tests/configs/test_recipes.py": ("scalejax.configs.*",),
    "tests/multiprocess/*": ("scalejax.train.loop", "scalejax.configs.discovery"),
    "tests/test_bad_input.py": ("scalejax.train.loop", "scalejax.cli.app"),
}

READ: dict[str, tuple[str, ...]] = {
    # Files -> tests that read them.
    "docs/*": ("tests/test_documents.py", "tests/configs/*"),
    "README.md": ("tests/test_documents.py",),
    "CHANGELOG.md": ("tests/test_documents.py",),
    "scalejax/*.py": ("tests/test_package.py", "tests/test_vocabulary.py", "tests/test_faults.py"),
    "scalejax/data/bundled/*": ("tests/data/*", "tests/train/*", "tests/cli/*", "tests/models/*"),
    "tests/faults.toml": ("tests/test_faults.py",),
    "tests/full_tier.tsv": ("tests/test_tiers.py",),
    "tests/durations.json": ("tests/test_tiers.py",),
    "tests/over_a_second.toml": ("tests/test_tiers.py",),
}

Node = tuple[str, str]
"""A module and a name at its top. "" = its statements that define nothing, on which all its names depend; "*" = all."""


class Unknown(Exception):
    """The change cannot be found out."""


@dataclasses.dataclass(frozen=True)
class Code:
    """What a file defines and uses.

    Attributes:
      imports: Local name -> dotted name of what it stands for.
      uses: Name at its top -> dotted names that its definition uses.
      dumps: Name at its top -> its code without comments, to compare.
      arguments: Names of arguments of its functions: fixtures, in a test.
      strings: Its texts, docstrings left out.
    """

    imports: Mapping[str, str]
    uses: Mapping[str, frozenset[str]]
    dumps: Mapping[str, str]
    arguments: frozenset[str]
    strings: str


def read(module: str, source: str, is_package: bool = False) -> Code:
    """Reads a file; one that does not parse, in the middle of a change, defines nothing."""
    gc.disable()  # the trees are millions of objects without cycles
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return Code({}, {}, {}, frozenset(), "")
    imports = dict(_imported(tree, module if is_package else module.rpartition(".")[0]))
    defined: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _defined(statement):
            defined.setdefault(name, []).append(statement)
    if is_package:  # names that load on first use
        homes = next((s.value for s in defined.get("_HOMES", ()) if isinstance(s, ast.Assign)), None)
        if isinstance(homes, ast.Dict):
            imports |= {k: f"{module}.{home}.{k}" for k, home in ast.literal_eval(homes).items()}
    names = imports | {name: f"{module}.{name}" for name in defined if name}
    visitors = {name: _Uses(names, statements) for name, statements in defined.items()}
    return Code(
        imports=imports,
        uses={name: frozenset(visitor.found) for name, visitor in visitors.items()},
        dumps={name: "\n".join(map(ast.dump, statements)) for name, statements in defined.items()},
        arguments=frozenset().union(*(visitor.arguments for visitor in visitors.values())),
        strings="\n".join(text for visitor in visitors.values() for text in visitor.strings),
    )


def _imported(tree: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield alias.asname or alias.name, f"{base}.{alias.name}"


def _defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [statement.name]
        case ast.Assign():
            return [n.id for t in statement.targets for n in ast.walk(t) if isinstance(n, ast.Name)] or [""]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return []
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return []
        case _:
            return [""]


class _Uses(ast.NodeVisitor):
    """Dotted names that statements use, annotations and unions of types left out."""

    def __init__(self, names: Mapping[str, str], statements: Iterable[ast.stmt]) -> None:
        self.names, self.found, self.arguments, self.strings = names, set[str](), set[str](), list[str]()
        for statement in statements:
            if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp)):
                self.visit(statement)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name):
            if inner.id in self.names:
                self.found.add(".".join([self.names[inner.id], *reversed(parts)]))
        else:
            self.visit(inner)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.names:
            self.found.add(self.names[node.id])

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}  # inside a function: perhaps for its effect

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.append(node.value)
            self.found |= set(re.findall(r"\bscalejax(?:\.\w+)+", node.value))

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self.arguments.add(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    visit_AsyncFunctionDef = visit_FunctionDef


def module_of(file: str) -> str:
    """scalejax/nn/layers.py -> scalejax.nn.layers; helpers of tests and benchmarks are imported by their stems."""
    if not file.startswith("scalejax/"):
        stem = pathlib.PurePath(file).stem
        return file if stem.startswith("test_") or stem == "conftest" else stem
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


class Project:
    """All files that are or are read by tests, and who uses what."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = {module_of(file): file for file in files}
        self.codes = {
            module: read(module, (ROOT / file).read_text(), file.endswith("__init__.py"))
            for module, file in self.files.items()
        }
        self.users: dict[Node, set[Node]] = {}
        for module, code in self.codes.items():
            for name, uses in code.uses.items():
                for dotted in uses:
                    self._edge((module, name), self.resolve(dotted))
                self._edge((module, name), (module, ""))
                self._edge((module, "*"), (module, name))
            file = self.files[module]
            if file.endswith("__init__.py") and file.count("/") > 1:  # who takes a package takes what is in it
                for dotted in code.imports.values():
                    self._edge((module, "*"), self.resolve(dotted))
            if file.endswith("/api.py"):  # of a kernel, which loads its backends
                package = module.removesuffix(".api")
                for other in self.codes:
                    if other.startswith(f"{package}.") and "pallas" not in other and other != module:
                        self._edge((module, ""), (other, "*"))
            if file.startswith("tests/"):
                self._what_a_test_loads(module)

    def _edge(self, user: Node, used: Node | None) -> None:
        if used and used != user and not (user[0] == "scalejax.cli.app" and used[0].startswith("scalejax.cli.c")):
            self.users.setdefault(used, set()).add(user)

    def _what_a_test_loads(self, module: str) -> None:
        """Fixtures of the folders above, files that are named, what is stated."""
        file, code = self.files[module], self.codes[module]
        for folder in pathlib.PurePath(file).parents:
            if (conftest := f"{folder}/conftest.py") in self.codes and conftest != module:
                for name, dump in self.codes[conftest].dumps.items():
                    if name in code.arguments or name == "" or "'autouse'" in dump:
                        self._edge((module, ""), (conftest, name))
        for stem in set(re.findall(r"(\w+)\.py\b", code.strings)) & self.codes.keys() - {module}:
            self._edge((module, ""), (stem, "*"))
        for pattern, stated in STATED.items():
            if fnmatch.fnmatch(file, pattern):
                for name in (name for one in stated for name in fnmatch.filter(self.codes, one)):
                    self._edge((module, ""), (name, "*"))

    def resolve(self, dotted: str) -> Node | None:
        """scalejax.optim.Adam.build -> (scalejax.optim.optimizers, Adam); None = nothing of this project."""
        for _ in range(20):  # re-exports of re-exports
            parts = dotted.split(".")
            end = next((end for end in range(len(parts), 0, -1) if ".".join(parts[:end]) in self.codes), 0)
            if not end:
                return None
            module, rest = ".".join(parts[:end]), parts[end:]
            code = self.codes[module]
            if not rest:
                return module, "*"
            if rest[0] in code.uses or rest[0] not in code.imports:
                return module, rest[0] if rest[0] in code.uses else ""
            dotted = ".".join([code.imports[rest[0]], *rest[1:]])
        return None

    def reached(self, seeds: Iterable[Node]) -> set[Node]:
        """The seeds and all that uses them, at first or at further hand."""
        found, todo = set(seeds), list(seeds)
        while todo:
            new = self.users.get(todo.pop(), set()) - found
            found |= new
            todo += new
        return found


@functools.cache
def project() -> Project:
    """This checkout as it is."""
    return Project(
        str(path.relative_to(ROOT))
        for folder in ("scalejax", "tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "bundled" not in path.parts
    )


def changed_names(module: str, before: str | None, after: str | None, is_package: bool) -> set[str]:
    """Names at the top of a file whose code or import differs; "" where its other statements do."""
    old, new = (read(module, text or "", is_package) for text in (before, after))
    differ = {n for n in old.dumps.keys() | new.dumps.keys() if old.dumps.get(n) != new.dumps.get(n)}
    return differ | {n for n in old.imports.keys() | new.imports.keys() if old.imports.get(n) != new.imports.get(n)}


def tests_of(changes: Mapping[str, tuple[str | None, str | None]]) -> list[str]:
    """Arguments for pytest: the tests that a change of these files can reach.

    Args:
      changes: Path from the root -> its text before and after; None = there is none, or it is no text.
    """
    if set(changes) & set(EVERYTHING):
        return ["tests"]
    whole = project()
    tests = {module: file for module, file in whole.files.items() if pathlib.Path(file).name.startswith("test_")}
    found = {file for file in tests.values() if file in changes}
    for file in changes:
        patterns = [pattern for read_, of in READ.items() if fnmatch.fnmatch(file, read_) for pattern in of]
        found |= {test for test in tests.values() if any(fnmatch.fnmatch(test, pattern) for pattern in patterns)}
        if file.startswith((".ci/", "notebooks/")):
            found |= {tests[m] for m in tests if pathlib.Path(file).name in whole.codes[m].strings}
    seeds: set[Node] = set()
    named: set[str] = set()
    for file, (before, after) in changes.items():
        module = module_of(file)
        if not file.endswith(".py") or (file.startswith("tests/") and module in tests):
            continue
        code = whole.codes.get(module)
        for name in changed_names(module, before, after, file.endswith("__init__.py")):
            if code and name in code.imports and file.endswith("__init__.py"):
                seeds |= {user for user in [whole.resolve(f"{module}.{name}")] if user}
            else:
                seeds.add((module, name))
    reached = whole.reached(seeds)
    while names := _names(whole, seeds, reached) - named:
        named |= names
        word = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, sorted(names)))})(?![\w(])")
        mention = {
            (m, "") for m in whole.codes if whole.files[m].startswith("tests/") and word.search(whole.codes[m].strings)
        }
        reached |= whole.reached(mention - reached)
    found |= {tests[module] for module, _ in reached if module in tests}
    if not _is_hub(found, tests.values()):
        return sorted(found)
    return _of_hub(changes, found)


def _names(whole: Project, seeds: set[Node], reached: set[Node]) -> set[str]:
    """By which texts name what is reached: modules that are loaded by name, classes beside what changed."""
    homes = {module for module, _ in seeds}
    stems = {m.rpartition(".")[2] for m, _ in reached if any(fnmatch.fnmatch(m, pattern) for pattern in BY_NAME)}
    classes = {
        n for m, n in reached if m in homes and m.startswith("scalejax.") and n[:1].isupper() and not n.isupper()
    }
    return {stem for stem in stems if not stem.startswith("_")} | classes


def _is_hub(found: set[str], tests: Iterable[str]) -> bool:
    from tests.tiers import default_seconds

    seconds = default_seconds()
    share = sum(seconds.get(file, 0.0) for file in found) / max(1e-9, sum(seconds.values()))
    return max(share, len(found) / max(1, len(list(tests)))) > HUB


def _of_hub(changes: Mapping[str, object], found: set[str]) -> list[str]:
    """The quick tier, and a hub's own tests: those of its folder, and those that faults.toml names for its files."""
    from tests.faults import read_faults
    from tests.tiers import QUICK

    folders = {
        "tests" / pathlib.PurePath(file).parent.relative_to("scalejax") for file in changes if "scalejax/" in file
    }
    own = {fault.test for fault in read_faults().values() if fault.file in changes}
    own |= {file for file in found if file in changes or pathlib.PurePath(file).parent in folders}
    print(
        f"tests.affected: the change reaches {len(found)} files of tests: it is one of a hub. Named are the quick tier "
        "and its own tests; before it lands, run the default tier: python -m pytest -n 2",
        file=sys.stderr,
    )
    return sorted(own) + [name for name in QUICK if name.partition("::")[0] not in own]


def git(*arguments: str) -> str:
    """What git prints.

    Raises:
      Unknown: it fails.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Unknown(done.stderr.strip())
    return done.stdout


def changed(base: str) -> dict[str, tuple[str | None, str | None]]:
    """Path -> text before and after, of files that differ from a commit, new ones among them.

    Raises:
      Unknown: this is no checkout of git, or it has no such commit.
    """
    try:
        git("rev-parse", "--git-dir")
    except (Unknown, OSError) as error:
        raise Unknown(f"{ROOT} is no checkout of git: {error}. Run the default tier: python -m pytest -n 2.") from error
    try:
        differ = git("diff", "--name-only", "--no-renames", base, "--").splitlines()
    except Unknown as error:
        raise Unknown(f"BASE {base!r} is no commit here ({error}). Name a branch, a tag or a commit.") from error
    found: dict[str, tuple[str | None, str | None]] = {}
    for file in sorted({*differ, *git("ls-files", "--others", "--exclude-standard").splitlines()}):
        path = ROOT / file
        before = None
        if file.endswith(".py") and file in differ and git("ls-tree", "--name-only", base, "--", file):
            before = git("show", f"{base}:{file}")
        found[file] = before, path.read_text() if file.endswith(".py") and path.is_file() else None
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 if the change cannot be found out."""
    parser = argparse.ArgumentParser(prog="python -m tests.affected", description="Prints the tests of a change.")
    parser.add_argument("base", nargs="?", default="HEAD", help="a commit; what is not committed counts, too")
    try:
        print("\n".join(tests_of(changed(parser.parse_args(arguments).base))))
    except Unknown as error:
        print(f"tests.affected: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
