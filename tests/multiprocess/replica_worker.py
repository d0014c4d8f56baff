"""Processes that begin with different values: prints, as JSON, what is found before and after a broadcast.

replica_worker.py [--coordinator HOST:PORT --processes N --process-id I]
"""

import argparse
import json
import sys

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import ddp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import distributed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    arguments = parser.parse_args()
    distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    mesh = make_mesh(MeshShape(replica=jax.process_count(), fsdp=-1))
    whole = NamedSharding(mesh, P())

    def own(value):
        local = [jax.device_put(value, device) for device in mesh.local_devices]
        return jax.make_array_from_single_device_arrays(value.shape, whole, local)

    rank = jax.process_index()
    params = {
        "same": own(np.arange(6, dtype=np.float32)),
        "drawn apart": own(np.random.default_rng(rank).normal(size=(3, 2)).astype(np.float32)),
        "buffer": own(np.array([rank == 0, rank == 1])),
    }
    specs = {path: P() for path in params}
    check = jax.jit(lambda params: ddp.differing(params, specs, mesh))
    floats = {path: p for path, p in params.items() if path != "buffer"}
    before = {path: bool(d) for path, d in check(floats).items()}
    params = ddp.broadcast(params, mesh)
    after = {path: bool(d) for path, d in check({path: params[path] for path in floats}).items()}
    values = {path: [np.asarray(s.data).tolist() for s in p.addressable_shards] for path, p in params.items()}
    print(json.dumps({"before": before, "after": after, "values": values}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
