"""Whole runs under strategies whose exchange remembers something: they resume, go to other meshes, and add up.

Two schemes of a user, each a subclass of a strategy and an `Exchange` around that of the strategy:

    Signs      signs of gradients and their mean size travel; what that leaves out stays, per device, for the next time
    Differing  devices hold the same weights, and what travels are 4-bit changes of them (as the weights of SDP4Bit)
"""

import dataclasses
import functools
import io
import math
import shutil

import jax
import jax.numpy as jnp
import killed_run
import numpy as np
import pytest
import rich.console
import small_language_run
import small_run
from changes import changed

from scalejax import optim
from scalejax.errors import UserError
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients import blocks
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints, Phase, Precision
from scalejax.train.runs.run import Run

pytestmark = pytest.mark.usefixtures("x64")

MESH = MeshShape(replica=2)
WIDE = Precision(params="float64", compute="float64")
SGD = optim.Sgd(learning_rate=optim.Constant(value=0.1))


@dataclasses.dataclass(frozen=True, eq=False)
class OneBit(blocks.Stateless):
    """What signs leave out of a gradient, of each device, is added to its next one."""

    inner: blocks.ParamExchange
    layouts: dict

    def gather(self, shards, state):
        return self.inner.gather(shards, state)

    def reduce(self, gradients, state, kept):
        wanted = {path: g + state[path]["residual"] for path, g in gradients.items()}
        sent = {path: jnp.sign(w) * jnp.abs(w).mean() for path, w in wanted.items()}
        reduced, _ = self.inner.reduce(sent, {}, kept)
        return reduced, {path: {"residual": wanted[path] - sent[path]} for path in wanted}

    def init(self, shards):
        return {path: {"residual": jnp.zeros(self._whole(path, p.shape), p.dtype)} for path, p in shards.items()}

    def _whole(self, path, shape):
        whole = list(shape)
        for dim, axes in self.layouts[path].sharded:
            whole[dim] *= math.prod(jax.lax.axis_size(axis) for axis in axes)
        return whole


@dataclasses.dataclass(frozen=True, eq=False)
class Movable(OneBit):
    """The same with a rule: residuals of devices that are gone go to those that are left; new ones begin with none."""

    def resized(self, path, state, sizes):
        devices = math.prod(sizes.values())

        def moved(residual):
            new = np.zeros((devices, *residual.shape[1:]), residual.dtype)
            np.add.at(new, np.arange(len(residual)) % devices, residual)
            return new

        return jax.tree.map(moved, state)

    def rescaled(self, state, factor):
        return jax.tree.map(lambda residual: residual * factor.astype(residual.dtype), state)


@dataclasses.dataclass(frozen=True, eq=False)
class Changes(OneBit):
    """Every device holds what all believe the weights to be; 4-bit changes towards the master shards travel."""

    def gather(self, shards, state):
        if not state:  # frozen
            return self.inner.gather(shards, state)
        fresh, kept = self.inner.gather(shards, {})
        return {path: jnp.where(state[path]["begun"] > 0, state[path]["held"], fresh[path]) for path in shards}, kept

    def reduce(self, gradients, state, kept):
        return self.inner.reduce(gradients, {}, kept)[0], state

    def init(self, shards):
        held = {path: jnp.zeros(self._whole(path, p.shape), p.dtype) for path, p in shards.items()}
        # One flag a layer, so that it is cut by layer as the weights are.
        return {path: {"held": x, "begun": jnp.zeros(x.shape[:1] + (1,) * (x.ndim - 1))} for path, x in held.items()}

    def after_update(self, shards, state, context):
        fresh = self.inner.gather(shards, {})[0]
        new = {}
        for path, s in state.items():
            difference = fresh[path] - s["held"]
            unit = jnp.abs(difference).max() / 7
            moved = s["held"] + jnp.round(difference / jnp.maximum(unit, 1e-300)) * unit
            new[path] = {"held": jnp.where(s["begun"] > 0, moved, fresh[path]), "begun": jnp.ones_like(s["begun"])}
        return new

    def rescaled(self, state, factor):
        return state

    def resized(self, path, state, sizes):
        return jax.tree.map(lambda x: np.repeat(np.asarray(x)[:1], math.prod(sizes.values()), axis=0), state)


class Signs(Fsdp):
    """One-bit gradients with error feedback under FSDP."""

    scheme = Movable

    def exchange(self, layouts, axes):
        return self.scheme(super().exchange(layouts, axes), layouts)


class Rooted(Signs):
    """The same without a rule for other meshes."""

    scheme = OneBit


class Differing(Signs):
    """Changes of weights."""

    scheme = Changes


class SignsInBuckets(Ddp):
    """One-bit gradients with error feedback in buckets."""

    def exchange(self, layouts, axes):
        return Movable(super().exchange(layouts, axes), layouts)


def str_of(value):
    """A strategy in a few words."""
    if not isinstance(value, Fsdp | Ddp):
        return str(value)
    return " ".join((type(value).__name__, getattr(value, "sharding", ""), value.accumulate))


HYBRID = {"sharding": "HYBRID_SHARD", "form": "explicit"}
FULL = {"sharding": "FULL_SHARD", "form": "explicit"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small_language_run.write(tmp_path_factory.mktemp("texts") / "documents")


def clicks(rows, strategy, **changes):
    """Eight steps of a click model in float64, a checkpoint after four."""
    experiment = small_run.experiment(
        rows, precision=WIDE, tables__dtype="float64", steps=8, evaluation__every=0, checkpoints=Checkpoints(every=4)
    )
    model = dataclasses.replace(
        experiment.model,
        dropout=0.0,
        layers=1,
        fm_outputs=2,
        lcb_outputs=2,
        rank=2,
        fmb_hidden=(8,),
        head_hidden=(8,),
        bottom_hidden=(8,),
    )
    return changed(experiment, **{"model": model, "placement__mesh": MESH, "strategy": strategy, **changes})


def restored(experiment, folder, devices=8, step=None):
    """The whole stored state of a checkpoint."""
    mesh = make_mesh(experiment.placement.mesh, jax.devices()[:devices])
    run = Run.bind(experiment, experiment.data.build(), mesh)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        stored = run.to_stored(run.restore(checkpoints, step)[0])
    stored["key"] = jax.random.key_data(stored["key"])
    return jax.tree.map(np.asarray, stored)


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """Runs that nothing stopped, by their strategy."""

    @functools.cache
    def run(strategy):
        folder = tmp_path_factory.mktemp("whole")
        with jax.enable_x64(True):
            loop.train(clicks(rows, strategy), workdir=folder)
        return folder

    return run


@pytest.mark.parametrize(
    "strategy",
    [
        Signs(**HYBRID),
        pytest.param(Differing(**FULL), marks=pytest.mark.slow),
        pytest.param(Signs(**HYBRID, accumulate="local"), marks=pytest.mark.slow),
        pytest.param(SignsInBuckets(bucket_bytes=4096), marks=pytest.mark.slow),
    ],
    ids=str_of,
)
def test_a_killed_run_goes_on_to_the_same_bits(rows, whole, tmp_path, strategy):
    experiment = clicks(rows, strategy)
    killed_run.train(experiment, tmp_path, at=7)
    states = [restored(experiment, folder) for folder in (whole(strategy), tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    trained = states[0]["params"]
    assert set(states[0]["exchange"]) == set(trained)
    assert all(leaf.shape[0] == 8 for leaf in jax.tree.leaves(states[0]["exchange"]))
    # It is not that nothing was remembered; of one number a sign and its size leave out nothing.
    for path, state in states[0]["exchange"].items():
        assert trained[path].size == 1 or all(np.abs(leaf).max() > 0 for leaf in state.values())


@pytest.mark.slow
def test_a_killed_run_with_every_other_option_goes_on_to_the_same_bits(rows, tmp_path):
    experiment = clicks(
        rows,
        Differing(**FULL),
        trainable="(layers|head)/.*",
        averages=(optim.Average(decay=0.5),),
        gradients__clip=0.05,
        gradients__microbatch=4,
        gradients__loss_scaling=LossScaling(initial=1024.0, interval=3),
        placement__offload="optimizer and parameters",
        tables__pipeline="ids",
        tables__full_every=8,
    )
    loop.train(experiment, workdir=tmp_path / "whole")
    killed_run.train(experiment, tmp_path / "killed", at=7)
    states = [restored(experiment, tmp_path / name) for name in ("whole", "killed")]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert set(states[0]["exchange"]) == set(states[0]["averages"]["ema"]) < set(states[0]["params"])


@pytest.mark.slow
def test_a_killed_language_model_goes_on_to_the_same_bits_layer_by_layer(texts, tmp_path):
    experiment = small_language_run.experiment(
        texts, precision=Precision(params="float64"), steps=8, strategy=Differing(**FULL), placement__mesh=MESH
    )
    loop.train(experiment, workdir=tmp_path / "whole")
    killed_run.train(experiment, tmp_path / "killed", at=7)
    jax.tree.map(
        np.testing.assert_array_equal, *(restored(experiment, tmp_path / name) for name in ("whole", "killed"))
    )


def on_four_devices(experiment, folder, monkeypatch):
    """Goes on with what was trained on eight."""
    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_mesh", lambda shape: make_mesh(shape, jax.devices()[:4]))
        return loop.train(experiment, workdir=folder, resume="must")


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [Signs(**HYBRID), SignsInBuckets(bucket_bytes=4096)],
    ids=str_of,
)
def test_residuals_of_a_run_that_goes_on_with_other_devices_keep_their_sum(
    rows, whole, tmp_path, monkeypatch, strategy
):
    experiment = clicks(rows, strategy)
    shutil.copytree(whole(strategy), tmp_path, dirs_exist_ok=True)
    eight, four = (restored(experiment, tmp_path, devices, step=8) for devices in (8, 4))
    for path, state in eight["exchange"].items():
        here = four["exchange"][path]["residual"]
        assert (len(state["residual"]), len(here)) == (8, 4)
        assert here[0].size == 1 or np.abs(here).max() > 0
        np.testing.assert_allclose(here.sum(0), state["residual"].sum(0), rtol=1e-12, atol=1e-15)
    for part in ("params", "optimizer", "tables"):
        jax.tree.map(np.testing.assert_array_equal, four[part], eight[part])
    experiment = dataclasses.replace(experiment, steps=12)
    closing = on_four_devices(experiment, tmp_path, monkeypatch)
    assert closing["steps"] == 12
    assert np.isfinite(closing["test_logloss"])
    # And back.
    later = [restored(experiment, tmp_path, devices, step=12)["exchange"] for devices in (4, 8)]
    for path, state in later[0].items():
        np.testing.assert_array_equal(later[1][path]["residual"].sum(0), state["residual"].sum(0))


@pytest.mark.slow
def test_residuals_of_a_phase_on_other_devices_keep_their_sum_and_the_run_says_so(rows, whole, tmp_path):
    strategy = Signs(**FULL)
    shutil.copytree(whole(strategy), tmp_path, dirs_exist_ok=True)
    phase = Phase(name="alone", steps=1, changes={"placement.mesh": None})
    experiment = dataclasses.replace(clicks(rows, strategy), phases=(phase,))
    first, second = loop._bind(experiment, None)
    with loop._checkpointer(tmp_path / "checkpoints", first) as checkpoints:
        loop._become(checkpoints, first)
        state, _ = second.follow(first, checkpoints)
    before = restored(clicks(rows, strategy), tmp_path)["exchange"]
    for path, held in before.items():
        here = np.asarray(state.exchange[path]["residual"])
        assert len(here) == 1
        np.testing.assert_allclose(here.sum(0), held["residual"].sum(0), rtol=1e-12, atol=1e-15)
    console = rich.console.Console(file=io.StringIO(), width=200)
    loop.train(experiment, workdir=tmp_path, resume="must", console=console)
    assert "remembers was that of 8 devices; on 1 it is kept as Movable says." in console.file.getvalue()


@pytest.mark.slow
def test_a_scheme_without_a_rule_is_refused_on_other_devices(rows, whole, tmp_path, monkeypatch):
    strategy = Signs(**HYBRID)
    shutil.copytree(whole(strategy), tmp_path, dirs_exist_ok=True)
    experiment = clicks(rows, strategy, steps=12)
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    monkeypatch.setattr(Signs, "scheme", OneBit)
    with pytest.raises(UserError, match=r"^OneBit: the state of '\S+' has no rule for another number of devices, 4"):
        on_four_devices(experiment, tmp_path, monkeypatch)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before
    restored(experiment, tmp_path)  # as many as before


@pytest.mark.slow
def test_a_checkpoint_of_another_scheme_is_refused(rows, whole):
    with pytest.raises(UserError, match="exchange"):
        restored(clicks(rows, SignsInBuckets(bucket_bytes=4096)), whole(Differing(**FULL)))


@pytest.mark.slow
def test_what_all_devices_hold_alike_stays_alike_and_goes_to_any_number_of_them(rows, whole):
    strategy = Differing(**FULL)
    eight, four = (restored(clicks(rows, strategy), whole(strategy), devices) for devices in (8, 4))
    for path, state in eight["exchange"].items():
        held, master = state["held"], eight["params"][path]
        assert held.shape == (8, *master.shape)
        np.testing.assert_array_equal(held, np.broadcast_to(held[:1], held.shape))
        np.testing.assert_array_equal(four["exchange"][path]["held"], held[:4])
        assert master.size == 1 or (held[0] != master).any()
        # Steps of AdamW are 0.01 at most; what a change rounds away is half a fourteenth of the largest at most.
        assert np.abs(held[0] - master).max() < 0.01


def residual_sum(state):
    return {path: np.asarray(s["residual"]).sum(0) for path, s in state.exchange.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "parts"),
    [
        (Signs(**HYBRID), 2),
        (Signs(**HYBRID, accumulate="local"), 4),
        (Signs(**FULL), 1),
        (SignsInBuckets(bucket_bytes=4096), 2),
    ],
    ids=str_of,
)
def test_what_optimizers_got_and_what_is_left_add_up_to_the_gradients(rows, strategy, parts):
    """In units of the mean, whatever the parts: steps of SGD are lr times what it got."""
    experiment = clicks(rows, strategy, optimizer=SGD, gradients__microbatch=8 // parts)
    data, mesh = experiment.data.build(), make_mesh(MESH)
    run, plain = Run.bind(experiment, data, mesh), Run.bind(changed(experiment, strategy=Fsdp(**HYBRID)), data, mesh)
    state, host = run.begin()
    first = {path: np.asarray(p) for path, p in state.params.items()}
    gradients = dict.fromkeys(first, 0.0)
    with run.feed(host, 4) as feed, plain.feed(host, 4) as other:
        for _ in range(4):
            before = {path: np.asarray(p) for path, p in state.params.items()}
            like = jax.tree.map(lambda leaf: leaf.sharding, plain.program.abstract_state())
            bare = jax.device_put(dataclasses.replace(state, exchange={}), like)
            other.take()
            after, _ = other.step(jax.tree.map(jnp.copy, bare))
            gradients = {p: g + (before[p] - np.asarray(after.params[p])) / 0.1 for p, g in gradients.items()}
            feed.take()
            state, _ = feed.step(state)
    left = residual_sum(state)
    for path, gradient in gradients.items():
        got = (first[path] - np.asarray(state.params[path])) / 0.1
        np.testing.assert_allclose(got + left[path], gradient, rtol=1e-9, atol=1e-12, err_msg=path)
        assert gradient.size == 1 or np.abs(left[path]).max() > 0


def losses_of(experiment, steps=8):
    run = Run.bind(experiment, experiment.data.build(), make_mesh(MESH))
    state, host = run.begin()
    found = []
    with run.feed(host, steps) as feed:
        for _ in range(steps):
            feed.take()
            state, loss = feed.step(state)
            found.append(float(loss))
    return found, state


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Signs(**HYBRID), Signs(**FULL, accumulate="local")], ids=str_of)
def test_residuals_follow_the_factor_on_the_loss(rows, strategy):
    """A factor that grows every two steps changes nothing."""
    scaling = LossScaling(initial=1024.0, interval=2)
    plain, want = losses_of(clicks(rows, strategy, optimizer=SGD))
    scaled, got = losses_of(clicks(rows, strategy, optimizer=SGD, gradients__loss_scaling=scaling))
    assert float(got.loss_scale.scale) == 1024.0 * 2**4
    np.testing.assert_allclose(scaled, plain, rtol=1e-12)
    for path, p in want.params.items():
        np.testing.assert_allclose(got.params[path], p, rtol=1e-9, atol=1e-12)
    left, kept = residual_sum(got), residual_sum(want)
    for path, residual in kept.items():
        np.testing.assert_allclose(left[path] / float(got.loss_scale.scale), residual, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_scheme_without_a_rule_for_the_factor_is_refused(rows):
    experiment = clicks(rows, Rooted(**HYBRID), gradients__loss_scaling=LossScaling())
    message = r"^OneBit: what it remembers of gradients has no rule .* gradients.loss_scaling does not go with this"
    with pytest.raises(UserError, match=message):
        Run.bind(experiment, experiment.data.build(), make_mesh(MESH))


def test_a_skipped_step_leaves_residuals_as_they_were_in_units_of_the_mean(rows):
    half = Precision(params="float64", compute="float16")
    scaling = LossScaling(initial=16.0, interval=100)
    experiment = clicks(rows, Signs(**HYBRID), precision=half, gradients__loss_scaling=scaling)
    run = Run.bind(experiment, experiment.data.build(), make_mesh(MESH))
    state, host = run.begin()
    with run.feed(host, 4) as feed:
        for number in range(4):
            feed.take()
            if number == 2:  # beyond what float16 can hold, with residuals in its units
                assert float(state.loss_scale.scale) == 16.0
                larger = dataclasses.replace(state.loss_scale, scale=state.loss_scale.scale * 2.0**36)
                exchange = jax.tree.map(lambda x: x * 2.0**36, state.exchange)
                state = dataclasses.replace(state, loss_scale=larger, exchange=exchange)
                before = jax.tree.map(np.asarray, (state.exchange, state.params))
            state, _ = feed.step(state)
            if number == 2:
                assert (int(state.loss_scale.skipped), float(state.loss_scale.scale)) == (1, 2.0**39)
                halved = jax.tree.map(lambda x: np.asarray(x) * 2, state.exchange)
                jax.tree.map(np.testing.assert_array_equal, halved, before[0])
                jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), before[1])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.exchange))
