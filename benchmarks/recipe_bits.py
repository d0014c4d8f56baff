"""Trains the smoke form of every recipe at another commit and in this checkout, and compares the two by their bits.

    python benchmarks/recipe_bits.py --base main
    python benchmarks/recipe_bits.py --base main --recipes wukong-smoke gcn-smoke --devices 8 --allow gcn-smoke=1e-6
    python benchmarks/recipe_bits.py --base main --recipes "wukong-smoke model.fm=plain"

Compared are all values of metrics.jsonl, with the loss of every step (log_every=1), and the arrays of the last
checkpoint: parameters, tables, leaves of the optimizer, random keys. Bits in a file would be those of one CPU and one
jaxlib, so both sides are run: each recipe in a process of its own, on virtual CPU devices, with XLA's default flags,
without a cache of compiled programs and with a cache of data for each side. Do not edit the checkout meanwhile.

The exit status is 0 where all that both sides have is equal to the bit (or within --allow), 1 where it is not or where
nothing of a recipe could be compared, 2 for a wrong argument. Names on one side only are listed and not compared; other
steps, or a run that fails on one side, are a difference. Where both sides refuse to run, their reasons are listed.

It cannot show what smoke forms do not do: other options, resuming, several processes, accelerators, long runs, time and
memory. That both sides are equal does not say that either is right.
"""

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent

RENAMED: dict[str, str] = {}
"""Pattern -> replacement of `re.sub`, one after the other on the names of the base. Arrays of a checkpoint are called
"params.layers/0/bias", values of records "window train: loss"."""

_LISTING = "import json, scalejax.configs.discovery as d; print(json.dumps({r.name: r.function for r in d.listing()}))"
_LOSS = re.compile(r"window train: (log)?loss(/.*)?")  # "logloss/click" where a model has several tasks
_LIMIT_S = 1800


def train(recipe: str) -> None:
    """In a process and a folder of its own: leaves run/, or prints an error and exits, with 2 if it is the user's."""
    import scalejax
    from scalejax import configs
    from scalejax.train import loop

    try:
        if not pathlib.Path(scalejax.__file__).is_relative_to(os.environ["PYTHONPATH"]):
            raise ImportError(f"scalejax comes from {scalejax.__file__}, not from {os.environ['PYTHONPATH']}")
        recipe, *sets = recipe.split()
        experiment = dataclasses.replace(configs.load(recipe, sets), log_every=1)
        loop.train(experiment, workdir=pathlib.Path("run"), recipe=recipe)
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0])
        sys.exit(2 if any(kind.__name__ == "UserError" for kind in type(error).__mro__) else 1)


def run(tree: pathlib.Path, recipe: str, devices: int, cache: pathlib.Path) -> dict[str, Any]:
    """Trains a recipe with the package of a tree: {"records", "arrays", "mesh"}, or {"error", "refused"}."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith("JAX_") and name != "XLA_FLAGS"}
    fixed = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "PJRT_NPROC": "64"}
    environment = kept | fixed | {"PYTHONPATH": str(tree), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-P", __file__, "--train", recipe]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {_LIMIT_S} s", "refused": False}
        if done.returncode:
            if done.returncode != 2:
                print(done.stderr[-4000:], file=sys.stderr)
            ended = f"exit status {done.returncode}"  # all there is where XLA ended the process
            return {"error": (done.stdout.strip() or ended).splitlines()[-1], "refused": done.returncode == 2}
        out = pathlib.Path(folder) / "run"
        records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        mesh = json.loads((out / "summary.json").read_text()).get("mesh", "?")
        return {"records": records, "arrays": last_checkpoint(out / "checkpoints"), "mesh": mesh}


def last_checkpoint(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Name -> array, read by orbax alone."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # orbax starts jax
    import orbax.checkpoint as ocp

    newest = folder / str(max(int(path.name) for path in folder.iterdir() if path.name.isdecimal()))
    if (newest / "rows").exists():
        raise ValueError(f"{newest} holds of the tables only rows that were touched, and they would not be compared.")
    with ocp.PyTreeCheckpointer() as reader:
        stored: Any = reader.metadata(newest / "arrays")
        names = list(stored.item_metadata.tree)
        as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        return reader.restore(newest / "arrays", ocp.args.PyTreeRestore(dict.fromkeys(names, 0), restore_args=as_numpy))


def compare(base: dict[str, Any], here: dict[str, Any], allowed: float = 0.0) -> dict[str, Any]:
    """Compares what `run` gave on both sides; `allowed` as in `compare_arrays`.

    Returns:
      "verdict" ("equal", "allowed", "differs", "refused" or "failed"), "notes", and where both sides ran "mesh",
      "steps", "records" and "arrays".
    """
    errors = [f"{side}: {found['error']}" for side, found in (("base", base), ("here", here)) if "error" in found]
    if errors:
        refused = base.get("refused") and here.get("refused")
        return {"verdict": "refused" if refused else "failed", "notes": errors}
    values, notes = series(here["records"]), []
    records = compare_arrays(series(base["records"]), values, allowed)
    arrays = compare_arrays(base["arrays"], here["arrays"], allowed)
    steps = values.get("window train: step", np.zeros(0)).size
    if not any(_LOSS.fullmatch(name) and values[name].size == steps for name in records["common"]):
        notes.append("no loss of every step is on both sides")
    if not arrays["common"]:
        notes.append("no array is on both sides")
    differences = [*records["differing"].values(), *arrays["differing"].values()]
    passed = not notes and all(difference["allowed"] for difference in differences)
    verdict = ("allowed" if differences else "equal") if passed else "differs"
    mesh = " -> ".join(dict.fromkeys([base["mesh"], here["mesh"]]))
    return {"verdict": verdict, "notes": notes, "mesh": mesh, "steps": steps, "records": records, "arrays": arrays}


def series(records: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Values of records in their order: "window train: loss" -> [steps]. Text of floats is exact; null becomes NaN."""
    found: dict[str, list[Any]] = {}
    for record in records:
        for key in record.keys() - {"kind", "split"}:
            value = np.nan if record[key] is None else record[key]
            found.setdefault(f"{record['kind']} {record['split']}: {key}", []).append(value)
    return {name: np.array(values) for name, values in found.items()}


def compare_arrays(base: dict[str, np.ndarray], here: dict[str, np.ndarray], allowed: float = 0.0) -> dict[str, Any]:
    """Compares arrays of one name by their dtype, shape and bits.

    Args:
      base: Of the other commit; `RENAMED` gives their names here.
      here: Of this checkout.
      allowed: How far elements of floats may be apart, over the largest element of their array.

    Returns:
      Names "common", "only_base" and "only_here"; "differing": name -> "what", "largest" and "relative" (None where
      there is no number to say) and whether it is "allowed".
    """
    old = base
    for pattern, replacement in RENAMED.items():
        old = {re.sub(pattern, replacement, name): array for name, array in old.items()}
    if len(old) < len(base):
        raise ValueError("RENAMED gives two names of the base the same name.")
    common = sorted(old.keys() & here.keys())
    found = {name: _difference(old[name], here[name], allowed) for name in common}
    return {
        "common": common,
        "only_base": sorted(old.keys() - here.keys()),
        "only_here": sorted(here.keys() - old.keys()),
        "differing": {name: difference for name, difference in found.items() if difference is not None},
    }


def _difference(a: np.ndarray, b: np.ndarray, allowed: float) -> dict[str, Any] | None:
    kinds = [f"{x.dtype}{list(x.shape)}" for x in (a, b)]
    if kinds[0] == kinds[1] and a.tobytes() == b.tobytes():
        return None
    none = {"largest": None, "relative": None, "allowed": False}
    if kinds[0] != kinds[1] or a.dtype.kind == "U":
        return {"what": " at the base, here ".join(kinds), **none}
    bits = [np.frombuffer(x.tobytes(), np.uint8).reshape(x.size, -1) for x in (a, b)]
    where = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    what = f"{where.size} of {a.size} elements of {a.dtype}, the first at index {where[0]}"
    both = np.array([x.astype(np.float64).ravel() for x in (a, b)])
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(both[0, where] - both[1, where]).max())
    if not np.isfinite(largest):
        return {"what": what, **none}
    peak = float(np.abs(both).max(where=np.isfinite(both), initial=0.0))
    relative = largest / peak if peak else 0.0
    passes = "float" in a.dtype.name and allowed > 0.0 and relative <= allowed
    return {"what": what, "largest": largest, "relative": relative, "allowed": passes}


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of recipes and numbers of devices, and below it what is not equal or on one side only.

    "3 / 4" is names that are equal / names on both sides.
    """
    heads = ("recipe", "devices", "mesh", "steps", "values of records", "arrays", "largest relative", "verdict")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    details = []
    for row in rows:
        said, counts, largest = [f"- {note}" for note in row["notes"]], [], 0.0
        for part in (row[name] for name in ("records", "arrays") if name in row):
            counts.append(f"{len(part['common']) - len(part['differing'])} / {len(part['common'])}")
            for name, found in part["differing"].items():
                relative = float("inf") if found["relative"] is None else found["relative"]
                largest = max(largest, relative)
                size = "" if found["largest"] is None else f": at most {found['largest']:.3g}, relative {relative:.3g}"
                said.append(f"- {name}: {found['what']}{size}{', allowed' if found['allowed'] else ''}")
            for side in ("base", "here"):
                said += [f"- only {side}: {', '.join(part[f'only_{side}'])}"] if part[f"only_{side}"] else []
        cells = [row["mesh"], str(row["steps"]), *counts, f"{largest:.2g}"] if counts else ["-"] * 5
        lines.append(f"| {' | '.join([row['recipe'], str(row['devices']), *cells, row['verdict']])} |")
        details += ["", f"{row['recipe']} on {row['devices']}, {row['verdict']}:", "", *said] if said else []
    return "\n".join([*lines, *details])


def succeeded(rows: list[dict[str, Any]]) -> bool:
    """Whether nothing differs or failed, and something of every recipe that is on both sides was compared."""
    compared = {row["recipe"] for row in rows if row["verdict"] in ("equal", "allowed")}
    wanted = {row["recipe"] for row in rows if row["verdict"] != "one side only"}
    return bool(wanted) and wanted == compared and not any(row["verdict"] in ("differs", "failed") for row in rows)


def measure(base: pathlib.Path, options: argparse.Namespace, parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """Runs both sides of every recipe on every number of devices."""
    trees = {"base": base, "here": ROOT}
    listed = {}
    for side, tree in trees.items():
        environment = os.environ | {"PYTHONPATH": str(tree)}
        listed[side] = json.loads(subprocess.check_output([sys.executable, "-P", "-c", _LISTING], env=environment))
    functions = listed["base"] | listed["here"]
    recipes = options.recipes or [name for name, function in functions.items() if function == "smoke"]
    if unknown := {name.split()[0] for name in (*recipes, *options.allow)} - functions.keys():
        parser.error(f"no recipe of either side: {', '.join(sorted(unknown))}")
    rows = []
    for recipe in dict.fromkeys(recipes):
        if without := [side for side in trees if recipe.split()[0] not in listed[side]]:
            rows.append({"recipe": recipe, "devices": "-", "verdict": "one side only", "notes": [f"not {without[0]}"]})
            continue
        for devices in options.devices:
            begin = time.perf_counter()
            found = [run(tree, recipe, devices, base.with_name(f"data of {side}")) for side, tree in trees.items()]
            rows.append({"recipe": recipe, "devices": devices, **compare(*found, options.allow.get(recipe, 0.0))})
            took = f"{time.perf_counter() - begin:.0f} s"
            print(f"{recipe} on {devices}: {rows[-1]['verdict']}, {took}", file=sys.stderr, flush=True)
    return rows


def git(*arguments: str) -> str:
    """What git says of this checkout; empty where it fails."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Runs both sides and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, metavar="COMMIT", help="what the checkout is compared with")
    parser.add_argument(
        "--recipes", nargs="+", metavar='"NAME [PATH=VALUE ...]"', help="default: every one whose function is `smoke`"
    )
    parser.add_argument("--devices", nargs="+", type=int, choices=range(1, 17), default=[1, 8], metavar="N")
    parser.add_argument("--allow", nargs="+", default=[], metavar="NAME=RELATIVE", help="e.g. gcn-smoke=1e-6")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write everything here as well")
    options = parser.parse_args()
    try:
        options.allow = {name: float(size) for name, size in (text.split("=") for text in options.allow)}
    except ValueError:
        parser.error(f"--allow must look like gcn-smoke=1e-6; got {' '.join(options.allow)}")
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{options.base}^{{commit}}")
    if not commit:
        parser.error(f"--base: {options.base!r} is no commit of {ROOT}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the base is removed then, too
    with tempfile.TemporaryDirectory(prefix="recipe-bits-", ignore_cleanup_errors=True) as folder:
        base = pathlib.Path(folder).resolve() / "base"
        try:
            add = ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(base), commit]
            subprocess.run(add, check=True)
            rows = measure(base, options, parser)
        finally:  # forced twice, since an `add` that was interrupted leaves it locked
            git("worktree", "remove", "--force", "--force", str(base))
    here = git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in ("jax", "jaxlib", "numpy"))
    title = f"{here} against {commit[:12]}; {datetime.date.today()}, {os.cpu_count()} CPUs, {versions}"
    print(title, "", markdown(rows), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")
    return 0 if succeeded(rows) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2])
    else:
        sys.exit(main())
