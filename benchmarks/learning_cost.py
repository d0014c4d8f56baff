"""What a step of each way to learn costs beside one of cross-entropy, in turns in one process.

python benchmarks/learning_cost.py > table.md
python benchmarks/learning_cost.py --recipe smc-fashion --rounds 40

Steps are the compiled ones of `scalejax train RECIPE --set model.learning=...`, on batches that lie on the device. A
round runs one step of each; the ratio is that of the medians.
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax

from scalejax import configs
from scalejax.bench import machine
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.batches import convert
from scalejax.train.runs.run import Run
from scalejax.train.self_distillation import CrossEntropy, Dlb, Sam, Smc

LEARNINGS = {"CE": CrossEntropy(), "LSR": CrossEntropy(smoothing=0.1), "SMC-2": Smc(), "DLB": Dlb(), "SAM": Sam()}


class Stepper:
    """The step of a way to learn, again and again on one batch."""

    def __init__(self, recipe: Any, learning: Any) -> None:
        experiment = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, learning=learning))
        run = Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:1]))
        self._step = run.program.train_step
        self._batch = convert.to_device(next(run.program.task.train_batches(run.data, run.mesh, 0)), run.program)
        self._state = run.program.init()
        self()
        self()

    def __call__(self) -> tuple[float, float]:
        """Wall and CPU seconds of a step."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._state, loss = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, loss))
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="resnet-fashion")
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    recipe = configs.load(given.recipe)
    steppers = {name: Stepper(recipe, learning) for name, learning in LEARNINGS.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steppers}
    for _ in range(given.rounds):
        for name, step in steppers.items():
            times[name].append(step())
    print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}, {given.recipe}\n")
    print("| | ms a step | over CE | CPU ms a step | over CE |\n|---|---|---|---|---|")
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in times.items()
    }
    for name, (wall, cpu) in medians.items():
        ratios = wall / medians["CE"][0], cpu / medians["CE"][1]
        print(f"| {name} | {1e3 * wall:.1f} | {ratios[0]:.2f} | {1e3 * cpu:.1f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
