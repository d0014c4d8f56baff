"""Whole runs in this process: what they record, keep, refuse, and how they go on."""

import dataclasses
import functools
import io
import json
import math
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import small_run
from rich.console import Console

from scalejax import optim
from scalejax.configs import as_data
from scalejax.errors import TemporaryFailure, UserError
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop, peers
from scalejax.train.batches import convert
from scalejax.train.experiment import Checkpoints
from scalejax.train.preemption import Preemption
from scalejax.train.reports import comparison, report
from scalejax.train.reports import summary as summaries
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding

FROZEN = {
    "optimizer": optim.Adam(learning_rate=optim.Constant(value=0.0)),
    "tables__optimizer": RowwiseAdagrad(learning_rate=0.0),
}
"""Nothing is learned."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The small data set."""
    return small_run.write(tmp_path_factory.mktemp("data") / "rows.parquet")


@pytest.fixture(scope="module")
def trained(rows, tmp_path_factory):
    """A finished run and its summary; do not write to it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, loop.train(small_run.experiment(rows), workdir=folder)


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the finished run."""
    return pathlib.Path(shutil.copytree(trained[0], tmp_path / "run"))


def evaluations(folder):
    """Evaluation records by (step, split)."""
    lines = read_lines(folder / "metrics.jsonl")
    return {(r["step"], r["split"]): r for r in lines if r["kind"] == "evaluation"}


def windows(folder):
    return [r for r in read_lines(folder / "metrics.jsonl") if r["kind"] == "window"]


def steps_kept(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def stored(experiment, folder, devices=None):
    return small_run.restored(experiment, folder, devices=devices)[0]


def assert_equal_trees(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.slow
def test_summary_has_what_the_closing_table_shows_and_all_of_it_is_finite(trained):
    folder, summary = trained
    quality = {f"test_{name}" for name in ("logloss", "ne", "auc", "calibration", "base_rate", "examples")}
    intervals = {f"test_{name}_{end}" for name in ("logloss", "ne", "auc") for end in ("low", "high")}
    speed = {"samples_per_s", "step_p50_s", "step_p95_s", "data_wait_share", "compile_s", "wall_s", "peak_rss_bytes"}
    what = {"steps", "examples", "recipe", "date", "device", "mesh", "dense_parameters", "table_parameters"}
    assert quality | intervals | speed | what <= summary.keys()
    assert all(math.isfinite(value) for value in summary.values() if not isinstance(value, str))
    assert (summary["steps"], summary["examples"], summary["test_examples"]) == (12, 12 * 64, small_run.ROWS // 10)
    assert json.loads((folder / "summary.json").read_text()) == {k: v for k, v in summary.items() if k != "run_folder"}
    assert summary["table_parameters"] == 8 * sum(feature.rows for feature in small_run.FEATURES)


@pytest.mark.slow
def test_windows_and_evaluations_come_at_their_intervals_and_at_the_end(trained):
    folder, _ = trained
    assert [(r["step"], r["examples_seen"]) for r in windows(folder)] == [(4, 256), (8, 512), (12, 768)]
    assert list(evaluations(folder)) == [(6, "validation"), (12, "validation"), (12, "test")]


@pytest.mark.slow
def test_an_end_between_intervals_is_logged_scored_and_saved(rows, tmp_path):
    loop.train(small_run.experiment(rows, steps=5), workdir=tmp_path)
    assert [r["step"] for r in windows(tmp_path)] == [4, 5]
    assert list(evaluations(tmp_path)) == [(5, "validation"), (5, "test")]
    assert steps_kept(tmp_path) == [5]


@pytest.mark.slow
def test_equal_runs_write_equal_metrics(trained, rows, tmp_path):
    loop.train(small_run.experiment(rows), workdir=tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (trained[0] / "metrics.jsonl").read_bytes()
    assert_equal_trees(stored(small_run.experiment(rows), tmp_path), stored(small_run.experiment(rows), trained[0]))


@pytest.mark.slow
def test_report_is_one_file_with_its_pictures(trained):
    page = (trained[0] / "report.html").read_text()
    sources = re.findall(r'src="([^"]{0,20})', page)
    assert len(sources) >= 5  # curves and diagrams
    assert all(source.startswith("data:image/") for source in sources)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (ShardingPlan(devices=2), "was made for 2 devices, but 8 hold one copy of the tables on this mesh"),
        (ShardingPlan(tables=(TablePlan(table="item", kind="table_wise", ranks=(9,)),)), "table 'item' has ranks (9,)"),
    ],
)
def test_a_plan_for_another_mesh_is_left_out_of_scoring_and_refused_in_training(trained, run, rows, plan, why):
    planned, shown = small_run.experiment(rows, tables__sharding=plan), io.StringIO()
    summary = loop.evaluate(planned, workdir=run, console=Console(file=shown, width=60))
    assert summary["test_logloss"] == trained[1]["test_logloss"]
    (line,) = [line for line in shown.getvalue().splitlines() if "plan" in line]
    assert line.startswith("Scoring without the run's sharding plan, with every table sharded by rows: ")
    assert why in line
    with pytest.raises(UserError, match=re.escape(why)):
        loop.train(dataclasses.replace(planned, steps=18), workdir=run)


@pytest.mark.slow
def test_evaluate_gives_what_the_loop_logged(trained, rows):
    folder, summary = trained
    experiment = small_run.experiment(rows)
    for step, split in ((6, "validation"), (12, "test")):
        logged = evaluations(folder)[step, split]
        again = loop.evaluate(experiment, workdir=folder, split=split, step=step)
        assert again[f"{summaries.prefix(split)}_auc"] == logged["auc"]
        assert again[f"{summaries.prefix(split)}_logloss"] == logged["logloss"]
    assert again["test_auc"] == summary["test_auc"]
    assert loop.evaluate(experiment, workdir=folder)["steps"] == 12
    other_batch = dataclasses.replace(experiment, data=small_run.data(rows, batch_size=16))
    # Another batch size rounds float32 sums of a matrix product differently.
    assert loop.evaluate(other_batch, workdir=folder)["test_logloss"] == pytest.approx(
        summary["test_logloss"], abs=1e-6
    )


@pytest.mark.slow
def test_best_and_last_checkpoints_are_kept(rows, tmp_path):
    experiment = small_run.experiment(
        rows,
        steps=8,
        evaluation__every=2,
        checkpoints=Checkpoints(every=1, keep_last=2, keep_best=1),
    )
    loop.train(experiment, workdir=tmp_path)
    losses = {step: r["logloss"] for (step, split), r in evaluations(tmp_path).items() if split == "validation"}
    assert list(losses) == [2, 4, 6, 8]
    assert steps_kept(tmp_path) == sorted({7, 8, min(losses, key=losses.__getitem__)})


@pytest.mark.slow
def test_a_longer_run_goes_on_where_the_shorter_one_ended(rows, tmp_path):
    # A constant learning rate: a schedule would depend on the number of steps.
    whole = small_run.experiment(
        rows, tables__schedule=optim.Constant(), optimizer=optim.Adam(learning_rate=optim.Constant(value=1e-2))
    )
    loop.train(whole, workdir=tmp_path / "whole")
    loop.train(dataclasses.replace(whole, steps=8), workdir=tmp_path / "parts")
    loop.train(whole, workdir=tmp_path / "parts", resume="must")
    assert windows(tmp_path / "parts") == windows(tmp_path / "whole")
    assert_equal_trees(stored(whole, tmp_path / "parts"), stored(whole, tmp_path / "whole"))


def test_other_steps_that_stretch_a_schedule_are_refused_with_both_rates(rows, tmp_path):
    cosine = optim.Adam(learning_rate=optim.WarmupCosine(peak=1e-3, warmup=0.1, final=0.1))
    experiment = small_run.experiment(rows, optimizer=cosine, tables__schedule=optim.Constant(), steps=100)
    record = {"experiment": as_data.to_data(experiment)}
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    check = functools.partial(loop._check_schedules, tmp_path)
    check(experiment, 100)
    more = dataclasses.replace(experiment, steps=200)
    said = r"steps=200: .* trained for 100 of 100 steps, .*: stretched it is 0\.000\d+ after step 100, where it was "
    with pytest.raises(UserError, match=said + r"0\.0001\. Add --resume stretch .*--set init="):
        check(more, 100)
    check(dataclasses.replace(more, optimizer=optim.Adam(learning_rate=optim.Constant(value=1e-4))), 100)  # by hand
    with pytest.raises(UserError, match=r"tables.schedule is a schedule over all of them: stretched"):
        schedule = optim.WarmupCosine(peak=1.0, warmup=0.1, final=0.1)
        tables = dataclasses.replace(experiment.tables, schedule=schedule)
        constant = optim.Adam(learning_rate=optim.Constant(value=1e-4))
        before = dataclasses.replace(experiment, optimizer=constant, tables=tables)
        (tmp_path / "experiment.json").write_text(json.dumps({"experiment": as_data.to_data(before)}))
        check(dataclasses.replace(before, steps=200), 50)


@pytest.mark.parametrize(("start", "changed", "finished"), [(8, {}, True), (4, {}, False), (8, {"steps": 9}, False)])
def test_a_run_is_finished_where_its_summary_is_of_this_step_and_experiment(tmp_path, start, changed, finished):
    record = {"recipe": "a", "steps": 8}
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    assert loop._finished(tmp_path, record, start) is None
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 8}))
    assert loop._finished(tmp_path, {**record, **changed}, start) == ({"steps": 8} if finished else None)


@pytest.mark.slow
def test_a_finished_run_is_not_trained_again(run, rows):
    def files():
        kept = [run / "metrics.jsonl", run / "summary.json", *sorted((run / "checkpoints").rglob("*"))]
        return {path: path.read_bytes() for path in kept if path.is_file()}

    before = files()
    assert len(before) > 1
    loop.train(small_run.experiment(rows), workdir=run)
    assert files() == before


@pytest.mark.slow
def test_resume_never_refuses_a_folder_with_a_run_and_must_one_without(run, rows, tmp_path):
    experiment = small_run.experiment(rows)
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="--resume never"):
        loop.train(experiment, workdir=run, resume="never")
    assert (run / "metrics.jsonl").read_bytes() == before
    with pytest.raises(UserError, match="--resume must"):
        loop.train(experiment, workdir=tmp_path / "new", resume="must")


def by_day(rows, **changes):
    """An experiment on the first epoch in time order, scored by day before it is trained."""
    return small_run.experiment(
        rows,
        data=small_run.data(rows, order="time"),
        steps=8,
        evaluation__validation="progressive",
        log_every=8,
        **changes,
    )


@pytest.mark.slow
def test_each_day_is_scored_before_it_is_trained(rows, tmp_path):
    loop.train(by_day(rows), workdir=tmp_path / "learning")
    summary = loop.train(by_day(rows, **FROZEN), workdir=tmp_path / "frozen")
    days = {split: r for (_, split), r in evaluations(tmp_path / "learning").items() if split not in DATA_SPLITS}
    untrained = {split: r for (_, split), r in evaluations(tmp_path / "frozen").items() if split not in DATA_SPLITS}
    data = small_run.data(rows, order="time").build()
    assert list(days) == list(untrained) == [name for name, _, _ in data.days()]
    first, *later = days
    assert days[first]["logloss"] == untrained[first]["logloss"]
    assert all(days[day]["logloss"] != untrained[day]["logloss"] for day in later)
    # Oracle: nothing is learned, so the sum over the days is one window over the training split.
    (window,) = windows(tmp_path / "frozen")
    assert summary["progressive_examples"] == data.num_examples("train") == window["examples"]
    assert summary["progressive_logloss"] == pytest.approx(window["logloss"], abs=1e-6)  # other order of float32 sums


DATA_SPLITS = ("train", "validation", "test")


@pytest.mark.slow
def test_days_are_scored_at_the_step_that_begins_them(rows, tmp_path):
    loop.train(by_day(rows), workdir=tmp_path)
    data = small_run.data(rows, order="time").build()
    wanted = [(name, first // 64) for name, first, _ in data.days()]
    lines = evaluations(tmp_path)
    assert [(split, step) for step, split in lines if split not in DATA_SPLITS] == wanted


@pytest.mark.slow
def test_progressive_validation_survives_an_interruption(rows, tmp_path):
    experiment = by_day(rows, checkpoints=Checkpoints(every=3), evaluation__every=0)
    whole = loop.train(experiment, workdir=tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "8")
    resumed = loop.train(experiment, workdir=tmp_path / "cut", resume="must")
    assert (tmp_path / "cut" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert resumed["progressive_logloss"] == whole["progressive_logloss"]


def test_progressive_validation_needs_data_in_time_order(rows, tmp_path):
    experiment = small_run.experiment(rows, data=small_run.data(rows, time=None), evaluation__validation="progressive")
    with pytest.raises(UserError, match="progressive validation needs"):
        loop.train(experiment, workdir=tmp_path)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_earlier_checkpoints(rows, run):
    diverging = small_run.experiment(
        rows,
        steps=20,
        log_every=2,
        optimizer=optim.AdamW(learning_rate=optim.Constant(value=1e38)),
        tables__optimizer=RowwiseAdagrad(learning_rate=1e38),
        checkpoints=Checkpoints(every=1),
    )
    with pytest.raises(UserError, match=r"not finite in the steps up to 1\d.*Lower the learning rates"):
        loop.train(diverging, workdir=run)
    assert loop.evaluate(small_run.experiment(rows), workdir=run, step=12)["steps"] == 12


class Failing:
    """A data set that cannot read a batch."""

    def __init__(self, whole, bad):
        self._whole, self._bad = whole, bad

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def train_batches(self, **position):
        for number, batch in enumerate(self._whole.train_batches(**position)):
            if number == self._bad:
                raise UserError(f"batch {number} cannot be read")
            yield batch


@dataclasses.dataclass(frozen=True)
class FailingData:
    """Configuration of `Failing`."""

    whole: object
    bad: int

    @property
    def batch_size(self):
        return self.whole.batch_size

    def schema(self):
        return self.whole.schema()

    def build(self):
        return Failing(self.whole.build(), self.bad)


@pytest.mark.slow
def test_a_batch_that_cannot_be_read_ends_the_run_where_it_is_needed(rows, tmp_path):
    data = FailingData(small_run.data(rows), bad=6)
    with pytest.raises(UserError, match="batch 6 cannot be read"):
        loop.train(small_run.experiment(rows, data=data, log_every=1), workdir=tmp_path)
    assert [r["step"] for r in windows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert steps_kept(tmp_path) == [6]


def test_prefetch_raises_at_the_batch_and_ends_when_left_early(rows):
    experiment = small_run.experiment(rows)
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(MeshShape(), jax.devices()[:1]))
    with convert.prefetch(Failing(data, 3).train_batches(start_example=0), built) as prefetched:
        assert sum(1 for _ in zip(range(3), prefetched, strict=False)) == 3
        with pytest.raises(UserError, match="batch 3 cannot be read"):
            next(prefetched)
    with convert.prefetch(data.train_batches(start_example=0), built) as prefetched:
        next(prefetched)  # leaving must not wait for a stream without end
    with convert.prefetch(data.eval_batches("test"), built) as prefetched:
        assert len(list(prefetched)) == 1


@pytest.mark.slow
def test_a_checkpoint_is_the_same_on_any_number_of_devices(trained, rows):
    experiment = small_run.experiment(rows)
    eight = stored(experiment, trained[0], devices=8)
    assert_equal_trees(eight, stored(experiment, trained[0], devices=1))
    assert_equal_trees(eight, stored(experiment, trained[0], devices=2))
    item = eight["tables"]["item"]  # 1101 rows: a part that is sharded and one that is not
    assert (item["rows_body"].shape, item["rows_tail"].shape) == ((1024, 8), (77, 8))


class Pictures:
    """A tracker that keeps the steps of pictures and of numbers."""

    def __init__(self):
        self.steps, self.logged = set(), set()

    def build(self):
        return self

    def start(self, run):
        pass

    def log(self, step, values):
        self.logged.add(step)

    def picture(self, step, name, svg):
        self.steps.add(step)

    def finish(self):
        pass


@pytest.mark.slow
def test_a_run_ends_after_so_many_evaluations_that_are_no_better_and_stays_ended(rows, tmp_path):
    experiment = small_run.experiment(
        rows,
        steps=12,
        evaluation__every=2,
        evaluation__patience=2,
        checkpoints=Checkpoints(every=2, keep_last=1),
        trackers=(pictures := Pictures(),),
        **FROZEN,
    )
    summary = loop.train(experiment, workdir=tmp_path)
    assert summary["steps"] == 6  # best at 2, the earliest of equals
    assert pictures.steps == {6} == {max(pictures.logged)}  # no step of a tracker lies behind the end
    assert list(evaluations(tmp_path)) == [(2, "validation"), (4, "validation"), (6, "validation"), (6, "test")]
    assert steps_kept(tmp_path) == [2, 6]
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert loop.train(experiment, workdir=tmp_path, resume="must")["steps"] == 6
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


class AskedAtOnce(Preemption):
    """A run that is asked to end before its first step."""

    def watch(self, saved):
        super().watch(saved)
        peers.job.ask(peers.END)


@pytest.mark.slow
def test_a_run_that_ends_at_its_first_step_has_a_report(rows, trained, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(TemporaryFailure, match=r"saved after step 1\. Go on with: AGAIN"):
        loop.train(small_run.experiment(rows), workdir=run, preemption=AskedAtOnce(again="AGAIN"))
    assert steps_kept(run) == [1]
    assert read_lines(run / "metrics.jsonl") == []
    text = report.write_report(run).read_text()
    assert "This run has not finished: it has no records yet." in text
    assert "wukong" in text.lower()
    assert comparison.write_comparison([run, trained[0]], tmp_path / "both.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"checkpoints": Checkpoints(every=0)}, {"evaluation__every": 0}])
def test_ending_early_needs_evaluations_and_checkpoints(rows, changes):
    with pytest.raises(ValueError, match="patience"):
        small_run.experiment(rows, **({"evaluation__every": 2, "evaluation__patience": 2} | changes))
