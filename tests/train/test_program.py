"""The compiled step: parallel equals single-device, state is donated, nothing syncs, shapes compile once."""

import dataclasses

import jax
import numpy as np
import pytest
import small_run
from changes import changed

from scalejax.errors import UserError
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.batches import convert
from scalejax.train.experiment import Checkpoints, Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run

STEPS = 12
FLOAT64 = {"precision": Precision(params="float64", compute="float64"), "tables__dtype": "float64"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture
def experiment(rows):
    return small_run.experiment(rows, steps=STEPS)


def _run(experiment, devices, steps=STEPS):
    """Losses and the mesh-free state after some steps on the first `devices` devices."""
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(experiment.placement.mesh, jax.devices()[:devices]))
    state = built.init()
    batches = data.train_batches(start_example=0)
    losses = []
    for _ in range(steps):
        state, loss = built.train_step(state, convert.to_device(next(batches), built))
        losses.append(float(loss))
    stored = jax.tree.map(np.asarray, {k: v for k, v in Run(built, data).to_stored(state).items() if k != "key"})
    return np.array(losses), stored


@pytest.mark.slow
def test_eight_devices_equal_one_in_float64(experiment, x64):
    mesh = MeshShape(fsdp=4, tensor=2)
    experiment = changed(experiment, **FLOAT64)
    losses, state = _run(experiment, 1)
    other_losses, other = _run(changed(experiment, placement__mesh=mesh, strategy=Fsdp()), 8)
    # Sums over examples are split over devices: float64 rounding, 1e-16 a sum, grown over the steps.
    np.testing.assert_allclose(other_losses, losses, rtol=1e-12)
    for part in ("params", "tables"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), other[part], state[part])


@pytest.mark.slow
def test_eight_devices_equal_one_in_float32_by_loss(experiment):
    losses, _ = _run(experiment, 1)
    other, _ = _run(experiment, 8)
    # Parameters drift apart by rounding in float32; the loss stays (measured 6e-6 over 50 steps).
    np.testing.assert_allclose(other, losses, rtol=1e-5)


@pytest.mark.slow
def test_equal_seeds_give_equal_bits(experiment):
    first, second = _run(experiment, 1, steps=5), _run(experiment, 1, steps=5)
    np.testing.assert_array_equal(first[0], second[0])
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])


@pytest.mark.slow
def test_initial_state_is_the_same_on_every_mesh(experiment):
    data = experiment.data.build()
    states = []
    for devices in (1, 8):
        built = binding.bind(experiment, data.schema, make_mesh(MeshShape(), jax.devices()[:devices]))
        states.append(jax.tree.map(np.asarray, Run(built, data).to_stored(built.init()) | {"key": 0}))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_each_step_drops_out_other_activations(experiment):
    experiment = changed(experiment, model=dataclasses.replace(experiment.model, dropout=0.5))
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(MeshShape(), jax.devices()[:1]))
    batch, losses = convert.to_device(next(data.train_batches(start_example=0)), built), []
    for number in (0, 1, 0):
        state = dataclasses.replace(built.init(), step=jax.numpy.asarray(number, jax.numpy.int32))
        losses.append(float(built.train_step(state, batch)[1]))
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.slow
def test_state_is_donated_and_the_step_compiles_once(experiment):
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(MeshShape(), jax.devices()[:1]))
    batches = data.train_batches(start_example=0)
    state = built.init()
    for _ in range(3):
        before = state
        state, _ = built.train_step(state, convert.to_device(next(batches), built))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((before.params, before.tables["stacks"])))
    assert built.train_step._cache_size() == 1


@pytest.mark.slow
def test_abstract_state_and_batch_describe_the_real_ones(experiment):
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(MeshShape()))
    batch = convert.to_device(next(data.train_batches(start_example=0)), built)

    def same(abstract, real):
        assert (abstract.shape, abstract.dtype) == (real.shape, real.dtype)
        assert abstract.sharding.is_equivalent_to(real.sharding, real.ndim)

    jax.tree.map(same, built.abstract_state(), built.init())
    jax.tree.map(same, built.abstract_batch(), batch)


def test_batch_that_does_not_divide_names_the_axis(experiment, rows):
    experiment = dataclasses.replace(experiment, data=small_run.data(rows, batch_size=60))
    with pytest.raises(UserError, match=r"(?s)60.*fsdp"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))


@pytest.mark.parametrize("field", ["precision.params", "precision.compute", "tables.dtype"])
def test_float64_needs_64_bit_types(experiment, field):
    experiment = changed(experiment, **{field.replace(".", "__"): "float64"})
    with pytest.raises(UserError, match=rf"^{field} is float64.*JAX_ENABLE_X64=1.*--set {field}="):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))


def test_a_score_that_there_is_not_keeps_no_checkpoints(experiment):
    experiment = dataclasses.replace(experiment, checkpoints=Checkpoints(best_metric="loss"))
    with pytest.raises(UserError, match=r"best_metric is 'loss', but .* --set checkpoints\.best_metric=logloss"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))


def test_fsdp_shards_what_divides(experiment):
    experiment = changed(experiment, strategy=Fsdp())
    built = binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))
    state = built.abstract_state()
    sharded = [name for name, p in state.params.items() if not p.sharding.is_fully_replicated]
    assert sharded
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if not leaf.sharding.is_fully_replicated]
    assert len(moments) == 2 * len(sharded)  # both moments of Adam are sharded like their parameter


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_microbatches_add_up_to_the_whole_batch(experiment, x64, devices):
    model = dataclasses.replace(experiment.model, dropout=0.0)
    whole = changed(experiment, **FLOAT64, model=model, gradients__microbatch=64)
    losses, state = _run(whole, devices, steps=5)
    parts, other = _run(changed(whole, gradients__microbatch=2), devices, steps=5)
    np.testing.assert_allclose(parts, losses, rtol=1e-12)  # float64 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), other["params"], state["params"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), other["tables"], state["tables"])
