"""State in host memory, scaled losses and compiler options of a run: what they change, and what they must not."""

import dataclasses

import jax
import numpy as np
import pytest
import small_language_run as small

from scalejax import configs, optim
from scalejax.configs import overrides
from scalejax.errors import UserError
from scalejax.parallel import offload, xla_flags
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures, RowwiseAdagrad
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan
from scalejax.parallel.embedding.tiers import Tier
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Gradients, Precision, Tables
from scalejax.train.run_folder import environment_record, read_lines
from scalejax.train.runs import binding, scoring

EIGHT = MeshShape(replica=2, fsdp=4)
BOTH = "optimizer and parameters"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def bind(texts, shape=EIGHT, **changes):
    return small.bind(texts, shape, **changes)


def validation_loss(run, state):
    batches = run.program.task.eval_batches(run.data, run.mesh, "validation")
    return scoring.score(run.program, state, batches).measure()["loss"]


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def assert_same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "where"),
    [
        pytest.param(Fsdp(), BOTH, id="implicit, both"),
        pytest.param(Fsdp(sharding="HYBRID_SHARD", form="explicit"), "optimizer", id="hybrid"),
    ],
)
def test_state_in_host_memory_trains_as_state_on_devices_does(texts, x64, strategy, where):
    found = {}
    for at in ("none", where):
        run = bind(texts, strategy=strategy, placement__offload=at, precision=Precision(params="float64"))
        state, losses = small.steps(run, *run.begin(), 3)
        found[at] = (jax.tree.map(np.asarray, (state.params, state.optimizer)), losses, validation_loss(run, state))
        assert kinds(state.params) == {"pinned_host" if at == BOTH else "device"}
        assert kinds(state.optimizer) == {"device" if at == "none" else "pinned_host"}
    np.testing.assert_allclose(found[where][1], found["none"][1], rtol=1e-12)
    assert found[where][2] == pytest.approx(found["none"][2], rel=1e-12)
    for a, b in zip(jax.tree.leaves(found[where][0]), jax.tree.leaves(found["none"][0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_devices_that_get_offloading_wrong_are_refused_before_anything_runs(texts, monkeypatch):
    monkeypatch.setattr(offload, "_problem", lambda device: "gives other gradients with offloaded parameters")
    assert bind(texts).in_flight  # no offload, no test of it
    with pytest.raises(UserError, match=r"gives other gradients .* Use offload='none'"):
        bind(texts, placement__offload="optimizer")


@pytest.mark.slow
def test_averages_that_begin_with_another_run_lie_on_the_devices(texts, tmp_path):
    loop.train(small.experiment(texts, steps=1), workdir=tmp_path)
    averages = (optim.Average(decay=0.5),)
    run = bind(texts, placement__offload=BOTH, averages=averages, init=str(tmp_path), trainable="layers/.*")
    state, host = run.begin()
    assert kinds(state.params) == {"pinned_host"}
    assert kinds(state.averages) == {"device"}
    assert set(state.averages["ema"]) == run.program.trained
    for name, average in state.averages["ema"].items():
        np.testing.assert_array_equal(np.asarray(average), np.asarray(state.params[name]))
    _, losses = small.steps(run, state, host, 1)
    assert np.isfinite(losses).all()


@pytest.mark.slow
def test_a_factor_on_the_loss_changes_no_gradient(texts, x64):
    # The weight of a batch is divided by before the gradient is taken and not after.
    found = []
    for scaling in (None, LossScaling(initial=2.0**20)):
        wide = Precision(params="float64")
        gradients = Gradients(clip=0.3, microbatch=1, loss_scaling=scaling)
        run = bind(texts, strategy=Ddp(accumulate="local"), gradients=gradients, precision=wide)
        state, losses = small.steps(run, *run.begin(), 3)
        found.append((losses, jax.tree.map(np.asarray, state.params), float(state.metrics["steps"].grad_norm.value)))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    assert found[1][2] == pytest.approx(found[0][2], rel=1e-12)
    for name, value in found[1][1].items():
        np.testing.assert_allclose(value, found[0][1][name], rtol=1e-9, atol=1e-12, err_msg=name)


HALF = {
    "precision": Precision(compute="float16"),
    "strategy": Fsdp(form="explicit", param_dtype="float16"),
    "gradients__loss_scaling": LossScaling(initial=2.0**22, interval=4),
}


def test_steps_that_overflow_are_skipped_and_the_run_goes_on(texts):
    run = bind(texts, **HALF)
    state, host = run.begin()
    first, seen = jax.tree.map(np.asarray, (state.params, state.optimizer)), []
    for number in range(12):
        state, _ = small.steps(run, state, host.after(number * 8), 1)
        scale = state.loss_scale
        seen.append((float(scale.scale), int(scale.skipped)))
        assert int(state.step) == number + 1
        same = all(
            np.array_equal(a, b)
            for a, b in zip(jax.tree.leaves((state.params, state.optimizer)), jax.tree.leaves(first), strict=True)
        )
        assert same == (int(scale.skipped) == number + 1)  # until the first step that is taken
    skipped = seen[-1][1]
    assert 1 <= seen[0][1] <= skipped < 12
    assert seen[0][0] == 2.0**21
    sums = state.metrics["steps"]
    assert (int(sums.skipped), int(sums.nonfinite), int(sums.steps)) == (skipped, 0, 12)
    assert np.isfinite([float(sums.grad_norm.value), float(sums.grad_norm_max)]).all()


@pytest.mark.slow
def test_half_precision_learns_what_float32_does(texts):
    losses, scaling = {}, dataclasses.replace(HALF["gradients__loss_scaling"], initial=2.0**12)
    for name, changes in (("half", {**HALF, "gradients__loss_scaling": scaling}), ("float32", {})):
        run = bind(texts, **changes)
        state, losses[name] = small.steps(run, *run.begin(), 12)
        assert state.loss_scale is None or int(state.loss_scale.skipped) == 0
    np.testing.assert_allclose(losses["half"], losses["float32"], rtol=0.01)
    assert losses["half"][-1] < 0.95 * losses["half"][0]


@pytest.mark.slow
def test_a_run_in_parts_with_a_scaled_loss_and_state_on_the_host_equals_one_in_one_piece_to_the_bit(texts, tmp_path):
    experiment = small.experiment(texts, **HALF, placement__offload=BOTH)
    whole = loop.train(experiment, workdir=tmp_path / "whole")
    loop.train(dataclasses.replace(experiment, steps=4), workdir=tmp_path / "parts")
    parts = loop.train(experiment, workdir=tmp_path / "parts", resume="must")
    assert parts["val_loss"] == whole["val_loss"]
    states = []
    for name, where in (("whole", BOTH), ("parts", BOTH), ("parts", "none")):  # a checkpoint knows no host
        run = bind(texts, **HALF, placement__offload=where)
        with Checkpointer(tmp_path / name / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
            states.append(run.restore(checkpoints, 12)[0])
        assert kinds(states[-1].params) == kinds(states[-1].optimizer) == {"pinned_host" if where == BOTH else "device"}
    assert_same_bits(states[0], states[1])
    assert_same_bits(states[1], states[2])
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts")]
    windows = [[line for line in found if line["kind"] == "window"] for found in lines]
    assert windows[0] == windows[1]
    assert sum(line["skipped"] for line in windows[0]) == int(states[0].loss_scale.skipped) > 0
    assert windows[0][-1]["loss_scale"] == float(states[0].loss_scale.scale)


@pytest.mark.slow
def test_an_overflow_at_the_least_factor_ends_the_run(texts, tmp_path):
    stuck = LossScaling(initial=2.0**40, smallest=2.0**40)
    with pytest.raises(UserError, match="gradient of 4 steps was not finite in the steps up to 4"):
        loop.train(small.experiment(texts, **{**HALF, "gradients__loss_scaling": stuck}), workdir=tmp_path)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Fsdp(param_dtype="float64"), "strategy.param_dtype is float64, but this jax has 64-bit types switched off"),
        (Ddp(output_dtype="bfloat16"), "strategy.output_dtype is bfloat16, but a run uses nothing"),
    ],
)
def test_dtypes_that_would_do_nothing_are_refused(texts, strategy, message):
    experiment = small.experiment(texts, strategy=strategy)
    with pytest.raises(UserError, match=message):
        binding.bind(experiment, experiment.data.schema(), make_mesh(EIGHT))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"precision": Precision(compute="float16")}, "precision.compute"),
        ({"strategy": Fsdp(param_dtype="float16")}, "strategy.param_dtype"),
        ({"strategy": Ddp(reduce_dtype="float16")}, "strategy.reduce_dtype"),
    ],
)
def test_half_precision_without_a_scaled_loss_is_refused(texts, changes, field):
    experiment = small.experiment(texts, **changes)
    with pytest.raises(UserError, match=rf"{field} is float16, .* Set --set gradients.loss_scaling=LossScaling"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(EIGHT))


def test_models_with_tables_too_need_a_scaled_loss_for_half_precision():
    sets = ["precision.compute=float16"]
    experiment = configs.load("dlrm-smoke", sets)
    with pytest.raises(UserError, match=r"precision.compute is float16, .* Set --set gradients.loss_scaling="):
        binding.bind(experiment, experiment.data.schema(), make_mesh(EIGHT))
    scaled = configs.load("dlrm-smoke", [*sets, "gradients.loss_scaling=LossScaling"])
    assert binding.bind(scaled, scaled.data.schema(), make_mesh(EIGHT)).abstract_state().loss_scale is not None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tables.dtype=bfloat16", "tables.dtype is 'bfloat16', but LlamaConfig has no embedding tables"),
        ("tables.full_every=4", "tables.full_every is 4, but LlamaConfig has no embedding tables"),
        ("gradients.microbatch=cache", "gradients.microbatch is 'cache', but LlamaConfig has no embedding tables"),
        ("evaluation.validation=progressive", "evaluation.validation is 'progressive', but no metric of LlamaConfig"),
    ],
)
def test_what_means_nothing_without_tables_is_refused(texts, setting, message):
    experiment = overrides.apply(small.experiment(texts), [setting])
    with pytest.raises(UserError, match=f"^{message}"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(EIGHT))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Tables)])
def test_options_of_tables_are_refused_without_tables(texts, field):
    other = {
        "optimizer": RowwiseAdagrad(learning_rate=1.0),
        "schedule": optim.Constant(value=0.5),
        "sharding": ShardingPlan(replicas="copy"),
        "exchange": Exchange(overflow="count"),
        "implementation": "xla",
        "accumulate": "exact",
        "id_maps": (MappedFeatures(features=("item",), id_map=IdMapConfig(rows=1217)),),
        "tiers": (Tier(features=("item",), slots=100),),
        "dedup": (DedupGroup(features=("shop",), rows_per_example=1.0),),
        "pipeline": "ids",
        "dtype": "bfloat16",
        "full_every": 4,
    }
    experiment = small.experiment(texts, **{f"tables__{field}": other[field]})
    with pytest.raises(UserError, match=rf"^tables.{field} is .* LlamaConfig has no embedding tables"):
        binding.bind(experiment, experiment.data.schema(), make_mesh(EIGHT))


def test_a_checkpoint_of_a_scaled_loss_is_told_from_one_without(texts):
    runs = [bind(texts, MeshShape(fsdp=1), gradients__loss_scaling=scaling) for scaling in (None, LossScaling())]
    assert [run.identity()["optimizer"] for run in runs] == ["AdamW", "AdamW of a scaled loss"]


@pytest.mark.slow
def test_named_options_reach_the_compiler_of_their_platform_alone(texts, monkeypatch):
    monkeypatch.setitem(xla_flags.SETS, "cpu-odd", xla_flags.FlagSet("cpu", "", (("xla_go_faster", True),)))
    names = ("gpu-latency-hiding", "tpu-async-collectives")
    for given, reach in ((names, None), ((*names, "cpu-odd"), {"xla_go_faster": True})):
        run = bind(texts, MeshShape(fsdp=1), xla_flags=given)
        program = run.program
        assert program.compiler_options == reach
        assert environment_record({}, run.compiler_options)["compiler_options"] == (reach or {})
    state, batch = program.abstract_state(), program.abstract_batch()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        program.train_step.lower(state, batch).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        program.eval_step(program.init(), convert.to_device(next(run.data.train_batches(start_example=0)), program))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"xla_flags": ("gpu-latency-hidng",)}, "there is no set 'gpu-latency-hidng'. Did you mean"),
        ({"xla_flags": ("gpu-large-messages", "gpu-separate-all-reduces")}, "disagree about"),
        (
            {"placement__offload": "activations"},
            "offload must be one of 'none', 'optimizer', 'optimizer and parameters'",
        ),
    ],
)
def test_names_that_mean_nothing_are_refused_on_any_machine(texts, changes, message):
    with pytest.raises(ValueError, match=message):
        small.experiment(texts, **changes)
