"""A small language model under strategies of sharding: checkpoints go between them, bytes and memory are as stated.

That each trains as one device does: `test_dense_strategies.py`.
"""

import jax
import numpy as np
import pytest
import small_language_run as small
import stablehlo
from jax.sharding import NamedSharding

from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run

ONE = MeshShape(fsdp=1)
EIGHT = MeshShape(fsdp=8)
TENSOR = MeshShape(fsdp=2, tensor=2, replica=2)
"""Four query heads, two pairs of keys and values and the MLP over `tensor`, norms over its positions."""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def run_of(texts, mesh, strategy, **changes):
    experiment = small.experiment(texts, strategy=strategy, **changes)
    data = experiment.data.build()
    sizes = mesh.resolve(8) if mesh.fsdp == -1 else None
    devices = jax.devices()[: int(np.prod(sizes or [getattr(mesh, a) for a in ("replica", "fsdp", "tensor")]))]
    return Run(binding.bind(experiment, data.schema, make_mesh(mesh, devices)), data)


@pytest.mark.slow
def test_one_run_in_float32_is_judged_by_its_loss(texts):
    losses = []
    for mesh, strategy in ((ONE, Fsdp()), (TENSOR, Fsdp(form="explicit"))):
        run = run_of(texts, mesh, strategy)
        state, found = run.program.init(), []
        batches = run.data.train_batches(start_example=0)
        for _ in range(50):
            state, loss = run.program.train_step(state, convert.to_device(next(batches), run.program))
            found.append(float(loss))
        losses.append(found)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_one_strategy_loads_under_every_other(texts, tmp_path):
    loop.train(small.experiment(texts, steps=4, strategy=Fsdp(form="explicit")), workdir=tmp_path)
    others = {
        "one device": (ONE, Fsdp()),
        "full with tensor": (TENSOR, Fsdp()),
        "gradients": (EIGHT, Fsdp(sharding="SHARD_GRAD_OP")),
        "hybrid": (TENSOR, Fsdp(sharding="HYBRID_SHARD", form="explicit")),
        "buckets": (MeshShape(replica=2, fsdp=2), Ddp(bucket_bytes=4096, accumulate="local")),
    }
    states = {}
    for name, (mesh, strategy) in others.items():
        run = run_of(texts, mesh, strategy)
        with Checkpointer(tmp_path / "checkpoints", run.program.experiment.checkpoints, run.identity()) as checkpoints:
            states[name], _ = run.restore(checkpoints, 4)
        for path, p in states[name].params.items():
            assert p.sharding.is_equivalent_to(NamedSharding(run.mesh, run.program.specs[path]), p.ndim)
    for state in states.values():
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(states["one device"]), strict=True):
            if not jax.numpy.issubdtype(a.dtype, jax.dtypes.prng_key):
                np.testing.assert_array_equal(a, b)


@pytest.mark.default_cases("HYBRID_SHARD")
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_bytes_of_a_step_equal_the_formulas(texts, sharding):
    mesh = MeshShape(replica=2, fsdp=4)
    run = run_of(texts, mesh, Fsdp(sharding=sharding, form="explicit"), precision=Precision(params="float32"))
    program = run.program
    lowered = program.train_step.lower(program.abstract_state(), program.abstract_batch())
    found = {}
    for c in stablehlo.stated_collectives(lowered, program.mesh):
        if c.bytes > 4 * c.count:
            found[c.kind, c.axis] = found.get((c.kind, c.axis), 0) + c.bytes
    sizes = {path: 4 * int(np.prod(p.shape)) for path, p in program.model.params.items()}
    cut = {path for path, spec in program.specs.items() if any(spec)}
    inside = sum(size for path, size in sizes.items() if path.startswith("layers/") and path in cut)
    outside = sum(size for path, size in sizes.items() if not path.startswith("layers/") and path in cut)
    left = sum(size for path, size in sizes.items() if path not in cut)
    gathers = 2 if sharding in ("FULL_SHARD", "HYBRID_SHARD") else 1
    axis = {"HYBRID_SHARD": "fsdp"}.get(sharding, "replica+fsdp")
    expected = {
        ("all-gather", axis): gathers * inside + outside,
        ("reduce-scatter", axis): inside + outside,
        ("all-reduce", "replica"): (inside + outside) // 4 if sharding == "HYBRID_SHARD" else 0,
        ("all-reduce", "replica+fsdp"): left,
    }
    assert found == {key: size for key, size in expected.items() if size}
    assert left == (sum(sizes.values()) if sharding == "NO_SHARD" else 0)


def test_memory_of_the_state_is_its_share(texts):
    run = run_of(texts, EIGHT, Fsdp(form="explicit"))
    program = run.program
    sizes = [p for p in jax.tree.leaves(program.abstract_state()) if isinstance(p.sharding, NamedSharding) and p.ndim]
    local = sum(int(np.prod(p.sharding.shard_shape(p.shape))) * p.dtype.itemsize for p in sizes)
    whole = sum(4 * p.size for p in program.model.params.values())
    assert local == 3 * whole // 8  # parameters and two moments
