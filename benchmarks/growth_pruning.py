"""What growth and pruning save and what they cost in NE, offline and after a recurring stage, over paired seeds.

python benchmarks/growth_pruning.py --runs FILE                    # all runs of both forms
python benchmarks/growth_pruning.py --runs FILE --forms flights    # of one
python benchmarks/growth_pruning.py --runs FILE --report > table.md
python benchmarks/growth_pruning.py --wall                         # seconds of steps and ways, on a quiet machine

A run has an offline stage and a recurring one: days in order, each of which is scored before it is trained, once. Eight
ways through the offline stage: dense; alternate (whole, narrow, whole, ...); prune once, early; small; grow only; and
three that have about the FLOPs of alternate: a model that is smaller all the time, one that is pruned late, and dense
with fewer steps. The recurring stage has the model with which the offline stage ended. "planted": an MLP on
synthetic logs whose labels hang on products of pairs of numbers, with weights that drift from day to day
(`PlantedData`). "flights": the DLRM of `dlrm-flights_recurring`, January to June and then July to October.

FILE has a JSON object a line; runs that it holds are not made again, and several processes may append to one file.
Differences to dense are paired by seed. Their 95 % intervals are of a bootstrap over seeds and examples where there are
predictions (of the days after the offline stage, and of the last days of all), whose metrics on resamples are in
`results/growth_resamples`, and of Student's t over seeds where there is only NE (the days of the recurring stage).
Settings were chosen with seed 100, on the days after the offline stage. CPU seconds are those of the steps: the median
of the windows of each phase that compile, save and score nothing, times its steps; for them run one process at a time,
with XLA_FLAGS=--xla_cpu_multi_thread_eigen=false.
"""

import argparse
import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from kept_runs import KeptRuns, half_width

from scalejax import optim
from scalejax.bench import machine
from scalejax.configs.recsys import _common, _flights, dlrm
from scalejax.data import BatchedDataSet, Categorical, Schema, from_columns
from scalejax.data.examples.memory import Order
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.parallel.mesh import make_mesh
from scalejax.surgery.alternation import narrowed
from scalejax.surgery.units import ResizeUnits
from scalejax.train import loop, phases
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Phase, Tables
from scalejax.train.metrics import bootstrap, evaluation, exact
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import scoring
from scalejax.train.runs.run import Run

SEEDS = (1, 2, 3, 4, 5)
RESAMPLES = 400
"""Of 65,536 examples: some two seconds of a core for each run."""
FOLDER = pathlib.Path(__file__).parent / "results" / "growth_resamples"

Schedule = tuple[tuple[float, float], ...]
"""(share of the offline steps, share of the hidden units) of each phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlantedData:
    """Synthetic logs: logit = -1 + 2 / sqrt(M) * sum_m c_m(day) x_i(m) x_j(m) + a number of each of two ids.

    The M products are of pairs of standard normal numbers, so that what a model needs is hidden units. Weights drift:
    c_m(day) = sign_m cos(speed_m * day).

    Attributes:
      days: First day of the training split and the day after its last.
      validation, test: Likewise.
      order: As that of other data.
      batch_size: Global batch size.
      seed: Of the order; the logs are the same for all seeds.
      a_day: Examples of a day.
      interactions: M.
      speed: Most that a weight turns in a day, in radians.
    """

    days: tuple[int, int]
    validation: tuple[int, int]
    test: tuple[int, int]
    order: Order = "shuffled"
    batch_size: int = 512
    seed: int = 0
    a_day: int = 32_768
    interactions: int = 24
    speed: float = 0.015

    IDS, NUMBERS, ROWS = 2, 14, 50

    def schema(self) -> Schema:
        ids = tuple(Categorical(name=f"id{i}", rows=self.ROWS) for i in range(self.IDS))
        return Schema(categorical=ids, dense=tuple(f"x{i}" for i in range(self.NUMBERS)), labels=("label",))

    def build(self) -> BatchedDataSet:
        parts, wanted = [], {"train": self.days, "validation": self.validation, "test": self.test}
        for first, stop in wanted.values():
            parts += [self._day(day) for day in range(first, stop)]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        day = columns["day"]
        rows = {split: np.flatnonzero((day >= first) & (day < stop)) for split, (first, stop) in wanted.items()}
        return from_columns(
            columns,
            self.schema(),
            batch_size=self.batch_size,
            split=rows,
            order=self.order,
            seed=self.seed,
            time="day",
            scaling="none",
        )

    def _day(self, day: int) -> dict[str, np.ndarray]:
        world, own = np.random.default_rng(7), np.random.default_rng((7, day))
        pairs = np.array([world.permutation(self.NUMBERS)[:2] for _ in range(self.interactions)])
        weights = world.choice([-1, 1], self.interactions) * np.cos(
            self.speed * world.uniform(0, 1, self.interactions) * day
        )
        effects = world.normal(size=(self.IDS, self.ROWS)) / 2
        ids = own.integers(self.ROWS, size=(self.IDS, self.a_day)).astype(np.int32)
        numbers = own.normal(size=(self.a_day, self.NUMBERS)).astype(np.float32)
        logit = numbers[:, pairs].prod(axis=2) @ (2 * weights / math.sqrt(self.interactions)) - 1
        logit += sum(effects[i][ids[i]] for i in range(self.IDS))
        columns: dict[str, np.ndarray] = {f"id{i}": ids[i] for i in range(self.IDS)}
        columns |= {f"x{i}": numbers[:, i] for i in range(self.NUMBERS)}
        label = own.random(self.a_day) < exact.sigmoid(logit)
        return columns | {"label": label.astype(np.int8), "day": np.full(self.a_day, day)}


def _held(peak: float) -> optim.WarmupCosineAnneal:
    """A rate that stays at its peak and falls in the last 30 %: what grows late still learns."""
    return optim.WarmupCosineAnneal(peak=peak, warmup=0.05, final=1.0, anneal=0.3)


def _planted() -> Experiment:
    """The offline stage: 24 days, twice."""
    return _common.experiment(
        model=DcnV2Config(dim=16, cross_layers=0, bottom_hidden=(128, 64), deep_hidden=()),
        data=PlantedData(days=(0, 24), validation=(24, 26), test=(36, 38)),
        steps=3072,
        optimizer=optim.AdamW(learning_rate=_held(4e-3)),
        tables=Tables(optimizer=RowwiseAdagrad(learning_rate=0.1), schedule=_held(1.0)),
    )


def _planted_days(offline: Experiment) -> Experiment:
    """Days 24 to 33, scored on the two after and on the last two."""
    data: Any = offline.data
    days = dataclasses.replace(data, days=(24, 34), validation=(34, 36), order="time")
    changes = {
        "data": days,
        "optimizer": dataclasses.replace(offline.optimizer, learning_rate=optim.Constant(value=1e-3)),  # pyright: ignore[reportCallIssue]
        "tables.schedule": optim.Constant(value=0.1),
        "evaluation.validation": "progressive",
    }
    steps = 10 * data.a_day // data.batch_size
    return dataclasses.replace(offline, phases=(*offline.phases, Phase(name="recurring", steps=steps, changes=changes)))


@dataclasses.dataclass(frozen=True)
class Form:
    """A model and its data.

    Attributes:
      offline: The offline stage of the whole model.
      recurring: Appends the other stage.
      schedules: Way through the offline stage -> its phases.
    """

    offline: Callable[[], Experiment]
    recurring: Callable[[Experiment], Experiment]
    schedules: Mapping[str, Schedule]


def _ways(share: float, first: float, narrow: float, flops: float, equal: float) -> dict[str, Schedule]:
    """Twice `first` of the steps whole and `narrow` of them with a share of the units, and the rest whole; others.

    `flops` is what that has of the FLOPs of dense. A model with the share `equal` of the units has about as many, as
    near as multiples of 8 come.
    """
    two = ((first, 1.0), (narrow, share))
    return {
        "dense": ((1.0, 1.0),),
        "alternate": (*two, *two, (round(1 - 2 * first - 2 * narrow, 4), 1.0)),
        "prune once": ((0.125, 1.0), (0.875, share)),
        "small": ((1.0, share),),
        "grow only": ((2 * narrow, share), (1 - 2 * narrow, 1.0)),
        "smaller, equal FLOPs": ((1.0, equal),),
        "prune late, equal FLOPs": ((0.64, 1.0), (0.36, share)),
        "dense, fewer steps": ((flops, 1.0),),
    }


FORMS = {
    "planted": Form(_planted, _planted_days, _ways(0.125, 0.04, 0.18, flops=0.66, equal=0.8)),
    "flights": Form(
        lambda: _flights.offline(dlrm.flights().model),  # pyright: ignore[reportArgumentType]
        _flights.day_by_day,
        _ways(0.25, 0.06, 0.18, flops=0.7, equal=0.78),
    ),
}


def in_phases(whole: Experiment, schedule: Schedule) -> Experiment:
    """The offline stage with the widths of a schedule, which may end narrow."""
    widths = [whole.model if share == 1 else narrowed(whole.model, share, 8) for _, share in schedule]
    ends = [round(whole.steps * total) for total in itertools.accumulate(part for part, _ in schedule)]
    rest = tuple(
        Phase(
            name=f"{n}", steps=ends[n] - ends[n - 1], changes={"model": widths[n]}, surgery=ResizeUnits(score="taylor")
        )
        for n in range(1, len(schedule))
    )
    optimizer: Any = whole.optimizer
    return dataclasses.replace(
        whole,
        model=widths[0],
        steps=ends[0],
        phases=rest,
        optimizer=dataclasses.replace(optimizer, counts="each") if rest else optimizer,
    )


@dataclasses.dataclass(frozen=True)
class CpuClock:
    """A tracker that reads the CPU seconds of the process at the end of every window."""

    readings: list[tuple[int, float]] = dataclasses.field(default_factory=list, compare=False, repr=False)

    def build(self) -> "CpuClock":
        return self

    def start(self, run: object) -> None:
        del run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if any(name.startswith("timing/") for name in values):
            self.readings.append((step, time.process_time()))

    def picture(self, step: int, name: str, svg: str) -> None:
        del step, name, svg

    def finish(self) -> None:
        pass

    def seconds(self, start: int, stop: int) -> float:
        """Of a step between two: the median over the windows but the first."""
        own = [reading for reading in self.readings if start < reading[0] <= stop]
        spans = [(later[1] - before[1]) / (later[0] - before[0]) for before, later in itertools.pairwise(own)]
        return statistics.median(spans) if spans else math.nan


def experiment_of(form: str, way: str, seed: int, schedule: Schedule | None = None) -> Experiment:
    """Both stages of a run."""
    whole = FORMS[form].offline()
    data: Any = whole.data
    whole = dataclasses.replace(
        whole,
        data=dataclasses.replace(data, seed=seed),
        seed=seed,
        log_every=16,
        evaluation=Evaluation(split="validation", final_split="test"),
        checkpoints=Checkpoints(every=0, every_seconds=0, keep_best=0),
    )
    return FORMS[form].recurring(in_phases(whole, schedule or FORMS[form].schedules[way]))


def scored_run(experiment: Experiment) -> tuple[dict[str, Any], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Figures of both stages, and (labels, predictions) at the end of each."""
    clock = CpuClock()
    experiment = dataclasses.replace(experiment, trackers=(clock,))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name) / "run"
        begun = time.perf_counter()
        closing = loop.train(experiment, workdir=folder, recipe="growth and pruning")
        wall = time.perf_counter() - begun
        *offline, recurring = phases.resolved(experiment)
        last = evaluation.read_predictions(folder, "test")
        assert last is not None
        predictions = {"offline": predictions_at(experiment, folder, recurring.start)}
        predictions["recurring"] = last.labels[:, 0], last.predictions[:, 0]
    parts = closing["phases"]
    steps = {
        part["phase"]: clock.seconds(p.start, p.stop) for part, p in zip(parts, (*offline, recurring), strict=True)
    }
    cpu = {part["phase"]: part["steps"] * steps[part["phase"]] for part in parts}
    before = parts[:-1]
    return {
        "offline_ne": round(before[-1]["val_ne"], 6),
        "recurring_ne": round(closing["progressive_ne"], 6),
        "test_ne": round(closing["test_ne"], 6),
        "offline_gflop": round(sum(part["flops"] for part in before) / 1e9, 3),
        "recurring_gflop": round(parts[-1]["flops"] / 1e9, 3),
        "offline_cpu_s": round(sum(cpu[part["phase"]] for part in before), 2),
        "step_cpu_ms": [round(1e3 * steps[part["phase"]], 2) for part in parts],
        "steps": [part["steps"] for part in parts],
        "train_s": [round(part["train_s"], 2) for part in parts],
        "compile_s": [round(part["compile_s"], 2) for part in parts],
        "val_ne": [round(part["val_ne"], 6) for part in parts],
        "wall_s": round(wall, 1),
    }, predictions


def predictions_at(experiment: Experiment, folder: pathlib.Path, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and predictions of the validation split by a checkpoint."""
    own = phases.experiment_at(experiment, folder, step)
    run = Run.bind(own, own.data.build(), make_mesh(own.placement.mesh))
    state, _ = run.open_to_score(folder, step)
    batches = run.program.task.eval_batches(run.data, run.mesh, "validation")
    found = scoring.score(run.program, state, batches).collected
    return found["labels"][:, 0], exact.sigmoid(found["logits"])[:, 0]


def key_of(form: str, way: str, seed: int) -> dict[str, Any]:
    """What a line of the file is found by."""
    schedule = [list(part) for part in FORMS[form].schedules[way]]
    return {"form": form, "way": way, "seed": seed, "schedule": schedule}


def file_of(form: str, way: str, seed: int) -> pathlib.Path:
    """Where the metrics of a run on resamples are."""
    return FOLDER / f"{form}-{way.replace(' ', '_').replace(',', '')}-{seed}.npz"


def keep_resamples(path: pathlib.Path, predictions: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Metrics of a run on resamples, at the end of each stage."""
    arrays: dict[str, Any] = {}
    for stage, (labels, own) in predictions.items():
        found = bootstrap.resample(labels, own, resamples=RESAMPLES)
        arrays |= {f"{stage}_values": found.values, f"{stage}_samples": found.samples.astype(np.float32)}
        arrays[f"{stage}_examples"] = found.examples
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)


def resampled(path: pathlib.Path, stage: str) -> bootstrap.Resampled:
    """What `keep_resamples` kept of a stage."""
    with np.load(path) as kept:
        samples = kept[f"{stage}_samples"].astype(np.float64)
        return bootstrap.Resampled(kept[f"{stage}_values"], samples, 1, int(kept[f"{stage}_examples"]), 0)


def make(runs: KeptRuns, forms: Sequence[str], seeds: Sequence[int]) -> None:
    """All runs that are not there, seed by seed, so that what there is can be compared at any time."""
    for form, seed in itertools.product(forms, seeds):
        for way in FORMS[form].schedules:
            key, kept = key_of(form, way, seed), file_of(form, way, seed)
            found = runs.first(key)
            if found and kept.exists():
                continue
            figures, predictions = scored_run(experiment_of(form, way, seed))
            keep_resamples(kept, predictions)
            if found is None:
                runs.append(key | figures)
            print(f"{form}, {way}, seed {seed}: {figures}", file=sys.stderr, flush=True)


def report(runs: KeptRuns, form: str) -> None:
    """The table of a form, of the seeds that all ways have."""
    ways = tuple(FORMS[form].schedules)
    lines = {way: [runs.first(key_of(form, way, seed)) for seed in SEEDS] for way in ways}
    seeds = [n for n in range(len(SEEDS)) if all(lines[way][n] for way in ways)]
    if len(seeds) < 2:
        sys.exit(f"growth_pruning.py: {form!r} has {len(seeds)} complete seeds, and an interval needs two.")
    figures = {way: {name: np.array([lines[way][n][name] for n in seeds]) for name in _NUMBERS} for way in ways}  # pyright: ignore[reportOptionalSubscript]
    found = {stage: _compared(form, ways, [SEEDS[n] for n in seeds], stage) for stage in STAGES}
    print(f"{form}, {len(seeds)} paired seeds; {machine.today()}, commit {machine.commit()}\n")
    print(
        "| way | GFLOP offline | CPU s offline | NE after it | difference in % | NE of the days | difference in % ",
        end="",
    )
    print("| NE of the last days | difference in % |\n" + "|---" * 9 + "|")
    dense = figures["dense"]
    for way in ways:
        own = figures[way]
        cells = [way]
        for name in ("offline_gflop", "offline_cpu_s"):
            mean = own[name].mean()
            cells.append(f"{mean:.1f} ({100 * mean / dense[name].mean():.0f} %)")
        by_seed = 100 * (own["recurring_ne"] / dense["recurring_ne"] - 1)
        for name, interval in (
            ("offline_ne", found["offline"].get(way)),
            ("recurring_ne", _student(by_seed) if way != "dense" else None),
            ("test_ne", found["recurring"].get(way)),
        ):
            values = own[name]
            cells.append(f"{values.mean():.4f} ± {values.std(ddof=1):.4f}")
            cells.append("" if interval is None else "{:+.2f} ({:+.2f} to {:+.2f})".format(*interval))
        print("| " + " | ".join(cells) + " |")


STAGES = ("offline", "recurring")
_NUMBERS = ("offline_ne", "recurring_ne", "test_ne", "offline_gflop", "offline_cpu_s")

Percent = tuple[float, float, float]
"""A difference of NE in percent, and the ends of its interval."""


def _compared(form: str, ways: Sequence[str], seeds: Sequence[int], stage: str) -> dict[str, Percent]:
    pooled = {way: bootstrap.pooled([resampled(file_of(form, way, seed), stage) for seed in seeds]) for way in ways}
    compared = {way: bootstrap.compare_resampled(pooled["dense"], own)["ne"] for way, own in pooled.items()}
    percent = {way: (100 / ne.a, ne.difference) for way, ne in compared.items() if way != "dense"}
    return {way: (by * d.value, by * d.low, by * d.high) for way, (by, d) in percent.items()}


def _student(values: np.ndarray) -> Percent:
    mean, half = float(values.mean()), half_width(values.tolist())
    return mean, mean - half, mean + half


def wall_of_ways() -> None:
    """Seconds of the offline stage of the flights with 2048-1024 hidden units, medians of three turns of all ways."""
    form = FORMS["flights"]
    whole: Any = form.offline()
    whole = dataclasses.replace(
        whole,
        model=dataclasses.replace(whole.model, top_hidden=(2048, 1024)),
        checkpoints=Checkpoints(every=0, every_seconds=0, keep_best=0),
    )
    ways = ("dense", "alternate", "prune once", "small", "grow only")
    found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
    for _, way in itertools.product(range(3), ways):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "run"
            closing = loop.train(in_phases(whole, form.schedules[way]), workdir=folder, recipe=way)
            took = time.perf_counter() - begun
            times = read_lines(folder / "timing.jsonl")
        in_one = closing["flops_per_example"] * closing["examples"]
        flops = sum(part["flops"] for part in closing["phases"]) if "phases" in closing else in_one
        steps = sum(line["wall_s"] - line["checkpoint_s"] for line in times)
        found[way].append((flops / 1e9, steps, sum(line["compile_s"] for line in times), took))
        print(f"{way}: {found[way][-1]}", file=sys.stderr, flush=True)
    print("\n| way | GFLOP | steps s | compile s | from start to end s |\n|---|---|---|---|---|")
    medians = {way: [statistics.median(values) for values in zip(*own, strict=True)] for way, own in found.items()}
    for way, own in medians.items():
        cells = [f"{x:.1f} ({100 * x / dense:.0f} %)" for x, dense in zip(own, medians["dense"], strict=True)]
        print(f"| {way} | {' | '.join(cells)} |")


def wall() -> None:
    """Seconds a step of each width, beside what the FLOPs promise."""
    print(
        "| top MLP | share | MFLOP an example | CPU ms a step | wall ms a step | compile s |\n|---|---|---|---|---|---|"
    )
    for hidden in ((512, 256), (2048, 1024)):
        whole: Any = dlrm.flights()
        model = dataclasses.replace(whole.model, top_hidden=hidden)
        whole = dataclasses.replace(
            whole,
            model=model,
            steps=120,
            log_every=10,
            evaluation=Evaluation(split="validation", final_split="validation"),
            checkpoints=Checkpoints(every=0, every_seconds=0, keep_best=0),
        )
        clock = CpuClock()
        schedule = ((0.34, 1.0), (0.33, 0.25), (0.33, 0.5))
        experiment = dataclasses.replace(in_phases(whole, schedule), trackers=(clock,))
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name) / "run"
            closing = loop.train(experiment, workdir=folder, recipe="widths")
            times = read_lines(folder / "timing.jsonl")
        for (_, share), part, phase in zip(schedule, closing["phases"], phases.resolved(experiment), strict=True):
            own = [line["step_p50_s"] for line in times if phase.start < line["step"] <= phase.stop][1:]
            mflop = part["flops"] / part["samples"] / 1e6
            cpu = 1e3 * clock.seconds(phase.start, phase.stop)
            print(
                f"| {hidden[0]}-{hidden[1]} | {share:g} | {mflop:.2f} | {cpu:.1f} | {1e3 * statistics.median(own):.1f} "
                f"| {part['compile_s']:.1f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", metavar="FILE", type=pathlib.Path)
    parser.add_argument("--forms", nargs="+", choices=tuple(FORMS), default=tuple(FORMS), metavar="FORM")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    if options.wall:
        wall()
        return wall_of_ways()
    if options.runs is None:
        parser.error("give --runs FILE, or --wall")
    runs = KeptRuns(options.runs)
    if not options.report:
        return make(runs, options.forms, options.seeds)
    for form in options.forms:
        report(runs, form)
        print()
    return None


if __name__ == "__main__":
    main()
