"""Saves checkpoints in a process of its own, so that a test can kill it or fill its disk.

python checkpoint_worker.py save FOLDER LAST      save steps until LAST, print each when it is committed
python checkpoint_worker.py fill FOLDER           save until the disk refuses, then show what is left
"""

import os
import pathlib
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalejax.errors import UserError
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints

IDENTITY = {"model": "worker"}
ROWS = 2000


def rows_of(step: int) -> np.ndarray:
    """What the checkpoint of a step must hold."""
    return np.random.default_rng(step).standard_normal((ROWS, 16), np.float32)


def abstract_tree(sharding: jax.sharding.Sharding) -> dict:
    return {
        "rows": jax.ShapeDtypeStruct((ROWS, 16), jnp.float32, sharding=sharding),
        "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding),
    }


def check(checkpointer: Checkpointer, step: int, sharding: jax.sharding.Sharding) -> None:
    tree, host = checkpointer.restore(step, abstract_tree(sharding))
    assert host == {"step": step}
    assert int(tree["step"]) == step
    np.testing.assert_array_equal(np.asarray(tree["rows"]), rows_of(step))


def main(command: str, folder: str, last: str = "1000000") -> int:
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    keep = Checkpoints(keep_last=2, keep_best=0) if command == "save" else Checkpoints(keep_last=1000, keep_best=0)
    checkpointer = Checkpointer(pathlib.Path(folder), keep, IDENTITY)
    step = checkpointer.latest() or 0
    try:
        while step < int(last):
            step += 1
            tree = {
                "rows": jax.device_put(rows_of(step), sharded),
                "step": jax.device_put(jnp.int32(step), replicated),
            }
            checkpointer.save(step, tree, {"step": step})
            checkpointer.wait()
            print("committed", step, flush=True)
        checkpointer.close()
    except UserError as error:
        print("refused:", error, flush=True)
        steps = checkpointer.steps()
        for kept in steps:
            check(checkpointer, kept, replicated)
        print("intact", *steps, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
