import dataclasses
import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import residual_stack
import stablehlo
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.gradients import blocks, compute
from scalejax.parallel.mesh import BATCH_AXES, MeshShape

pytestmark = pytest.mark.usefixtures("x64")

STEP = 0.25
DEVICES = 4


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(MeshShape(replica=2, fsdp=2), jax.devices()[:DEVICES])


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding(blocks.Stateless):
    """A toy compressed exchange: each device rounds its gradient to multiples of STEP and remembers what it dropped."""

    inner: blocks.UncompressedExchange

    def gather(self, shards, state):
        return self.inner.gather(shards, state)

    def reduce(self, compute, state, kept):
        wanted = {path: g + state[path]["residual"] for path, g in compute.items()}
        sent = {path: jnp.round(w / STEP) * STEP for path, w in wanted.items()}
        reduced, _ = self.inner.reduce(sent, {}, kept)
        return reduced, {
            path: {"residual": w - sent[path], "rounds": state[path]["rounds"] + 1} for path, w in wanted.items()
        }

    def init(self, shards):
        zeros = {path: jnp.zeros(residual_stack.axes()[path][1]) for path in shards}
        return {path: {"residual": z, "rounds": jnp.zeros(z.shape[:1], jnp.int32)} for path, z in zeros.items()}

    def after_update(self, shards, state, context):
        return {path: {**s, "rounds": s["rounds"] + 1} for path, s in state.items()}


class Rounded(fsdp.Fsdp):
    """HYBRID_SHARD with that exchange."""

    def exchange(self, layouts, axes):
        return Rounding(super().exchange(layouts, axes))


def of_parameters(loss):
    """A loss of parameters and a batch as `gradients` wants it."""

    def of_given(given):
        total, weight, sums = loss(given.params, given.batch, None, given.gather)
        return compute.Loss(total, weight, sums), {}

    return of_given


def rounded_gradients(mesh, loss, parts=1, accumulate="communicate"):
    strategy = Rounded(sharding="HYBRID_SHARD", form="explicit", accumulate=accumulate)
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh)}
    assert specs["layers/mlp/up"] == P(None, None, "fsdp")

    found = compute.gradients(of_parameters(loss), strategy, mesh=mesh, specs=specs, parts=parts)

    def run(params, state, batch):
        new = found(params, batch, exchange=state)
        return new.params, new.exchange

    run = jax.jit(run)
    params = {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in residual_stack.params().items()}
    return run, params


def first_state():
    """Zero residuals of the whole gradient on each device, and a counter, which the exchange cannot change."""
    return {
        path: {"residual": np.zeros((DEVICES, *shape)), "rounds": np.zeros((DEVICES, *shape[:1]), np.int32)}
        for path, (_, shape) in residual_stack.axes().items()
    }


def device_gradients(rows):
    """Gradients of one device's rows, by jax on one device."""
    return jax.jit(jax.grad(lambda p, b: residual_stack.loss(p, b, None)[0]))(residual_stack.params(), rows)


def literal(batches, residuals):
    """Error feedback as it is defined, in NumPy: what each device sends, and what it then remembers."""
    sums = []
    for batch in batches:
        total = 0
        for device in range(DEVICES):
            share = len(batch["tokens"]) // DEVICES
            rows = {name: x[device * share : (device + 1) * share] for name, x in batch.items()}
            for path, gradient in device_gradients(rows).items():
                wanted = np.asarray(gradient) + residuals[path][device]
                sent = np.round(wanted / STEP) * STEP
                residuals[path][device] = wanted - sent
                total = total + sent if path == "layers/mlp/up" else total
        sums.append(total)
    return sums


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(residual_stack.loss, id="remat"),
        pytest.param(residual_stack.without_remat, id="no remat"),
    ],
)
def test_state_of_an_exchange_updates_through_a_scanned_rematerialised_body(mesh, loss):
    run, params = rounded_gradients(mesh, loss)
    batches = [residual_stack.batch(seed=seed) for seed in (1, 2)]
    residuals = {path: s["residual"].copy() for path, s in first_state().items()}
    expected = literal(batches, residuals)
    state = first_state()
    for batch, total in zip(batches, expected, strict=True):
        grads, state = run(params, state, jax.device_put(batch, meshes.batch_sharding(mesh)))
        # Rounded to multiples of 0.25, which float64 adds without error.
        np.testing.assert_array_equal(grads["layers/mlp/up"], total)
    for path, residual in residuals.items():
        np.testing.assert_allclose(state[path]["residual"], residual, rtol=0, atol=1e-12)
        assert np.abs(residual).max() > 0.05
        np.testing.assert_array_equal(state[path]["rounds"], 0)  # not of floating point: stays


@pytest.mark.slow
def test_state_goes_from_part_to_part_of_a_batch(mesh):
    run, params = rounded_gradients(mesh, residual_stack.loss, parts=2)
    batch = residual_stack.batch()
    share = len(batch["tokens"]) // DEVICES
    cuts = [np.arange(len(batch["tokens"])).reshape(DEVICES, 2, share // 2)[:, part].ravel() for part in (0, 1)]
    residuals = {path: s["residual"].copy() for path, s in first_state().items()}
    expected = sum(literal([{name: x[rows] for name, x in batch.items()} for rows in cuts], residuals))
    grads, state = run(params, first_state(), jax.device_put(batch, meshes.batch_sharding(mesh)))
    np.testing.assert_array_equal(grads["layers/mlp/up"], expected)
    np.testing.assert_allclose(state["head/weight"]["residual"], residuals["head/weight"], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_state_updates_once_where_gradients_are_reduced_once(mesh):
    run, params = rounded_gradients(mesh, residual_stack.loss, parts=2, accumulate="local")
    batch = residual_stack.batch()
    residuals = {path: s["residual"].copy() for path, s in first_state().items()}
    (expected,) = literal([batch], residuals)  # a sum over parts is a sum over rows
    grads, state = run(params, first_state(), jax.device_put(batch, meshes.batch_sharding(mesh)))
    np.testing.assert_array_equal(grads["layers/mlp/up"], expected)
    np.testing.assert_allclose(state["layers/mlp/down"]["residual"], residuals["layers/mlp/down"], rtol=0, atol=1e-12)


def gathers_of(mesh, after_forward, loss, policy_of=None):
    """(executions, bytes) of the all-gathers of one layer's matrices in a step, as it is stated."""
    sharding = {"drop": "FULL_SHARD", "keep": "SHARD_GRAD_OP"}[after_forward]
    strategy = fsdp.Fsdp(sharding=sharding, form="explicit")
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh)}
    run = compute.gradients(of_parameters(loss), strategy, mesh=mesh, specs=specs)
    params = {
        path: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(mesh, specs[path]))
        for path, p in residual_stack.params().items()
    }
    batch = jax.eval_shape(residual_stack.batch)
    found = stablehlo.stated_collectives(jax.jit(run).lower(params, batch), mesh)
    matrix = residual_stack.E * residual_stack.F * 8
    return sum(c.count for c in found if c.kind == "all-gather" and c.bytes == c.count * matrix)


@pytest.mark.parametrize("loss", [residual_stack.loss, residual_stack.without_remat], ids=["remat", "no remat"])
def test_a_policy_on_the_primitive_decides_how_often_a_layer_is_gathered(mesh, loss):
    matrices = 2 * residual_stack.L
    assert gathers_of(mesh, "drop", loss) == 2 * matrices
    assert gathers_of(mesh, "keep", loss) == matrices


def test_a_policy_on_a_name_keeps_the_unnamed_copy(mesh):
    # Why `Fetch.remat` names the primitive: this asks for the same and gathers once.
    def named(params, batch, key, gather):
        def named_gather(block):
            return {p: checkpoint_name(x, "gathered") for p, x in gather(block).items()}

        named_gather.remat = lambda policy: jax.checkpoint_policies.save_anything_except_these_names("gathered")
        return residual_stack.without_remat(params, batch, key, named_gather)

    assert gathers_of(mesh, "drop", named) == 2 * residual_stack.L


def test_a_bundle_can_be_read_as_modules_read_parameters():
    bundle = blocks.ShardWithState(jnp.ones(3), state=jnp.zeros(2))
    assert bundle[...] is bundle
    with pytest.raises(TypeError, match="must be gathered before it is used"):
        bundle[0]
    assert len(jax.tree.leaves(bundle)) == 2


def test_a_layout_speaks_of_the_master_and_of_one_layer():
    mesh = meshes.make_mesh(MeshShape(fsdp=4, tensor=2))
    found = blocks.layouts({"w": P(None, ("fsdp", "tensor"), None)}, {"w": 3}, mesh)["w"]
    assert found.dimensions(3) == ((1, ("fsdp",)),)
    assert found.dimensions(2) == ((0, ("fsdp",)),)
    with pytest.raises(UserError, match=r"dimension 0 of 'w' is sharded over tensor.fsdp; .*needs the data axes first"):
        blocks.layouts({"w": P(("tensor", "fsdp"))}, {"w": 1}, mesh)


def test_data_axes_leave_out_axes_of_one_device():
    assert blocks.data_axes(meshes.make_mesh(MeshShape(replica=2, tensor=4, fsdp=1))) == ("replica",)
    assert BATCH_AXES == ("replica", "fsdp", "expert")


def test_the_worked_example_runs():
    with jax.enable_x64(False):
        found = doctest.testmod(blocks)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize("sides", [{"replica": (2,), "fsdp": (4,)}, {"fsdp": (2, 2)}])
def test_a_sum_over_one_side_of_a_torus_after_the_other_leaves_each_device_its_cut(sides):
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    axes = ("replica", "fsdp")
    x = np.arange(8 * 16 * 3, dtype=np.float64).reshape(8, 16, 3)  # what each device adds

    def local(x):
        return blocks.sum_and_scatter(x[0], axes, 0, sides)

    summed = jax.shard_map(local, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False)
    np.testing.assert_array_equal(jax.jit(summed)(x), x.sum(axis=0))
