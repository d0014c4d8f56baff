"""Compressed exchanges between eight devices: each process prints digests of its copies, process 0 saves the results.

compressed_worker.py OUT.npz [--coordinator HOST:PORT --processes N --process-id I]
"""

import argparse
import functools
import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import fsdp
from scalejax.parallel.compression.compressors import Identity, OneBit
from scalejax.parallel.compression.two_way import compress_gradients
from scalejax.parallel.gradients.blocks import StepContext
from scalejax.parallel.gradients.compute import Loss, gradients
from scalejax.parallel.mesh import BATCH_AXES, MeshShape, make_mesh
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.train import distributed

SHAPES = {"a": (64, 48), "b": (3, 5, 256), "whole": (3,)}
STEPS = 5
AS_IS = {"weights": "plain", "transform": "none", "fast_bits": 32, "slow_bits": 32, "param_dtype": None}


def drawn(kind, seed, *shape):
    """Heavy-tailed numbers, or whole ones of which every sum is exact."""
    x = np.random.default_rng(seed).standard_t(3, shape).astype(np.float32)
    return np.rint(20 * x) if kind == "whole" else x


def on_devices(x, mesh, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])


def tree_of(kind, seed, mesh, specs, *first):
    """Arrays of `SHAPES` behind further axes."""
    return {
        path: on_devices(drawn(kind, seed + i, *first, *shape), mesh, specs[path])
        for i, (path, shape) in enumerate(SHAPES.items())
    }


def dot(given):
    """A loss whose gradient of each device is its row of the batch."""
    params = given.gather(given.params)
    total = sum((params[path].astype(jnp.float32) * given.batch[path][0]).sum() for path in SHAPES)
    return Loss(total, jnp.float32(1)), {}


def sharded(strategy):
    """(gradient function, master parameters, what puts the gradients of a kind on the devices)."""
    mesh = make_mesh(MeshShape(replica=2, fsdp=4))
    described = {path: ((None,) * len(shape), shape) for path, shape in SHAPES.items()}
    specs = {p.name: p.spec for p in fsdp.place(described, strategy, mesh=mesh)}
    rows = dict.fromkeys(SHAPES, P(BATCH_AXES))
    run = gradients(dot, strategy, mesh=mesh, specs=specs)
    return run, tree_of("tails", 1, mesh, specs), lambda kind: tree_of(kind, 10, mesh, rows, 8)


def sums(form, kinds=("whole", "tails")):
    """{kind/path: reduced gradient} without rounding."""
    run, params, given = sharded(Sdp4Bit(gradients=form, **AS_IS))
    state = jax.jit(run.init_exchange)(params)
    context = StepContext(jnp.int32(0), jax.random.key(0))
    take = jax.jit(lambda p, g, s: run(p, g, exchange=s, context=context).params)
    return {f"{kind}/{path}": x for kind in kinds for path, x in take(params, given(kind), state).items()}


def stepped():
    """Master parameters and copies after some steps in which everything is rounded."""
    run, params, given = sharded(Sdp4Bit())
    batch = given("tails")

    @jax.jit
    def step(params, state, batch, number):
        context = StepContext(number, jax.random.fold_in(jax.random.key(0), number))
        found = run(params, batch, exchange=state, context=context)
        params = {path: p - 0.01 * found.params[path] for path, p in params.items()}
        return params, run.after_update(params, found.exchange, context)

    state = jax.jit(run.init_exchange)(params)
    for number in range(STEPS):
        params, state = step(params, state, batch, jnp.int32(number))
    return params, {path: copy.value for path, copy in state.items()}


def two_way(compressor, shape, kind):
    """{step: the mean of that step} of a compressor with error feedback."""
    mesh, n = make_mesh(shape), 1000
    fast = ("fsdp",) if shape.fsdp > 1 else ()
    axes, hosts = ("replica", *fast), shape.replica
    reduction = compress_gradients(compressor, error_feedback="vanilla", axes=("replica",), fast=fast)
    state = jax.tree.map(
        lambda x: on_devices(np.asarray(x), mesh, P(axes)),
        reduction.init({"w": np.zeros(n)}, hosts=hosts, local=8 // hosts),
    )

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(axes), P(axes)), out_specs=(P(), P(axes)), check_vma=False)
    def step(g, state):
        mean, state = reduction.update({"w": g[0]}, state)
        return mean["w"], state

    found = {}
    for number in range(4):
        found[number], state = step(on_devices(drawn(kind, 20 + number, 8, n), mesh, P(axes)), state)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process-id", type=int)
    arguments = parser.parse_args()
    distributed.initialize(arguments.coordinator, arguments.processes, arguments.process_id)
    masters, copies = stepped()
    found = {f"{form}/{name}": x for form in ("plain", "one_level", "two_level") for name, x in sums(form).items()}
    found |= {f"master/{path}": x for path, x in masters.items()}
    found |= {f"copy/{path}": x.astype(jnp.float32) for path, x in copies.items()}
    for hosts in (2, 8):
        shape = MeshShape(replica=hosts, fsdp=8 // hosts)
        for kind in ("whole", "tails"):
            found |= {f"identity {hosts}/{kind}/{n}": x for n, x in two_way(Identity(), shape, kind).items()}
        found |= {f"onebit {hosts}/tails/{n}": x for n, x in two_way(OneBit(), shape, "tails").items()}
    shown = {
        path: [hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest() for shard in copy.addressable_shards]
        for path, copy in copies.items()
    }
    print(json.dumps(shown))
    whole = multihost_utils.process_allgather(found, tiled=True)
    if distributed.is_primary():
        np.savez(arguments.out, **whole)
    return 0


if __name__ == "__main__":
    sys.exit(main())
