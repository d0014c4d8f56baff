"""Some steps of a small language model in float64 under several strategies: prints nothing, process 0 saves results.

    language_worker.py TEXTS OUT.npz [--coordinator HOST:PORT --processes N --process-id I]

Run it with JAX_ENABLE_X64=1. Arrays are called STRATEGY:losses and STRATEGY:PARAMETER.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "cases"))

import jax
import numpy as np
import small_language_run
from jax.experimental import multihost_utils

from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import distributed
from scalejax.train.experiment import Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run

STEPS = 10
STRATEGIES = {
    "implicit": Fsdp(),
    "explicit": Fsdp(form="explicit"),
    "local": Fsdp(form="explicit", sharding="SHARD_GRAD_OP", accumulate="local"),
    "ddp": Ddp(bucket_bytes=2048),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    arguments = parser.parse_args()
    distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    arrays = {}
    for name, strategy in STRATEGIES.items():
        experiment = small_language_run.experiment(
            arguments.texts,
            strategy=strategy,
            precision=Precision(params="float64"),
            steps=STEPS,
            gradients__microbatch=None if name == "implicit" else 1 if jax.device_count() > 1 else 4,
        )
        data = experiment.data.build()
        run = Run(binding.bind(experiment, data.schema, make_mesh(MeshShape())), data)
        state, host = run.begin()
        losses = []
        with run.feed(host, STEPS) as feed:
            for _ in range(STEPS):
                feed.take()
                state, loss = feed.step(state)
                losses.append(float(loss))
        whole = multihost_utils.process_allgather(state.params, tiled=True)
        arrays |= {f"{name}:{path}": np.asarray(value) for path, value in whole.items()}
        arrays[f"{name}:losses"] = np.array(losses)
    if distributed.is_primary():
        np.savez(arguments.out, **arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main())
