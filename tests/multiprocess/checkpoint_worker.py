"""Saves or restores a checkpoint on all devices of all processes; see test_checkpoint_processes.py.

python checkpoint_worker.py save|restore FOLDER ROWSxCOLUMNS [--coordinator ... --processes ... --process-id ...]
"""

import argparse
import hashlib
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from scalejax.errors import UserError
from scalejax.train import distributed
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints
from scalejax.train.run_folder import RunFolder

SPECS = {
    "sharded": PartitionSpec("a", "b"),
    "replicated": PartitionSpec(),
    "odd": PartitionSpec(),
    "key": PartitionSpec(),
}


def values(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "sharded": rng.standard_normal((64, 8), np.float32),
        "replicated": rng.standard_normal((16, 4), np.float32),
        "odd": rng.standard_normal((1001, 4), np.float32),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["save", "restore", "lock"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("mesh")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    options = parser.parse_args()
    distributed.initialize(options.coordinator, options.processes, options.process_id, timeout_s=60, peer_timeout_s=20)
    if options.command == "lock":
        try:
            with RunFolder(options.folder):
                print("locked")
        except UserError as error:
            print("refused:", error)
            return 2
        return 0
    shape = tuple(int(size) for size in options.mesh.split("x"))
    mesh = jax.make_mesh(shape, ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    checkpointer = Checkpointer(options.folder, Checkpoints(keep_last=2, keep_best=0), {"model": "m"})
    if options.command == "save":
        for step in (1, 2, 3):
            tree = {
                name: jax.make_array_from_callback(value.shape, shardings[name], lambda index, v=value: v[index])
                for name, value in values(step).items()
            }
            tree["key"] = jax.jit(lambda step: jax.random.key(step), out_shardings=shardings["key"])(step)
            checkpointer.save(step, tree, {"step": step})
        checkpointer.close()
        print(json.dumps(checkpointer.steps()))
        return 0
    abstract = {
        name: jax.ShapeDtypeStruct(value.shape, jnp.float32, sharding=shardings[name])
        for name, value in values(3).items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract["key"] = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=shardings["key"])
    try:
        tree, host = checkpointer.restore(None, abstract)
    except UserError as error:
        print("refused:", error)
        return 2
    for name, expected in values(host["step"]).items():
        assert tree[name].sharding.is_equivalent_to(shardings[name], 2)
        for shard in tree[name].addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()
    replicate = jax.jit(jax.random.key_data, out_shardings=shardings["key"])
    np.testing.assert_array_equal(replicate(tree["key"]), jax.random.key_data(jax.random.key(host["step"])))
    print(host["step"], hashlib.sha256(b"".join(values(3)[name].tobytes() for name in values(3))).hexdigest())
    checkpointer.close()
    distributed.gather("restored")
    return 0


if __name__ == "__main__":
    sys.exit(main())
