"""Some steps of the small recipe in float64: prints the losses, and process 0 saves the state without a mesh.

    training_worker.py ROWS.parquet OUT.npz [--coordinator HOST:PORT --processes N --process-id I]

Run it with JAX_ENABLE_X64=1.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "cases"))

import jax
import numpy as np
import small_run
from jax.experimental import multihost_utils

from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import distributed
from scalejax.train.batches import convert
from scalejax.train.experiment import Precision
from scalejax.train.runs.run import Run

STEPS = 50


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    arguments = parser.parse_args()
    distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    precision = Precision(params="float64", compute="float64")
    experiment = small_run.experiment(arguments.rows, precision=precision, tables__dtype="float64", steps=STEPS)
    data = experiment.data.build()
    run = Run.bind(experiment, data, make_mesh(MeshShape()))
    built = run.program
    state = built.init()
    batches = data.train_batches(start_example=0, process_index=jax.process_index(), process_count=jax.process_count())
    losses = []
    for _ in range(STEPS):
        state, loss = built.train_step(state, convert.to_device(next(batches), built))
        losses.append(float(loss))
    stored = run.to_stored(state)
    whole = multihost_utils.process_allgather({"params": stored["params"], "tables": stored["tables"]}, tiled=True)
    if distributed.is_primary():
        arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(whole)}
        np.savez(arguments.out, losses=np.array(losses), **arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main())
