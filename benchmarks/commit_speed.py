"""Times recipes and benchmarks at another commit and in this checkout, in turns, and compares the medians.

    python benchmarks/commit_speed.py --base main --train gcn:steps=100 --bench wukong_step:b8192 llama_step:tiny
    python benchmarks/commit_speed.py --base main --train gcn-smoke --rounds 7

A round runs each side once, each in a process of its own, first one and then the other in alternation. Of a recipe the
median time of its steps is taken, compilation and evaluations left out (`step_p50_s` of summary.json); of a benchmark
the median time of each case (`ours_s`). The ratio is that of the base's median to ours: above 1 this checkout is
faster. The spread is that of the rounds of the base, (largest - smallest) / median.
"""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def train(tree: pathlib.Path, recipe: str, cache: pathlib.Path) -> dict[str, float]:
    """{"RECIPE step": seconds of its median step}; `recipe` is NAME or NAME:path=value:path=value."""
    name, *sets = recipe.split(":")
    changes = [argument for text in sets for argument in ("--set", text)]
    with tempfile.TemporaryDirectory() as folder:
        run(tree, cache, "train", name, "--workdir", f"{folder}/run", *changes)
        summary = json.loads((pathlib.Path(folder) / "run" / "summary.json").read_text())
    return {f"{name} step": summary["step_p50_s"]}


def bench(tree: pathlib.Path, name: str, cache: pathlib.Path) -> dict[str, float]:
    """{"NAME CASE": median seconds of ours}; `name` is NAME or NAME:CASE:CASE."""
    name, *cases = name.split(":")
    chosen = [argument for case in cases for argument in ("--case", case)]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "result.json"
        run(tree, cache, "bench", name, *chosen, "--json", str(file))
        found = json.loads(file.read_text())
    return {f"{name} {case['case']}": case["ours_s"] for case in found}


def run(tree: pathlib.Path, cache: pathlib.Path, *arguments: str) -> None:
    """Runs the command line of a tree."""
    environment = os.environ | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    command = [sys.executable, "-P", "-m", "scalejax", *arguments]
    done = subprocess.run(command, env=environment, cwd=cache.parent, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{tree}: scalejax {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def main() -> None:
    """Measures both sides and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="COMMIT", help="what the checkout is compared with")
    parser.add_argument("--train", nargs="+", default=[], metavar="RECIPE[:path=value...]")
    parser.add_argument("--bench", nargs="+", default=[], metavar="NAME[:CASE...]")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="commit-speed-", ignore_cleanup_errors=True) as folder:
        base, cache = pathlib.Path(folder).resolve() / "base", pathlib.Path(folder).resolve() / "cache"
        cache.mkdir()
        git = ["git", "-C", str(ROOT)]
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(base), options.base], check=True)
        try:
            times: dict[str, dict[str, list[float]]] = {}
            sides = [("base", base), ("here", ROOT)]
            for number in range(options.rounds):
                for measure, names in ((train, options.train), (bench, options.bench)):
                    for name in names:
                        for side, tree in sides if number % 2 else reversed(sides):
                            for case, seconds in measure(tree, name, cache).items():
                                times.setdefault(case, {}).setdefault(side, []).append(seconds)
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", "--force", str(base)], check=False)
    here, there = (
        subprocess.run([*git, "rev-parse", "--short=12", name], capture_output=True, text=True).stdout.strip()
        for name in ("HEAD", options.base)
    )
    print(f"{here} against {there}; {datetime.date.today()}, {os.cpu_count()} CPUs, {options.rounds} rounds\n")
    print("| what | base, ms | here, ms | ratio | spread of the base |", "|---|---|---|---|---|", sep="\n")
    for case, found in times.items():
        was, now = statistics.median(found["base"]), statistics.median(found["here"])
        spread = (max(found["base"]) - min(found["base"])) / was
        print(f"| {case} | {1e3 * was:.2f} | {1e3 * now:.2f} | {was / now:.3f} | {spread:.1%} |")


if __name__ == "__main__":
    main()
