"""Towers of the features of the flights and of MovieLens, for `click_forms.py`.

python benchmarks/tower_partitions.py --json benchmarks/results/tower_partitions.json    # beside recbole's wheel

A flat DLRM is trained with the seed of the trials, and `scalejax towers` makes coherent and diverse towers of its rows.
Beside them are the partitions that these are compared with: features in turn ("stride"), and at random. Names are data,
how the towers were made, and how many there are.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np

from scalejax.configs.recsys import dlrm

SEED = 100
"""`tune.TUNING_SEED`, which cannot be imported before this file was run."""
TOWERS = {"flights": (2, 4, 8), "movielens": (2, 4)}


def scalejax(*arguments: str) -> None:
    """Runs the command, whose messages pass through."""
    subprocess.run([sys.executable, "-m", "scalejax", *arguments], check=True)


def partitions(data: str, folder: pathlib.Path) -> dict[str, list[list[str]]]:
    """All of one data set; every run and file goes into `folder`."""
    run = folder / data
    seeds = (f"seed={SEED}", f"data.seed={SEED}")
    scalejax("train", f"dlrm-{data}", "--workdir", str(run), *(x for s in seeds for x in ("--set", s)))
    names = getattr(dlrm, data)().data.schema().keys
    found: dict[str, list[list[str]]] = {}
    for towers in TOWERS[data]:
        for distance in ("coherent", "diverse"):
            file = folder / f"{data}-{distance}-{towers}.json"
            scalejax("towers", str(run), "--towers", str(towers), "--distance", distance, "--save", str(file))
            found[f"{data} {distance} {towers}"] = json.loads(file.read_text())["towers"]
        shuffled = np.random.default_rng(SEED).permutation(names).tolist()
        for how, order in (("stride", names), ("random", shuffled)):
            found[f"{data} {how} {towers}"] = [list(order[t::towers]) for t in range(towers)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=pathlib.Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: t for data in TOWERS for name, t in partitions(data, pathlib.Path(folder)).items()}
    lines = [f"  {json.dumps(name)}: {json.dumps(towers)}" for name, towers in found.items()]
    options.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
