"""Whole runs whose gradients travel compressed: killed and resumed, on other devices, beside plain ones; CLAN."""

import dataclasses
import functools
import io
import shutil
import types

import jax
import killed_run
import numpy as np
import pytest
import rich.console
import small_language_run
from changes import changed

from scalejax import optim
from scalejax.errors import UserError
from scalejax.parallel.compression.compressors import Blocks, Fp16, Identity, OneBit, TopKEntries
from scalejax.parallel.compression.two_way import Compression
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.links import SentBytes
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.plan import explain_sharding
from scalejax.plan.compiled import collectives
from scalejax.train import loop, run_folder
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.reports import exchange
from scalejax.train.runs.run import Run

HOSTS = MeshShape(replica=4)
LANS = optim.Lans(learning_rate=optim.Constant(value=1e-2))


def ddp(compressor, **fields):
    settings = {"plain_below": 512, "bucket_bytes": 8192, **fields}
    return Ddp(compression=Compression(compressor=compressor, **settings))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small_language_run.write(tmp_path_factory.mktemp("texts") / "documents")


def experiment_of(texts, strategy, **changes):
    settings = {"strategy": strategy, "placement__mesh": HOSTS, "steps": 8, "optimizer": LANS, **changes}
    return small_language_run.experiment(texts, **settings)


def bound(experiment, devices=8):
    mesh = make_mesh(experiment.placement.mesh, jax.devices()[:devices])
    return Run.bind(experiment, experiment.data.build(), mesh)


def restored(experiment, folder, devices=8):
    """The whole stored state of the newest checkpoint, on so many devices."""
    run = bound(experiment, devices)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        stored = run.to_stored(run.restore(checkpoints, None)[0])
    stored["key"] = jax.random.key_data(stored["key"])
    return jax.tree.map(np.asarray, stored)


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """A run that nothing stopped, by its strategy: (folder, what it said)."""

    @functools.cache
    def run(strategy):
        folder = tmp_path_factory.mktemp("whole") / "run"
        return folder, loop.train(experiment_of(texts, strategy), workdir=folder)

    return run


def remembered(state, hosts):
    """{bucket: the sum of all errors}, as long as the bucket."""
    found = {}
    for name, own in state["exchange"].items():
        worker, owner = own["worker"], own["owner"]
        workers = worker.reshape(hosts, len(worker) // hosts, -1).sum(0).ravel()
        owners = owner.reshape(hosts, len(owner) // hosts, -1).swapaxes(0, 1).ravel()
        found[name] = (workers + owners)[: own["values"][0]]
    return found


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(texts, whole, tmp_path):
    strategy = ddp(TopKEntries(k=0.05))
    killed_run.train(experiment_of(texts, strategy), tmp_path, at=7)
    states = [restored(experiment_of(texts, strategy), folder) for folder in (whole(strategy)[0], tmp_path)]
    jax.tree.map(np.testing.assert_array_equal, *states)
    exchange = states[0]["exchange"]
    assert len(exchange) > 1
    assert all(np.abs(own["worker"]).max() > 0 and np.abs(own["owner"]).max() > 0 for own in exchange.values())


@pytest.mark.slow
def test_a_run_goes_on_on_other_devices_with_the_same_sum_of_errors(texts, whole):
    strategy = ddp(TopKEntries(k=0.05))
    folder = whole(strategy)[0]
    here = remembered(restored(experiment_of(texts, strategy), folder), 4)
    for mesh, devices, hosts in ((MeshShape(replica=2), 8, 2), (MeshShape(replica=4), 4, 4)):
        there = restored(experiment_of(texts, strategy, placement__mesh=mesh), folder, devices)
        for name, total in remembered(there, hosts).items():
            np.testing.assert_allclose(total, here[name], atol=1e-6)
            assert np.abs(total).max() > 0


@pytest.mark.slow
def test_a_run_that_goes_on_on_one_host_applies_what_was_left(texts, whole, tmp_path):
    strategy = ddp(TopKEntries(k=0.05))
    shutil.copytree(whole(strategy)[0], tmp_path, dirs_exist_ok=True)
    assert all(
        np.abs(total).max() > 0 for total in remembered(restored(experiment_of(texts, strategy), tmp_path), 4).values()
    )
    here = experiment_of(texts, strategy, placement__mesh=MeshShape(), steps=9)
    before = restored(dataclasses.replace(here, steps=8), tmp_path)["params"]
    assert loop.train(here, workdir=tmp_path, resume="must")["exchange_residual"] == 0
    after = restored(here, tmp_path)
    assert all(not np.any(total) for total in remembered(after, 1).values())
    # A step of LANS is 1e-2 of a parameter's length: the rest is no shock.
    assert all(np.abs(after["params"][path] - x).max() < 0.1 for path, x in before.items())


@pytest.mark.slow
def test_another_compressor_does_not_go_on(texts, whole):
    folder = whole(ddp(TopKEntries(k=0.05)))[0]
    with pytest.raises(UserError, match="exchange"):
        restored(experiment_of(texts, ddp(OneBit())), folder)


@pytest.mark.slow
def test_float16_gets_gradients_of_the_mean_with_feedback_and_without(texts, tmp_path):
    """Nothing is fed back in the first step; sums over 200 targets, no power of two, would be rounded otherwise."""
    found = []
    for feedback in ("none", "vanilla"):
        strategy = ddp(Fp16(), error_feedback=feedback)
        experiment = experiment_of(texts, strategy, steps=1, data__length=25)
        loop.train(experiment, workdir=tmp_path / feedback)
        found.append(restored(experiment, tmp_path / feedback)["params"])
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_rates_of_corrected_errors_are_those_of_steps_that_were_taken(texts):
    schedule = optim.WarmupCosine(peak=1.0, warmup=0.5, final=0.1)
    experiment = experiment_of(texts, ddp(OneBit()), optimizer=optim.Sgd(learning_rate=schedule))
    program, rates = bound(experiment).program, schedule.build(experiment.steps)
    for step, skipped in ((3, 0), (5, 2), (7, 1)):
        scaling = types.SimpleNamespace(skipped=skipped) if skipped else None
        state = types.SimpleNamespace(step=jax.numpy.int32(step), loss_scale=scaling)
        assert float(program._learning_rate(state)) == pytest.approx(float(rates(step - skipped)), rel=1e-6)


@pytest.mark.slow
def test_clan_with_the_identity_is_lans(texts, tmp_path):
    """Three steps: the same losses and parameters, where gradients are added up in the order of devices both times."""
    plain, clan = (
        loop.train(experiment_of(texts, strategy, steps=3), workdir=tmp_path / name)
        for name, strategy in (("plain", Ddp(accumulate="local")), ("clan", ddp(Identity())))
    )
    assert clan["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-6)
    params = [
        restored(experiment_of(texts, strategy, steps=3), tmp_path / name)["params"]
        for name, strategy in (("plain", Ddp(accumulate="local")), ("clan", ddp(Identity())))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=2e-5, atol=1e-6), *params)
    # Nothing is left out and nothing remembered; a plain run has no such values.
    (window,) = windows(tmp_path / "clan")
    assert window["exchange_error"] == clan["exchange_error"] == 0
    assert window["exchange_residual"] == clan["exchange_residual"] == 0
    assert "exchange_error" not in windows(tmp_path / "plain")[0]


def windows(folder):
    return [r for r in run_folder.read_lines(folder / "metrics.jsonl") if r["kind"] == "window"]


@pytest.mark.slow
def test_what_grows_and_grows_is_said_while_training_and_in_the_report(texts, tmp_path, monkeypatch):
    """Of the first steps, in which errors of few values add up."""
    monkeypatch.setattr(exchange, "GROWING", 3)
    said = io.StringIO()
    experiment = experiment_of(texts, ddp(TopKEntries(k=0.01)), log_every=1)
    closing = loop.train(experiment, workdir=tmp_path, console=rich.console.Console(file=said, width=200))
    remembered = [window["exchange_residual"] for window in windows(tmp_path)]
    assert remembered[0] < remembered[1] < remembered[2] < remembered[3]
    assert closing["exchange_residual"] == remembered[-1]
    assert said.getvalue().count("Warning: The residual of the exchange has grown for 3 windows in a row") == 1
    assert "Ddp: each device sends at least" in said.getvalue()
    assert "has grown for 3 windows in a row" in (tmp_path / "report.html").read_text()


def test_what_a_run_cannot_go_on_from_or_begin_with_is_refused_before_anything_is_trained(texts):
    identities = [
        bound(experiment_of(texts, strategy)).identity()["exchange"]
        for strategy in (ddp(OneBit()), ddp(Blocks(format="int4:128")), ddp(Blocks(format="int4:2048")))
    ]
    assert len(set(identities)) == 3
    with pytest.raises(UserError, match=r"top-k, k=100000: a row of .* values has no 100000"):
        bound(experiment_of(texts, ddp(TopKEntries(k=100_000)))).identity()
    for k in (0, 0.0, 1.5, -1, True):
        with pytest.raises(UserError, match="k must be a whole number of at least 1, or a fraction"):
            TopKEntries(k=k)


def test_one_device_and_one_host_are_plain_and_say_so(texts):
    one = bound(experiment_of(texts, ddp(OneBit()), placement__mesh=MeshShape()), devices=1)
    assert one.program.remarks == ("Ddp: there is one device, so that nothing travels and nothing is compressed.",)
    host = bound(experiment_of(texts, ddp(OneBit()), placement__mesh=MeshShape()))
    assert "the mesh has one: they are summed as they are" in host.program.remarks[0]


@pytest.mark.slow
@pytest.mark.parametrize("trainable", [".*", "layers/.*"], ids=["all", "frozen"])
@pytest.mark.parametrize("strategy", [ddp(OneBit()), Sdp4Bit()], ids=["onebit", "sdp4bit"])
def test_bytes_that_a_run_states_are_those_of_its_compiled_step(texts, strategy, trainable):
    """But for what is not gradients: the loss and the norm, a few numbers. Frozen parameters do not travel."""
    settings = {"optimizer": optim.AdamW(), "trainable": trainable}  # without norms of tensors
    program = bound(experiment_of(texts, strategy, placement__mesh=MeshShape(replica=2), **settings)).program
    assert 0 < len(program.trained) < len(program.model.params) or trainable == ".*"
    step, arguments = program.repeated_step()
    compiled = step.trace(*arguments).lower().compile()
    found = collectives.sent(explain_sharding(compiled, program.mesh), program.mesh.shape)
    parts = program.compressed.sent(program.gradients(1).whole(program.model.params), program.mesh.shape)
    stated = sum(parts.values(), SentBytes())
    assert (found.within, found.between) == pytest.approx((stated.within, stated.between), abs=128)


@pytest.mark.slow
def test_compressed_runs_learn(texts, tmp_path):
    adam = optim.AdamW(learning_rate=optim.Constant(value=1e-2))
    for compressor in (OneBit(), TopKEntries(k=0.05)):
        experiment = experiment_of(texts, ddp(compressor), optimizer=adam)
        said = loop.train(experiment, workdir=tmp_path / type(compressor).__name__)
        assert said["val_loss"] < 5  # at first that of 256 equal chances: 5.5


def test_parts_are_added_up_first_and_momentum_counts_once(texts):
    with pytest.raises(UserError, match="accumulate=local"):  # before anything is allocated
        bound(experiment_of(texts, ddp(OneBit()), gradients__microbatch=1, data__batch_size=16))
    _ = bound(changed(experiment_of(texts, ddp(OneBit())), strategy__accumulate="local")).program.gradients(2)
    with pytest.raises(UserError, match=r"momentum 0.9: gradients would have momentum twice"):
        bound(experiment_of(texts, ddp(OneBit(), momentum=0.9)))
    bound(experiment_of(texts, ddp(OneBit(), momentum=0.9, double_momentum="allow")))
    bound(experiment_of(texts, ddp(OneBit(), momentum=0.9), optimizer=optim.Sgd()))


def test_every_rule_of_an_optimizer_is_looked_at(texts):
    """Momentum twice, and residuals that go by one learning rate where there are two."""

    def rules(*optimizers):
        paths = ("embed/.*", ".*")[-len(optimizers) :]
        return optim.ByPath(
            rules=tuple(optim.For(paths=p, optimizer=o) for p, o in zip(paths, optimizers, strict=True))
        )

    slow, fast = (optim.Sgd(learning_rate=optim.Constant(value=rate)) for rate in (0.1, 0.2))
    with pytest.raises(UserError, match=r"Sgd with momentum 0.9: gradients would have momentum twice"):
        bound(experiment_of(texts, ddp(OneBit(), momentum=0.9), optimizer=rules(optim.Sgd(momentum=0.9), slow)))
    with pytest.raises(UserError, match=r"'corrected' goes by the learning rate, and the rules .* have 2 schedules"):
        bound(experiment_of(texts, ddp(OneBit(), error_feedback="corrected"), optimizer=rules(slow, fast)))
    bound(experiment_of(texts, ddp(OneBit(), error_feedback="corrected"), optimizer=rules(slow, slow)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Sdp4Bit(param_dtype=None),
        dataclasses.replace(ddp(OneBit()), accumulate="local"),
    ],
    ids=["SDP4Bit", "one bit"],
)
def test_a_step_of_four_parts_is_that_of_one(texts, strategy):
    sgd = optim.Sgd(learning_rate=optim.Constant(value=0.1))
    found = []
    for microbatch in (4, 1):
        experiment = experiment_of(
            texts, strategy, optimizer=sgd, data__batch_size=32, gradients__microbatch=microbatch,
            placement__mesh=MeshShape(replica=2),
        )  # fmt: skip
        run = bound(experiment)
        state, host = run.begin()
        before = {path: np.asarray(p, np.float64) for path, p in state.params.items()}
        with run.feed(host, 1) as feed:
            feed.take()
            state, _ = feed.step(state)
        found.append({path: np.asarray(p, np.float64) - before[path] for path, p in state.params.items()})
    whole, parts = found
    for path, change in whole.items():
        assert np.linalg.norm(change) > 0
        assert np.linalg.norm(parts[path] - change) < 1e-5 * np.linalg.norm(change), path


@pytest.mark.slow
def test_sdp4bit_sends_nothing_of_its_own_along_context(texts):
    found = []
    for strategy in (Fsdp(sharding="SHARD_GRAD_OP", form="explicit"), Sdp4Bit(param_dtype=None)):
        run = bound(experiment_of(texts, strategy, placement__mesh=MeshShape(replica=2, fsdp=2, context=2)))
        function, arguments = run.program.repeated_step()
        seen = explain_sharding(function.trace(*arguments).lower().compile(), run.program.mesh)
        along = sorted((c.kind, c.axes, c.bytes) for c in collectives.total(seen) if "context" in c.axes)
        state, host = run.begin()
        losses = []
        with run.feed(host, 3) as feed:
            for _ in range(3):
                feed.take()
                state, loss = feed.step(state)
                losses.append(float(loss))
        found.append((along, losses))
    (plain, losses), (own, own_losses) = found
    assert plain
    assert [row[:2] for row in own] == [row[:2] for row in plain]
    for (*_, ours), (*_, theirs) in zip(own, plain, strict=True):
        assert 0 <= ours - theirs <= 8  # whether all of a copy is finite
    np.testing.assert_allclose(own_losses, losses, rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Sdp4Bit(), ddp(OneBit())], ids=["SDP4Bit", "one bit"])
def test_a_step_that_fails_leaves_a_checkpoint_without_it(texts, strategy, tmp_path):
    sgd = optim.Sgd(learning_rate=optim.Constant(value=1e18))
    experiment = experiment_of(
        texts, strategy, optimizer=sgd, placement__mesh=MeshShape(replica=2), checkpoints__every=1, log_every=1
    )
    with pytest.raises(UserError, match="not finite"):
        loop.train(experiment, workdir=tmp_path / "run")
    stored = restored(experiment, tmp_path / "run")
    assert stored["exchange"]
    assert all(np.isfinite(leaf.astype(np.float64)).all() for leaf in jax.tree.leaves(stored["exchange"]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stored["params"]))
