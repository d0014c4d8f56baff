"""What the compiler for TPUs makes of strategies of sharding, as Markdown for docs/parallelism.md; no TPU is needed.

    JAX_PLATFORMS=cpu python benchmarks/sharding_forms.py v6e:2x4 v5p:2x2x2 [v5p:4x4x4 ...]

The program is the gradient of four scanned residual MLPs (width 512, hidden 2,048; `tests/cases/residual_stack.py`) on
rows of 128 tokens, four a device; parameters in float32 travel in bfloat16. Bytes are given in units of M, those of all
parameters on their way; sums of single numbers are left out. A compile takes some ten seconds.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cases")]

import jax
import numpy as np
import residual_stack
from jax.sharding import NamedSharding

from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.plan import explain_sharding, run, topology
from scalejax.plan.compiled.collectives import total

LAYERS, DIM, HIDDEN, LENGTH = 4, 512, 2048, 128
STRATEGIES = (
    Fsdp(sharding="FULL_SHARD", param_dtype="bfloat16"),
    Fsdp(sharding="FULL_SHARD", param_dtype="bfloat16", form="explicit"),
    Fsdp(sharding="SHARD_GRAD_OP", param_dtype="bfloat16"),
    Fsdp(sharding="HYBRID_SHARD", param_dtype="bfloat16"),
    Fsdp(sharding="HYBRID_SHARD", param_dtype="bfloat16", form="explicit"),
    Fsdp(sharding="NO_SHARD", param_dtype="bfloat16"),
    Ddp(param_dtype="bfloat16", reduce_dtype="bfloat16", accumulate="local", bucket_bytes=4 * 2**20),
)


def row(chips: str, strategy: Fsdp | Ddp) -> str:
    """One line of the table."""
    machine = topology.parse(chips)
    across = isinstance(strategy, Fsdp) and "HYBRID" in strategy.sharding
    mesh, _ = topology.make_mesh(machine, meshes.MeshShape(replica=2 if across else 1))
    described = residual_stack.axes(LAYERS, DIM, HIDDEN)
    specs = {p.name: p.spec for p in fsdp.place(described, strategy, mesh=mesh)}
    params = {
        path: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, specs[path]))
        for path, (_, shape) in described.items()
    }
    batch = {
        name: jax.ShapeDtypeStruct(
            (4 * machine.devices, LENGTH),
            np.float32 if name == "weights" else np.int32,
            sharding=meshes.batch_sharding(mesh),
        )
        for name in ("tokens", "targets", "weights")
    }
    gradients = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs)
    with run.no_compile_cache():
        compiled = jax.jit(gradients).lower(params, batch).compile()
    travelling = 2 * sum(p.size for p in params.values())
    cells = []
    for c in total(explain_sharding(compiled, mesh)):
        if c.bytes >= travelling / 100:
            where = "" if c.axis == "fsdp" else f" over {c.axis}"
            cells.append(f"{c.count} {c.kind}{where} {c.bytes / travelling:.2f} M")
    name = f"`{strategy.sharding}` {strategy.form}" if isinstance(strategy, Fsdp) else "`Ddp`, local, 4 buckets"
    return f"| {chips} | {name} | {', '.join(cells)} |"


if __name__ == "__main__":
    print("| chips | strategy | collectives of a step: executions, kind, payload |\n|---|---|---|")
    for chips in sys.argv[1:]:
        for strategy in STRATEGIES:
            print(row(chips, strategy), flush=True)
