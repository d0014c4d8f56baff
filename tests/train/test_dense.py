"""Training without embedding tables: the mean over the global batch, clipping, windows, evaluation, resuming."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_language_run as small

from scalejax import chips, optim
from scalejax.data import Stage, StagedData
from scalejax.errors import UserError
from scalejax.parallel import ddp
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.rules import REPLICATED
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints, Precision
from scalejax.train.reports import summary as summaries
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


@pytest.fixture(scope="module")
def whole(texts, tmp_path_factory):
    """A run from its beginning to its end."""
    folder = tmp_path_factory.mktemp("run")
    return folder, loop.train(small.experiment(texts), workdir=folder)


def program_of(experiment, devices=1):
    data = experiment.data.build()
    mesh = make_mesh(MeshShape(fsdp=devices), jax.devices()[:devices])
    return binding.bind(experiment, data.schema, mesh), data


def batch_of(data, program):
    return convert.to_device(next(data.train_batches(start_example=0)), program)


@pytest.mark.slow
def test_a_step_is_the_optimizer_on_the_gradient_of_the_mean_over_all_targets(texts, x64):
    experiment = small.experiment(texts, gradients__clip=None, precision=Precision(params="float64"))
    program, data = program_of(experiment)
    state, batch = program.init(), batch_of(data, program)

    def mean(params):
        model, fields = program.model.merge(params), batch.fields
        logits = model(fields["tokens"], fields["positions"], fields["segment_ids"])
        nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), fields["targets"][..., None], axis=-1)[..., 0]
        return (nats * fields["weights"]).sum() / fields["weights"].sum()

    want, grads = jax.jit(jax.value_and_grad(mean))(state.params)
    updates, _ = jax.jit(program.transformation.update)(grads, state.optimizer, state.params)
    updated = optax.apply_updates(state.params, updates)
    after, loss = program.train_step(state, batch)
    np.testing.assert_allclose(loss, want, rtol=1e-12)
    for name, value in after.params.items():
        np.testing.assert_allclose(value, updated[name], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(after.metrics["steps"].grad_norm.value, optax.tree.norm(grads), rtol=1e-10)


@pytest.mark.slow
def test_the_gradient_is_scaled_down_to_the_norm_that_it_may_have(texts, x64):
    sgd = optim.Sgd(learning_rate=optim.Constant(value=1.0))
    changes = {"optimizer": sgd, "precision": Precision(params="float64")}
    moved = []
    for clip in (None, 0.1):
        program, data = program_of(small.experiment(texts, gradients__clip=clip, **changes))
        state = program.init()
        before = jax.tree.map(np.asarray, state.params)
        after, _ = program.train_step(state, batch_of(data, program))
        moved.append({name: np.asarray(value) - before[name] for name, value in after.params.items()})
        assert int(after.metrics["steps"].clipped) == (clip is not None)
    norm = np.sqrt(sum((step**2).sum() for step in moved[0].values()))
    assert norm > 0.1
    for name, step in moved[1].items():
        np.testing.assert_allclose(step, moved[0][name] * (0.1 / norm), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(
    ("devices", "microbatch"),
    [(8, 1), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((8, None), (1, 2)))],
)
def test_devices_and_parts_change_nothing_but_the_order_of_sums(texts, x64, devices, microbatch):
    found = []
    for n, most in ((1, None), (devices, microbatch)):
        experiment = small.experiment(texts, gradients__microbatch=most, precision=Precision(params="float64"))
        program, data = program_of(experiment, n)
        state, losses = program.init(), []
        batches = data.train_batches(start_example=0)
        for _ in range(3):
            state, loss = program.train_step(state, convert.to_device(next(batches), program))
            losses.append(float(loss))
        found.append((losses, jax.tree.map(np.asarray, state.params)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    for name, value in found[1][1].items():
        np.testing.assert_allclose(value, found[0][1][name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_parameters_begin_equal_to_the_bit_on_any_mesh(texts):
    one, eight = (program_of(small.experiment(texts), n)[0].init() for n in (1, 8))
    for name, value in eight.params.items():
        assert (np.asarray(value) == np.asarray(one.params[name])).all(), name
    with jax.threefry_partitionable(False), pytest.raises(UserError, match="jax_threefry_partitionable is off"):
        program_of(small.experiment(texts))[0].init()


@pytest.mark.slow
def test_replicas_in_several_processes_begin_from_a_broadcast(texts, monkeypatch):
    program, _ = program_of(small.experiment(texts, strategy=Ddp()), 8)
    calls = []
    broadcast = ddp.broadcast
    monkeypatch.setattr(ddp, "broadcast", lambda *args: calls.append(args) or broadcast(*args))
    alone = program.init()
    assert not calls
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        together = dataclasses.replace(program).init()  # one that has compiled nothing
    assert len(calls) == 1
    for name, value in alone.params.items():
        assert (np.asarray(value) == np.asarray(together.params[name])).all(), name


@pytest.mark.slow
def test_windows_and_evaluations_hold_the_mean_loss(whole, texts):
    folder, summary = whole
    lines = read_lines(folder / "metrics.jsonl")
    windows = [line for line in lines if line["kind"] == "window"]
    assert [line["step"] for line in windows] == [4, 8, 12]
    assert windows[-1]["examples_seen"] == 12 * 8
    assert windows[0]["loss"] > windows[-1]["loss"] > 0
    assert windows[-1]["weight_seen"] == sum(line["weight"] for line in windows)
    assert summary["val_perplexity"] == pytest.approx(np.exp(summary["val_loss"]))
    assert json.loads((folder / "summary.json").read_text())["val_loss"] == summary["val_loss"]
    again = loop.evaluate(small.experiment(texts), workdir=folder, split="validation")
    assert again["val_loss"] == summary["val_loss"]


@pytest.mark.slow
def test_a_validation_loss_is_the_mean_over_the_targets_of_the_split(whole, texts):
    folder, summary = whole
    experiment = small.experiment(texts)
    program, data = program_of(experiment)
    run = Run(program, data)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        state, host = run.restore(checkpoints, None)
    assert host.examples == 12 * 8
    assert host.best.step == 12
    assert host.best.value == summary["val_loss"]
    total = weight = 0.0
    model = program.model.merge(state.params)
    for batch in data.eval_batches("validation"):
        logits = np.asarray(model(batch.tokens, batch.positions, batch.segment_ids), np.float64)
        logits -= logits.max(-1, keepdims=True)
        nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        total, weight = total + (nats * batch.weights).sum(), weight + batch.weights.sum()
    assert summary["val_weight"] == weight
    assert summary["val_loss"] == pytest.approx(total / weight, rel=1e-5)  # float32 model


def test_a_run_in_parts_equals_one_in_one_piece_to_the_bit(whole, texts, tmp_path):
    experiment = small.experiment(texts)
    loop.train(dataclasses.replace(experiment, steps=4), workdir=tmp_path)
    loop.train(experiment, workdir=tmp_path, resume="must")
    states = []
    for folder in (whole[0], tmp_path):
        program, data = program_of(experiment)
        run = Run(program, data)
        with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
            states.append(run.restore(checkpoints, 12)[0])
    for a, b in zip(jax.tree.leaves(states[0]), jax.tree.leaves(states[1]), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert (np.asarray(a) == np.asarray(b)).all()
    windows = [[r for r in read_lines(f / "metrics.jsonl") if r["step"] > 4] for f in (whole[0], tmp_path)]
    assert windows[0] == windows[1]


@pytest.mark.slow
def test_batches_and_rows_grow_during_a_run_and_a_part_of_it_goes_on_to_the_same_bits(texts, tmp_path):
    data = small.experiment(texts).data
    stages = (
        Stage(from_tokens=0, data=dataclasses.replace(data, length=16)),
        Stage(from_tokens=500, data=dataclasses.replace(data, length=16, batch_size=16)),
        Stage(from_tokens=1000, data=dataclasses.replace(data, length=32, batch_size=16)),
    )
    experiment = small.experiment(texts, data=StagedData(stages=stages))
    loop.train(experiment, workdir=tmp_path / "whole")
    loop.train(dataclasses.replace(experiment, steps=4), workdir=tmp_path / "parts")
    loop.train(experiment, workdir=tmp_path / "parts", resume="must")
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    assert [line for line in one if line["step"] > 4] == [line for line in two if line["step"] > 4]
    # Four steps of 8 rows reach 512 tokens, two of 16 rows 1,024.
    windows = [line["examples_seen"] for line in one if line["kind"] == "window"]
    assert windows == [4 * 8, 4 * 8 + 4 * 16, 4 * 8 + 8 * 16]
    # Speed is that of the tokens that were there: of the second window two steps have rows of 16, two of 32.
    timing = [line for line in read_lines(tmp_path / "whole" / "timing.jsonl") if "tokens_per_s" in line]
    lengths = [line["tokens_per_s"] / line["samples_per_s"] for line in timing]
    assert lengths == pytest.approx([16, 24, 32])
    task = binding.bind(experiment, data.schema(), make_mesh(MeshShape(fsdp=1), jax.devices()[:1])).task
    flops = [task.flops_per_example(16), (task.flops_per_example(16) + task.flops_per_example(32)) / 2]
    found = [line["tflops_per_s_per_device"] * 1e12 * len(jax.devices()) / line["samples_per_s"] for line in timing]
    assert found[:2] == pytest.approx(flops)


def test_mfu_is_a_share_of_the_peak_that_is_named(texts, monkeypatch):
    program, data = program_of(small.experiment(texts), 8)
    run = Run(program, data)
    timing = {"tokens_per_s": 4096.0, "flops_per_s": 8 * 91.8e12}
    assert "mfu" not in run._speed(timing)  # of a CPU no peak is known
    for chip in (chips.V6E, dataclasses.replace(chips.V6E, bf16_flops_per_s=2 * 918e12, devices_per_chip=2)):
        with monkeypatch.context() as patch:
            patch.setattr(chips, "for_device_kind", lambda kind, chip=chip: chip)
            speed = run._speed(timing)
        assert (speed["tokens_per_s_per_device"], speed["tflops_per_s_per_device"]) == (512, pytest.approx(91.8))
        assert (speed["peak_tflops_per_s"], speed["mfu"]) == (918, pytest.approx(0.1))
        assert dict(summaries.speed(speed))["MFU"] == "10.0% of 918 TFLOP/s bf16, causal attention by half"


@pytest.mark.slow
def test_a_checkpoint_goes_on_upon_another_mesh(whole, texts):
    experiment = small.experiment(texts)
    found = []
    for devices in (1, 8):
        program, data = program_of(experiment, devices)
        run = Run(program, data)
        with Checkpointer(whole[0] / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
            state, _ = run.restore(checkpoints, 8)
        found.append(float(program.train_step(state, batch_of(data, program))[1]))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rate", "field"), [(optim.Constant(value=1e30), "value"), (optim.WarmupCosine(peak=1e30), "peak")]
)
def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(texts, tmp_path, rate, field):
    wild = optim.Sgd(learning_rate=rate)
    message = (
        rf"was not finite in the steps up to 4.* Lower the learning rate, --set optimizer.learning_rate.{field}=[.]"
    )
    with pytest.raises(UserError, match=message):
        loop.train(small.experiment(texts, optimizer=wild, gradients__clip=None), workdir=tmp_path)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.slow
def test_batches_without_a_target_are_named_as_what_they_are(texts, tmp_path, monkeypatch):
    placed = convert.place_fields

    def nothing_counts(program, batch, processes, step):
        fields = placed(program, batch, processes, step)
        return {**fields, "weights": jnp.zeros_like(fields["weights"])}

    monkeypatch.setattr(convert, "place_fields", nothing_counts)
    for scaling in (None, LossScaling()):  # gradients that are no numbers for want of a weight are no overflow
        with pytest.raises(UserError, match="Nothing counts in the batches up to step 4"):
            experiment = small.experiment(texts, gradients__loss_scaling=scaling)
            loop.train(experiment, workdir=tmp_path / str(scaling is None))
        assert not list(tmp_path.glob("*/checkpoints/[0-9]*"))


@pytest.mark.slow
def test_mistakes_are_named(texts):
    experiment = small.experiment(texts)
    longer = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, length=128))
    with pytest.raises(UserError, match=r"data.length is 128 positions, but the model is meant for at most 64"):
        binding.bind(longer, longer.data.schema(), make_mesh(MeshShape(), jax.devices()[:1]))
    fewer = dataclasses.replace(experiment, model=dataclasses.replace(small.MODEL, vocabulary=100))
    with pytest.raises(UserError, match=r"model.vocabulary is 100, but the tokenizer of the data has"):
        binding.bind(fewer, fewer.data.schema(), make_mesh(MeshShape(), jax.devices()[:1]))
    with pytest.raises(UserError, match="batch_size 8 does not divide over the batch axes"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape(fsdp=3), jax.devices()[:3]))
    for sizes, message in (
        (
            {"tensor": 8},
            r"tensor=8, which does not divide heads=4 of 'layers/attention/out'.* Take tensor=1 or 2 or 4 ",
        ),
        (
            {"stage": 4, "fsdp": 2},
            r"stage=4, which does not divide layers=2 of .* Take stage=1 or 2 .* with layers=4[.]",
        ),
    ):
        mesh = make_mesh(MeshShape(**{"fsdp": 1, **sizes}), jax.devices()[:8])
        with pytest.raises(UserError, match=message):
            binding.bind(experiment, experiment.data.schema(), mesh)
    whole = small.experiment(texts, placement__rules=REPLICATED, strategy=Fsdp(form="explicit"))
    with pytest.raises(UserError, match=r"placement.mesh.stage=2 as a pipeline, but placement.rules cut no parameter"):
        binding.bind(whole, whole.data.schema(), make_mesh(MeshShape(fsdp=4, stage=2)))
    for changes, sizes, message in (
        ({"attention": "cudnn"}, {}, "attention=cudnn is for a GPU, and this is compiled for a CPU.*attention=none"),
        ({"attention": "reference", "context_method": "ring"}, {"context": 2}, '"reference" .* model.attention=xla'),
    ):
        named = dataclasses.replace(experiment, model=dataclasses.replace(small.MODEL, **changes))
        mesh = make_mesh(MeshShape(**{"fsdp": 1, **sizes}), jax.devices()[: sizes.get("context", 1)])
        program = binding.bind(named, named.data.schema(), mesh)
        with pytest.raises(UserError, match=message):
            program.train_step.trace(program.abstract_state(), program.abstract_batch())
    scored = dataclasses.replace(experiment, checkpoints=Checkpoints(best_metric="logloss"))
    with pytest.raises(UserError, match=r"best_metric is 'logloss', but .* --set checkpoints.best_metric=loss"):
        binding.bind(scored, experiment.data.schema(), make_mesh(MeshShape(fsdp=8)))
    buckets = dataclasses.replace(experiment, strategy=Ddp())
    with pytest.raises(UserError, match=r"Ddp: .* is sharded over tensor.* .--set strategy=Fsdp"):
        binding.bind(buckets, experiment.data.schema(), make_mesh(MeshShape(fsdp=4, tensor=2)))
    with pytest.raises(ValueError, match="clip must be above 0"):
        small.experiment(texts, gradients__clip=0.0)
