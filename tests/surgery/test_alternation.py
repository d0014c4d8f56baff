"""Runs whose click model shrinks and grows in turn."""

import dataclasses
import itertools
import json
import logging
import re

import jax
import killed_run
import numpy as np
import pytest
import small_run
from changes import changed

from scalejax import optim
from scalejax.configs import overrides
from scalejax.errors import UserError
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import FactorizationMachine, MlpExperts, SelfAttention
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.parallel.fsdp import Fsdp
from scalejax.surgery.alternation import alternate, kept_width, narrowed
from scalejax.surgery.units import ResizeUnits
from scalejax.train import loop, phases
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints import trained
from scalejax.train.experiment import Checkpoints
from scalejax.train.reports import summary as summaries
from scalejax.train.run_folder import read_lines
from scalejax.train.runs.run import Run

MODEL = DlrmConfig(dim=4, bottom_hidden=(8,), top_hidden=(16, 8))
SCHEDULE = ((4, 1.0), (3, 0.5), (3, 1.0), (3, 0.5), (2, 1.0))


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def whole_model(rows):
    return small_run.experiment(
        rows,
        model=MODEL,
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=1e-2, warmup=0.2)),
        tables__schedule=optim.WarmupCosine(peak=1.0, warmup=0.2),
        log_every=1,
        evaluation__every=0,
        checkpoints=Checkpoints(every=2, keep_last=2, keep_best=0),
        averages=(optim.Average(name="ema", decay=0.9),),
    )


def alternating(rows, growth="zero", schedule=SCHEDULE, score="norm", **changes):
    return alternate(changed(whole_model(rows), **changes), schedule, growth=growth, score=score)


def by_path(optimizer):
    rules = (optim.For(paths="top/.*", optimizer=optim.AdamW()), optim.For(paths=".*", optimizer=optimizer))
    return optim.ByPath(rules=rules)


def dense(folder, step):
    return {name: np.asarray(x[...]) for name, x in trained.open_dense(folder, step).items()}


def tables(folder, step):
    opened = trained.Checkpoint.read(folder / "checkpoints" / str(step)).whole(("tables.",))
    return {name: np.asarray(x[...]) for name, x in opened.items()}


def follows(runs, folder, number):
    """State of a phase at its very beginning."""
    with loop._checkpointer(folder / "checkpoints", runs[0]) as checkpoints:
        loop._become(checkpoints, runs[number - 1])
        state, _ = runs[number].follow(runs[number - 1], checkpoints, runs[: number - 1])
    return state


def leaves(run, state):
    """Arrays of a state by the names of a checkpoint."""
    return manifests.named_leaves(run.to_stored(state))


class Compiled(logging.Handler):
    """Names of what jax compiles."""

    def __init__(self):
        super().__init__()
        self.names = []

    def emit(self, record):
        if record.getMessage().startswith("Compiling "):
            self.names.append(record.getMessage().split()[1])


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    folder, heard = tmp_path_factory.mktemp("whole"), Compiled()
    logger, follow, operate, experiment = (
        logging.getLogger("jax"),
        Run.follow,
        ResizeUnits.operate_state,
        alternating(rows),
    )

    def operated(surgery, history, fresh, optimizers):
        assert len(history) == len(optimizers)
        assert set(optimizers) == {experiment.optimizer}
        return operate(surgery, history, fresh, optimizers)

    logger.addHandler(heard)
    try:
        with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Run, "follow", lambda self, *a: heard.names.append(f"phase {self.phase.name}") or follow(self, *a)
            )
            patch.setattr(ResizeUnits, "operate_state", operated)
            summary = loop.train(experiment, workdir=folder)
    finally:
        logger.removeHandler(heard)
    return folder, {**summary, "experiment": experiment}, heard.names


def test_widths_are_shares_rounded_up_to_a_multiple():
    found = [kept_width(n, share, m) for n, share, m in ((512, 0.5, 1), (30, 0.1, 1), (100, 0.3, 8), (10, 0.9, 8))]
    assert found == [256, 3, 32, 10]
    assert [kept_width(n, share, m) for n, share, m in ((10, 0.25, 1), (33, 0.5, 4), (7, 0.01, 1))] == [3, 20, 1]
    layer = EnsembleLayer(
        modules=(
            FactorizationMachine(outputs=4, hidden=(64, 32), attention_hidden=(16,)),
            SelfAttention(outputs=4),
            SelfAttention(outputs=4, hidden=24),
            MlpExperts(outputs=4, hidden=(40,)),
        )
    )
    whole = DhenConfig(dim=4, layers=(layer,), head_hidden=(48,), bottom_hidden=(20, 16))
    half = narrowed(whole, 0.5, 8)
    machine, without, attention, experts = half.layers[0].modules
    assert (machine.hidden, machine.attention_hidden) == ((32, 16), (8,))
    assert (without.hidden, attention.hidden, experts.hidden) == (8, 16, (24,))  # without: of 4 dim
    assert (half.head_hidden, half.bottom_hidden) == ((24,), (16, 8))
    assert narrowed(whole, 1.0) == whole
    alone = EnsembleLayer(modules=(SelfAttention(outputs=4),))
    assert narrowed(DhenConfig(dim=6, layers=(alone,), head_hidden=()), 0.25).layers[0].modules[0].hidden == 6
    with pytest.raises(UserError, match=r"layers\.0\.modules\.0\.hidden has a width of 16, below the multiple of 17"):
        narrowed(DhenConfig(dim=4, layers=(alone,), head_hidden=()), 0.5, 17)


def test_a_schedule_is_phases_under_one_schedule_of_rates(rows):
    experiment = alternating(rows, growth="resume")
    found = phases.resolved(experiment)
    assert [(p.name, p.start, p.stop, p.optimizer_from, p.experiment.steps) for p in found] == [
        ("", 0, 4, 0, 15),
        ("1-cut", 4, 7, 0, 15),
        ("2-grow", 7, 10, 0, 15),
        ("3-cut", 10, 13, 0, 15),
        ("4-grow", 13, 15, 0, 15),
    ]
    assert [p.experiment.model.top_hidden for p in found] == [(16, 8), (8, 4), (16, 8), (8, 4), (16, 8)]
    assert [sorted(p.pinned) for p in found] == [[4, 7, 10, 13], [4, 7, 10, 13], [4, 7, 10, 13], [7, 10, 13], [10, 13]]
    assert [p.pinned for p in phases.resolved(alternating(rows))] == [frozenset()] * 5
    assert experiment.optimizer.counts == "each"  # pyright: ignore[reportAttributeAccessIssue]


def test_moments_that_are_corrected_by_steps_count_them_for_each_number(rows):
    for optimizer in (optim.Adam(), optim.AdamW(), by_path(optim.Adam())):
        experiment = alternating(rows, optimizer=optimizer)
        rules = getattr(experiment.optimizer, "rules", (experiment,))
        assert {rule.optimizer.counts for rule in rules} == {"each"}
        loop._bind(experiment, None)
    assert alternating(rows, optimizer=by_path(optim.Sgd())).optimizer.rules[1].optimizer == optim.Sgd()


@pytest.mark.slow
def test_one_schedule_of_rates_goes_over_all_phases(whole):
    lines = read_lines(whole[0] / "metrics.jsonl")
    rates = {line["step"]: line["learning_rate"] for line in lines if line["kind"] == "window"}
    schedule = optim.WarmupCosine(peak=1e-2, warmup=0.2).build(15)
    np.testing.assert_allclose([rates[step] for step in range(1, 16)], [schedule(s) for s in range(1, 16)], rtol=1e-6)
    arrays = dense(whole[0], 15)
    assert arrays["optimizer.2.count"] == 15
    assert set(np.unique(arrays["optimizer.0.count.top/layers/0/bias"])) == {2, 15}
    assert arrays["params.top/layers/0/kernel"].shape == (arrays["params.top/layers/0/kernel"].shape[0], 16)


def same_tables(run, state, before):
    stored = {name: x for name, x in leaves(run, state).items() if name.startswith("tables.")}
    assert set(before) == set(stored)
    assert any("rows_" not in name for name in before)
    for name, array in before.items():
        np.testing.assert_array_equal(np.asarray(stored[name]), array, err_msg=name)


def test_tables_go_on_to_the_bit(rows, tmp_path):
    experiment = alternating(rows, schedule=((2, 1.0), (1, 0.5), (1, 1.0)))
    runs = loop._bind(experiment, None)
    run = runs[0]
    state, host = run.begin()
    with loop._checkpointer(tmp_path / "checkpoints", run) as checkpoints:
        with run.feed(host, 2) as feed:
            for _ in range(2):
                feed.take()
                state, _ = feed.step(state)
            checkpoints.save(2, run.to_stored(state), host.to_dict())
        before = {name: np.asarray(x) for name, x in leaves(run, state).items() if name.startswith("tables.")}
        checkpoints.wait()
        after, _ = runs[1].follow(run, checkpoints)
    same_tables(runs[1], after, before)


@pytest.mark.slow
def test_tables_go_on_through_a_cut_and_a_growth_and_the_model_computes_what_it_did(rows, tmp_path):
    experiment = alternating(rows, schedule=((4, 1.0), (3, 0.5), (2, 1.0)), checkpoints__keep_last=20)
    loop.train(experiment, workdir=tmp_path)
    runs = loop._bind(experiment, None)
    for number, step in ((1, 4), (2, 7)):
        state = follows(runs, tmp_path, number)
        same_tables(runs[number], state, tables(tmp_path, step))
        there, _ = runs[number - 1].open_to_score(tmp_path, step)
        losses = [
            run.score(own, "test")["test_logloss"] for run, own in ((runs[number - 1], there), (runs[number], state))
        ]
        if number == 2:
            np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
        else:
            assert abs(losses[0] / losses[1] - 1) > 1e-5


@pytest.mark.slow
def test_each_width_is_compiled_once(whole):
    _, _, names = whole
    starts = [0, *(n for n, name in enumerate(names) if name.startswith("phase ")), len(names)]
    phases = [names[start:stop] for start, stop in itertools.pairwise(starts)]
    for what in ("jit(_train_step)", "jit(_eval_step)", "jit(create)"):
        counts = [phase.count(what) for phase in phases]
        assert min(counts[:2]) > 0, names
        assert counts[2:] == [0, 0, 0], (what, counts)
    # All that the first cut and the first growth needed is there when there is a second.
    assert phases[3:] == [["phase 3-cut"], ["phase 4-grow"]]


@pytest.mark.slow
def test_the_summary_says_what_each_phase_took(whole):
    folder, summary, _ = whole
    found = summary["phases"]
    assert [(p["phase"], p["steps"]) for p in found] == [
        ("", 4),
        ("1-cut", 3),
        ("2-grow", 3),
        ("3-cut", 3),
        ("4-grow", 2),
    ]
    models = [phase.experiment.model for phase in phases.resolved(summary["experiment"])]
    schema = summary["experiment"].data.schema()
    each = [64 * model.task(schema).flops_per_example() for model in models]
    assert each[1] < each[0] == each[2]
    assert [p["flops"] for p in found] == [p["steps"] * flops for p, flops in zip(found, each, strict=True)]
    assert all(p["train_s"] > 0 for p in found)
    # A width that was there before compiles nothing.
    assert [p["compile_s"] > 0 for p in found] == [True, True, False, False, False]
    assert [p["handover_s"] > 0 for p in found] == [False, True, True, True, True]
    assert json.loads((folder / "summary.json").read_text())["phases"] == found
    lines, times = (read_lines(folder / f"{name}.jsonl") for name in ("metrics", "timing"))
    steps = [name for p in found for name in [p["phase"]] * p["steps"]]
    assert [line["phase"] for line in lines if line["kind"] == "window"] == [t["phase"] for t in times] == steps
    counted = [line["flops_seen"] for line in lines if line["kind"] == "window"]
    assert counted == list(itertools.accumulate(each[[p["phase"] for p in found].index(name)] for name in steps))
    scores = [line["ne"] for line in lines if line["kind"] == "evaluation" and line["split"] == "validation"]
    assert [p["val_ne"] for p in found] == scores
    report = (folder / "report.html").read_text()
    for title in ("phase", "steps", "TFLOP", "training", "compilation", "hand-over", "validation, NE"):
        assert re.search(rf"<th[^>]*>{title}</th>", report), title
    for part, score in zip(found, scores, strict=True):
        taken = [summaries.duration(part[name]) or "" for name in ("train_s", "compile_s", "handover_s")]
        cells = [part["phase"] or "first", f"{part['steps']:,}", f"{part['flops'] / 1e12:.4g}", *taken]
        row = "".join(rf"<td[^>]*>{re.escape(cell)}</td>" for cell in cells)
        assert re.search(rf"<tr>{row}[^\n]*?>{score:.4f}</td>", report), cells


@pytest.mark.slow
@pytest.mark.parametrize(("step", "growth"), [(6, "zero"), (8, "resume"), (14, "zero")])
def test_a_run_that_is_killed_in_any_phase_goes_on_to_the_same_bits(step, growth, rows, tmp_path):
    """In a cut, in the growth after it, and in the last growth."""
    experiment = alternating(rows, growth)
    loop.train(experiment, workdir=tmp_path / "whole")
    killed_run.train(experiment, tmp_path / "killed", at=step)
    for read in (dense, tables):
        one, two = (read(tmp_path / name, 15) for name in ("whole", "killed"))
        assert set(one) == set(two)
        for name, array in one.items():
            np.testing.assert_array_equal(two[name], array, err_msg=name)
    lines = [read_lines(tmp_path / name / "metrics.jsonl") for name in ("whole", "killed")]
    assert lines[0] == lines[1]
    parts = [json.loads((tmp_path / name / "summary.json").read_text())["phases"] for name in ("whole", "killed")]
    assert all(p["train_s"] > 0 for p in parts[1])
    assert all(p["handover_s"] > 0 for p in parts[1][1:])
    one, two = ([{k: x for k, x in p.items() if not k.endswith("_s")} for p in found] for found in parts)
    assert one == two


@pytest.mark.slow
def test_units_that_were_cut_come_back_as_they_were_although_few_checkpoints_are_kept(rows, tmp_path):
    experiment = alternating(rows, "resume", schedule=((4, 1.0), (7, 0.5), (2, 1.0)), checkpoints__keep_last=1)
    loop.train(experiment, workdir=tmp_path)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()) == [4, 11, 13]
    runs = loop._bind(experiment, None)
    now = {name: np.asarray(x) for name, x in leaves(runs[2], follows(runs, tmp_path, 2)).items() if "top/" in name}
    before, small = dense(tmp_path, 4), dense(tmp_path, 11)
    kinds = ("params", "optimizer.0.mu", "optimizer.0.nu", "optimizer.0.count")
    came, cut, kept = (
        set(zip(*(own[f"{kind}.top/layers/0/bias"].tolist() for kind in kinds), strict=True))
        for own in (now, before, small)
    )
    assert len(came & cut) == 8
    assert came - cut == kept


@pytest.mark.slow
def test_units_come_back_where_the_model_also_changes_in_what_no_state_shows(rows, tmp_path):
    cut, grown = alternating(rows, "resume", schedule=((2, 1.0), (3, 0.5), (1, 1.0)), checkpoints__keep_last=1).phases
    grown = dataclasses.replace(grown, changes={**grown.changes, "model.dropout": 0.1})
    experiment = dataclasses.replace(alternating(rows, schedule=((2, 1.0), (1, 1.0))), phases=(cut, grown))
    experiment = changed(experiment, checkpoints__keep_last=1)
    assert [phase.experiment.model.dropout for phase in phases.resolved(experiment)] == [0, 0, 0.1]
    loop.train(experiment, workdir=tmp_path)
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()) == [2, 5, 6]


@pytest.mark.slow
def test_frozen_parameters_stay_where_others_shrink_and_grow(rows, tmp_path):
    schedule = ((2, 1.0), (2, 0.5), (2, 1.0))
    experiment = alternating(rows, schedule=schedule, trainable="top/.*", checkpoints__keep_last=9)
    loop.train(experiment, workdir=tmp_path)
    first, small, last = (
        {tuple(unit) for unit in dense(tmp_path, step)["params.bottom/layers/0/kernel"].T.tolist()}
        for step in (2, 4, 6)
    )
    assert (len(first), len(small), len(last)) == (8, 4, 8)
    assert small < first
    assert small < last


@pytest.mark.slow
def test_what_is_set_of_the_model_holds_in_all_phases(rows):
    experiment = overrides.apply(alternating(rows), ["model.top_hidden=64,32", "model.dropout=0.2"])
    models = [phase.experiment.model for phase in phases.resolved(experiment)]
    assert [model.top_hidden for model in models] == [(64, 32), (32, 16)] * 2 + [(64, 32)]
    assert {model.dropout for model in models} == {0.2}
    assert phases.resolved(experiment)[0].schedule != phases.resolved(alternating(rows))[0].schedule


@pytest.mark.slow
@pytest.mark.parametrize(("widths", "wanted"), [("64,32", [64, 64, 64]), ("128,32", [128, 120, 128])])
def test_widths_that_are_set_may_change_in_other_phases_than_those_of_the_recipe(widths, wanted, rows, tmp_path):
    # Of 16 units a share of .9 in multiples of 8 is all of them, of 128 it is 120.
    schedule = ((2, 1.0), (2, 0.9), (2, 1.0))
    experiment = alternate(whole_model(rows), schedule, multiple=8)
    experiment = overrides.apply(experiment, [f"model.top_hidden={widths}"])
    assert [phase.experiment.model.top_hidden[0] for phase in phases.resolved(experiment)] == wanted
    assert [phase.name for phase in experiment.phases] == ["1-cut", "2-grow"]
    loop.train(experiment, workdir=tmp_path / "run")
    found = [dense(tmp_path / "run", step)["params.top/layers/0/kernel"].shape[1] for step in (4, 6)]
    assert found == wanted[1:]


@pytest.mark.slow
def test_sharded_parameters_shrink_and_grow_as_whole_ones_do(rows, tmp_path):
    schedule = ((3, 1.0), (2, 0.5), (2, 1.0), (2, 0.5), (2, 1.0))
    sharded = {"strategy": Fsdp(sharding="FULL_SHARD", replicate_below=0)}
    for name, changes in (("whole", {}), ("sharded", sharded)):
        loop.train(alternating(rows, "resume", schedule, **changes), workdir=tmp_path / name)
    one, two = (dense(tmp_path / name, 11) for name in ("whole", "sharded"))
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def test_mistakes_are_named(rows, tmp_path):
    for schedule, message in (
        (((4, 1.0), (3, 0.5)), r"begins and ends with the whole model.* got the shares 1, 0\.5\. Add a last phase"),
        (((4, 0.5), (3, 1.0)), r"got the shares 0\.5, 1\. Add a first phase"),
        (((4, 1.0),), r"the schedule has 1 entries, and must have two or more pairs"),
        (((4, 1.0), 3, (2, 1.0)), r"the schedule's entry 1 is 3, and all must be pairs \(steps, share"),
        (((4, 1.0), (3, "0.5"), (2, 1.0)), r"the schedule's entry 1 is \(3, '0\.5'\), and all must be pairs"),
        (((0, 1.0), (3, 0.5), (2, 1.0)), r"steps of phase 0 must be a whole number of at least 1; got 0"),
        (((4, 1.0), (2.5, 0.5), (2, 1.0)), r"steps of phase 1 must be a whole number of at least 1; got 2\.5"),
        (((4, 1.0), (3, 0.0), (2, 1.0)), r"share must be above 0 and at most 1"),
    ):
        with pytest.raises(UserError, match=message):
            alternating(rows, schedule=schedule)
    for optimizer in (optim.AdamL2(), optim.Lamb(), optim.Lans()):
        for own in (optimizer, by_path(optimizer)):
            said = rf"{type(optimizer).__name__} counts its steps once .* Take Adam or AdamW, .* or Sgd"
            with pytest.raises(UserError, match=said):
                alternating(rows, optimizer=own)
    with pytest.raises(UserError, match=r"DlrmConfig\.bottom_hidden has a width of 8, below the multiple of 16"):
        narrowed(MODEL, 0.5, 16)
    with pytest.raises(UserError, match=r"LogisticConfig has no MLP with a hidden layer"):
        narrowed(LogisticConfig(), 0.5)
    experiment = alternating(rows)
    with pytest.raises(UserError, match=r"counts its steps once .* --set optimizer\.counts=each, .* ByPath"):
        loop.train(changed(experiment, optimizer__counts="one"), workdir=tmp_path / "one")
    assert not (tmp_path / "one").exists()
    with pytest.raises(UserError, match=r"'1-cut' changes model: DlrmConfig\.top_hidden has a width of 4, below"):
        phases.resolved(overrides.apply(alternate(whole_model(rows), SCHEDULE, multiple=8), ["model.top_hidden=4"]))


@pytest.fixture(scope="module")
def ended(rows, tmp_path_factory):
    """The folder of a run that was killed between its first two phases."""

    class Ended(BaseException):
        pass

    def end(*_):
        raise Ended

    folder = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Ended):
        patch.setattr(loop.Run, "follow", end)
        loop.train(alternating(rows), workdir=folder)
    return folder


def with_share(share):
    return {"schedule": tuple((steps, share if own < 1 else own) for steps, own in SCHEDULE)}


OTHER_SCHEDULES = {
    "steps": {"schedule": ((4, 1.0), (3, 0.5), (5, 1.0))},
    "share": with_share(0.25),
    "growth": {"growth": "resume"},
    "score": {"score": "taylor"},
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHER_SCHEDULES.values(), ids=OTHER_SCHEDULES)
def test_a_run_goes_on_with_no_other_schedule(rows, ended, other):
    with pytest.raises(UserError, match=r"schedule is '.*' in the checkpoint and '.*' here"):
        loop.train(alternating(rows, **other), workdir=ended, resume="must")


@pytest.mark.slow
def test_a_schedule_is_what_phases_make_of_the_model(rows):
    own = phases.resolved(alternating(rows, schedule=((4, 1.0), (3, 0.5), (2, 1.0)), score="taylor"))
    assert {phase.schedule for phase in own} == {
        "4 steps model.bottom_hidden.0=8 model.top_hidden.0=16 model.top_hidden.1=8; "
        "3 steps 1-cut model.bottom_hidden.0=4 model.top_hidden.0=8 model.top_hidden.1=4 "
        "by ResizeUnits(score=taylor); "
        "2 steps 2-grow model.bottom_hidden.0=8 model.top_hidden.0=16 model.top_hidden.1=8 "
        "by ResizeUnits(score=taylor)"
    }
    for changes in (
        {"model__dropout": 0.5},
        {"optimizer__learning_rate": optim.Constant(value=1e-3)},
        {"data__batch_size": 32},
        {"strategy": Fsdp(sharding="FULL_SHARD")},
        {"checkpoints__keep_last": 5},
    ):
        other = phases.resolved(alternating(rows, **changes))
        assert other[0].schedule == phases.resolved(alternating(rows))[0].schedule
