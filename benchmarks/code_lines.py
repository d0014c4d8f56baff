"""Counts the lines of the package at several commits, as Markdown for benchmarks/results.

    python benchmarks/code_lines.py 376b5dec1f14 HEAD

A line of code is one that holds a token of Python which is neither comment nor docstring; a line of a docstring lies in
a string that stands alone as an expression. Blank lines are what is left.
"""

import ast
import collections
import io
import subprocess
import sys
import tokenize

from scalejax.bench import machine

PATHS = (
    *("click_run", "dense", "dense_run", "graph", "graph_run", "program", "runs", "snapshot", "protocols", "state"),
    *("experiment", "pipeline", "batches/pipeline", "run", "run_state", "step", "task", "binding", "phases"),
)
TRAINING = {f"scalejax/train/{name}.py" for name in PATHS} | {
    f"scalejax/models/{kind}/task.py" for kind in ("recsys", "graph")
}
"""What stood three times, as program, run and task, and what stands in its place; a commit has some of them."""

KINDS = ("code", "docstrings", "comments", "blank")


def count(source: str) -> dict[str, int]:
    """Lines of a file by kind."""
    docs = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs |= set(range(node.lineno, node.end_lineno + 1))
    code, comments = set(), set()
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in layout:
            code |= set(range(token.start[0], token.end[0] + 1))
    code -= docs
    comments -= code | docs
    total = len(source.splitlines())
    return dict(zip(KINDS, (len(code), len(docs), len(comments), total - len(code | docs | comments)), strict=True))


def at(commit: str) -> dict[str, dict[str, int]]:
    """Lines by first folder of the package, and of all."""
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", commit, "scalejax"], capture_output=True, text=True)
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in listed.stdout.split():
        if path.endswith(".py"):
            source = subprocess.run(["git", "show", f"{commit}:{path}"], capture_output=True, text=True, check=True)
            parts = path.split("/")
            folders = ["all", parts[1] if len(parts) > 2 else "(root)"]
            for folder in [*folders, "program, run, task"] if path in TRAINING else folders:
                found[folder].update({**count(source.stdout), "files": 1})
    return {folder: dict(counts) for folder, counts in found.items()}


def main(commits: list[str]) -> None:
    """Prints the tables."""
    print(
        f"# Lines of the package\n\n`python benchmarks/code_lines.py {' '.join(commits)}`, {machine.today()}; "
        f"read from git on an AMD EPYC; any CPU prints the same.\n"
    )
    counted = {commit: at(commit) for commit in commits}
    print("| commit | files | " + " | ".join(KINDS) + " |\n|---|---|---|---|---|---|")
    for commit, folders in counted.items():
        short = subprocess.run(["git", "log", "-1", "--format=%h %cs", commit], capture_output=True, text=True)
        print(
            f"| {short.stdout.strip()} | {folders['all']['files']} | "
            + " | ".join(f"{folders['all'][kind]:,}" for kind in KINDS)
            + " |"
        )
    print("\nLines of code by folder:\n\n| folder | " + " | ".join(commits) + " |\n|---|" + "---|" * len(commits))
    for folder in sorted(
        {folder for folders in counted.values() for folder in folders} - {"all", "program, run, task"}
    ):
        print(f"| {folder} | " + " | ".join(f"{f.get(folder, {}).get('code', 0):,}" for f in counted.values()) + " |")
    print("\nProgram, run and task (once three times):\n\n| commit | files | code | docstrings |\n|---|---|---|---|")
    for commit, folders in counted.items():
        one = folders["program, run, task"]
        print(f"| {commit} | {one['files']} | {one['code']:,} | {one['docstrings']:,} |")


if __name__ == "__main__":
    main(sys.argv[1:])
