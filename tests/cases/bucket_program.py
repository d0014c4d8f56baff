"""Run by test_ddp.py where XLA must not merge all-reduces: prints the collectives of a DDP step as JSON.

XLA_FLAGS=--xla_disable_hlo_passes=cpu-all-reduce-combiner python bucket_program.py BUCKET_BYTES ACCUMULATE PARTS
"""

import json
import sys

import jax
import numpy as np
import residual_stack
import stablehlo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding


def collectives(bucket_bytes, accumulate, parts):
    """({where: [[kind, bytes, executions], ...]}) of a float32 step on 8 devices, as stated and as compiled."""
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    specs = {path: P() for path in residual_stack.axes()}
    strategy = Ddp(bucket_bytes=bucket_bytes, accumulate=accumulate)
    gradients = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs, parts=parts)
    params = {
        path: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P()))
        for path, (_, shape) in residual_stack.axes().items()
    }
    batch = {
        name: jax.ShapeDtypeStruct(x.shape, np.float32 if name == "weights" else np.int32)
        for name, x in residual_stack.batch(rows=8 * parts).items()
    }
    lowered = jax.jit(gradients).lower(params, batch)
    found = {
        "stated": stablehlo.stated_collectives(lowered, mesh),
        "compiled": explain_sharding(lowered.compile(), mesh),
    }
    return {where: [[c.kind, c.bytes, c.count] for c in rows] for where, rows in found.items()}


if __name__ == "__main__":
    print(json.dumps(collectives(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
