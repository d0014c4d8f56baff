"""Prints the files of tests that a change can reach.

    python -m tests.affected              # of what is not committed
    python -m tests.affected main         # of all since a commit
    python -m pytest -n 2 $(python -m tests.affected)

A test reaches what it imports, inside of functions too, and all that this imports in turn. What imports do not show is
stated in `STATED` and `named_in`. A change that reaches most of the tests prints "tests": run the default tier.
"""

import argparse
import ast
import fnmatch
import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent

HUB = 0.6
"""Share of the files of tests from which on the whole default tier is the answer."""

EVERYTHING = ("pyproject.toml", "tests/conftest.py", "tests/tiers.py")

STATED: dict[str, tuple[str, ...]] = {
    # Tests -> modules that they reach without an import: commands run in processes of their own, recipes found by name.
    "tests/cli/*": ("scalejax.cli.*", "scalejax.configs.*", "scalejax.__main__"),
    "tests/configs/test_discovery.py": ("scalejax.configs.*",),
    "tests/configs/test_recipes.py": ("scalejax.configs.*",),
    "tests/multiprocess/*": ("scalejax.train.loop", "scalejax.configs.*"),
    "tests/test_package.py": ("scalejax.*",),
    "tests/test_bad_input.py": ("scalejax.*",),
    "tests/test_faults.py": ("scalejax.*",),
}

READ: dict[str, tuple[str, ...]] = {
    # Files that are no modules -> tests that read them.
    "docs/*": ("tests/test_documents.py", "tests/configs/*"),
    "README.md": ("tests/test_documents.py",),
    "CHANGELOG.md": ("tests/test_documents.py",),
    "scalejax/data/bundled/*": ("tests/data/*", "tests/train/*", "tests/cli/*", "tests/models/*"),
    "tests/outside/*": ("tests/train/*",),
    "tests/faults.toml": ("tests/test_faults.py",),
    "tests/full_tier.tsv": ("tests/test_tiers.py",),
    "tests/durations.json": ("tests/test_tiers.py",),
}


class Unknown(Exception):
    """The change cannot be found out."""


def git(*arguments: str) -> list[str]:
    """Lines of what git prints.

    Raises:
      Unknown: it fails.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise Unknown(done.stderr.strip())
    return done.stdout.splitlines()


def changed(base: str) -> list[str]:
    """Files that differ from a commit, new ones among them.

    Raises:
      Unknown: this is no checkout of git, or it has no such commit.
    """
    try:
        git("rev-parse", "--git-dir")
    except (Unknown, OSError) as error:
        raise Unknown(f"{ROOT} is no checkout of git: {error}. Run the default tier: python -m pytest -n 2.") from error
    try:
        return sorted({*git("diff", "--name-only", base, "--"), *git("ls-files", "--others", "--exclude-standard")})
    except Unknown as error:
        raise Unknown(f"BASE {base!r} is no commit here ({error}). Name a branch, a tag or a commit.") from error


@functools.cache
def modules() -> dict[str, frozenset[str]]:
    """Module of the package -> all modules that import it, at first or at further hand, and itself."""
    import grimp

    graph = grimp.build_graph("scalejax", cache_dir=None, exclude_type_checking_imports=True)
    for package in graph.find_children("scalejax.kernels"):
        if (api := f"{package}.api") in graph.modules:  # which loads its backends by their names
            for backend in graph.find_children(package) - {api}:
                graph.add_import(importer=api, imported=backend)
    return {name: frozenset({name, *graph.find_downstream_modules(name)}) for name in graph.modules}


def module_of(file: str) -> str:
    """scalejax/nn/layers.py -> scalejax.nn.layers"""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@functools.cache
def imported(file: pathlib.Path) -> frozenset[str]:
    """What a file imports by name: modules, names in them, which may be modules, and the packages that they are in."""
    found = set()
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError:  # in the middle of a change, which it is a part of
        return frozenset()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in found]
    return frozenset(".".join(name[: end + 1]) for name in parts for end in range(len(name)))


def tests_of(files: Iterable[str]) -> list[str]:
    """The files of tests that a change of these files can reach; ["tests"] if they are most of all.

    Args:
      files: Paths from the root; they may be gone.
    """
    files, all_tests = set(files), sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests").rglob("test_*.py"))
    if files & set(EVERYTHING):
        return ["tests"]
    reached = {name for file in files if file.startswith("scalejax/") for name in modules().get(module_of(file), ())}
    # Helpers of tests, and their helpers in turn.
    helpers = {p.stem: p for p in (ROOT / "tests").rglob("*.py") if not p.name.startswith("test_")}
    stems = {pathlib.Path(file).stem for file in files if file.startswith("tests/")} & helpers.keys()
    while new := {stem for stem, path in helpers.items() if imported(path) & (reached | stems)} - stems:
        stems |= new
    found = {test for test in all_tests if test in files}
    folders = {str(pathlib.Path(file).parent) for file in files if pathlib.Path(file).name == "conftest.py"}
    named = [named_in(file) for file in files]
    for test in all_tests:
        path, text = ROOT / test, (ROOT / test).read_text()
        stated = {name for pattern, names in STATED.items() if fnmatch.fnmatch(test, pattern) for name in names}
        if (
            imported(path) & (reached | stems)
            or any(fnmatch.filter(reached, pattern) for pattern in stated)
            or any(test.startswith(f"{folder}/") for folder in folders)
            or any(word and word in text for word in named)
        ):
            found.add(test)
    for file in files:
        patterns = [pattern for read, tests in READ.items() if fnmatch.fnmatch(file, read) for pattern in tests]
        found |= {test for test in all_tests if any(fnmatch.fnmatch(test, pattern) for pattern in patterns)}
    return ["tests"] if len(found) > HUB * len(all_tests) else sorted(found)


def named_in(file: str) -> str:
    """What a test has in its text that loads or runs this file by name; "" = none does."""
    path = pathlib.Path(file)
    if path.parts[0] == "benchmarks" and path.suffix == ".py":
        return path.stem
    worker = path.parts[0] == "tests" and path.suffix == ".py" and not path.name.startswith("test_")
    return path.name if worker or path.parts[0] in (".ci", "notebooks") else ""


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
