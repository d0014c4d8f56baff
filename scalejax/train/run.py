"""A run bound to its data and its devices: windows, evaluations, checkpoints and the closing summary of any model."""

import contextlib
import dataclasses
import pathlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.console import Console

from scalejax import chips, optim
from scalejax.errors import UserError
from scalejax.parallel import offload
from scalejax.parallel.embedding.plan import PlanRefused, ShardingPlan
from scalejax.parallel.embedding.tracking import touched_rows
from scalejax.train import binding, distributed, scoring, summary, trained
from scalejax.train import console as consoles
from scalejax.train import state as states
from scalejax.train.checkpoint import Checkpointer
from scalejax.train.convert import prefetch
from scalejax.train.experiment import Experiment
from scalejax.train.metrics import steps as step_sums
from scalejax.train.metrics import sums as metric_sums
from scalejax.train.metrics.protocol import Described
from scalejax.train.pipeline import Pipeline
from scalejax.train.protocols import DataSet
from scalejax.train.records import Records
from scalejax.train.scoring import Scores
from scalejax.train.state import TrainState
from scalejax.train.step import Program
from scalejax.train.timing import peak_memory


@dataclasses.dataclass(frozen=True)
class Best:
    """The best evaluation so far on the split that is scored at intervals; the earliest of equals.

    Attributes:
      step: Where; 0 before the first.
      value: On that split.
      final: On the final split at that step, where it is scored there.
    """

    step: int = 0
    value: float = 0.0
    final: float | None = None


@dataclasses.dataclass(frozen=True)
class HostState:
    """What a run knows on the host between two steps.

    Attributes:
      examples: Global example counter: the position in the training stream.
      weight: Sum of the weights of all examples so far; of a language model the targets that it has learnt from.
      lifetime: Sums of the metrics that have values for the whole run, over all windows so far.
      progressive: The same over all days scored so far, before they were trained.
      best: The best evaluation so far.
    """

    examples: int = 0
    weight: float = 0.0
    lifetime: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    progressive: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    best: Best = Best()

    def after(self, examples: int) -> "HostState":
        """One step later."""
        return dataclasses.replace(self, examples=self.examples + examples)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, exactly."""
        return {
            "examples": self.examples,
            "weight": self.weight,
            "lifetime": {name: metric_sums.to_json(sums) for name, sums in self.lifetime.items()},
            "progressive": {name: metric_sums.to_json(sums) for name, sums in self.progressive.items()},
            "best": dataclasses.asdict(self.best),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], like: Mapping[str, Any]) -> "HostState":
        """The inverse of `to_dict`; `like` has host sums of each metric."""
        lifetime, progressive = (
            {name: metric_sums.from_json(sums, like[name]) for name, sums in values[key].items()}
            for key in ("lifetime", "progressive")
        )
        best = Best(**values["best"])
        return cls(int(values["examples"]), float(values["weight"]), lifetime, progressive, best)


def _reader(array: Any, dtype: Any) -> Callable[[Any], np.ndarray]:
    """What reads the part of an array that a device keeps."""
    return lambda index: np.asarray(array[index]).astype(dtype)


class Run:
    """An experiment bound to its data and its devices.

    `log`, `evaluate`, `before_step` and `close` write their records where `attach` said, and book the time there.
    """

    def __init__(self, program: Program, data: DataSet) -> None:
        self.program, self.data, self.experiment = program, data, program.experiment
        self.learning_rate = self.experiment.optimizer.learning_rate.build(self.experiment.steps)
        self.best = binding.best_value(self.experiment, tuple(program.metrics.values()))
        self._records: Records | None = None
        self._last: tuple[weakref.ref[TrainState], dict[str, Scores]] | None = None

    @classmethod
    def bind(cls, experiment: Experiment, data: DataSet, mesh: Mesh) -> "Run":
        """Binds an experiment to its data and a mesh.

        Raises:
          UserError: as `binding.bind`, or state must not rest in the host memory of these devices.
        """
        if experiment.placement.offload != "none":
            offload.check(mesh.devices)
        return cls(binding.bind(experiment, data.schema, mesh, data), data)

    @classmethod
    def bind_to_score(cls, experiment: Experiment, data: DataSet, mesh: Mesh, console: Console | None) -> "Run":
        """The same, without the sharding plan of the tables where that does not suit the mesh."""
        try:
            return cls.bind(experiment, data, mesh)
        except PlanRefused as refused:
            if console is not None:
                why = str(refused).split(". ")[0].removesuffix(".")
                console.print(
                    f"Scoring without the run's sharding plan, with every table sharded by rows: {why}.",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            tables = dataclasses.replace(experiment.tables, sharding=ShardingPlan())
            return cls.bind(dataclasses.replace(experiment, tables=tables), data, mesh)

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.program.mesh

    @property
    def in_flight(self) -> int:
        """Steps that may be queued."""
        return self.program.in_flight

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Options of XLA that the run sets itself."""
        return self.program.compiler_options or {}

    @property
    def records(self) -> Records:
        assert self._records is not None, "attach() comes first"
        return self._records

    def attach(self, records: Records) -> None:
        """Says where to write and to save."""
        self._records = records

    def identity(self) -> dict[str, str]:
        """What a checkpoint must share with the run that goes on from it; meshes and batch sizes may differ."""
        e, tables = self.experiment, self.program.collection is not None
        optimizer = type(e.optimizer).__name__ + (f" / {type(e.tables.optimizer).__name__}" if tables else "")
        scaled = " of a scaled loss" if e.gradients.loss_scaling else ""
        identity = {
            "model": f"{type(e.model).__name__} {self.program.model.digest()}",
            "optimizer": optimizer + scaled,
            "data": self.data.fingerprint(),
        }
        if e.tables.id_maps:
            identity["id_maps"] = repr(e.tables.id_maps)
        if jax.tree.leaves(self.program.abstract_state().exchange):
            identity["exchange"] = type(e.strategy).__name__
        return identity

    # State.

    def begin(self) -> tuple[TrainState, HostState]:
        """A fresh state, and what the host knows.

        Raises:
          UserError: the run that the parameters are to begin with does not fit.
        """
        state = self.program.init()
        return state if self.experiment.init is None else self._begun_with(state, self.experiment.init), HostState()

    def _begun_with(self, state: TrainState, init: str) -> TrainState:
        """The state with parameters, variables and rows of tables of another run, one array at a time."""
        where, model = f"init={init}", self.program.model
        source = trained.open_run(pathlib.Path(init))
        params = trained.matched(source, model.params, where)

        def placed(arrays: Mapping[str, Any], like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            return {
                path: jax.make_array_from_callback(x.shape, x.sharding, _reader(arrays[path], x.dtype))
                for path, x in like.items()
            }

        state = dataclasses.replace(state, params=placed(params, state.params))
        if set(model.variables) <= set(source.variables):
            state = dataclasses.replace(state, variables=placed(source.variables, state.variables))
        averages = {name: placed(params, average) for name, average in state.averages.items()}
        state = dataclasses.replace(state, averages=averages)
        collection = self.program.collection
        if collection is None:
            return state
        logical = collection.to_logical(state.tables)
        for name, leaves in logical.items():
            rows = source.tables.get(name)
            if rows is None or tuple(rows.shape) != leaves["rows"].shape:
                has = "no such table" if rows is None else f"{list(rows.shape)}"
                raise UserError(
                    f"{where}: table {name!r} is {list(leaves['rows'].shape)} in the model, and {source.origin} has "
                    f"{has}. Give a run of the same model and data."
                )
            leaves["rows"] = placed({"rows": rows}, {"rows": leaves["rows"]})["rows"]
        return dataclasses.replace(state, tables=collection.from_logical(logical))

    def restore(self, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, HostState]:
        """Both of a checkpoint, the newest for None."""
        if self.program.collection is not None:
            self.program.collection.check_fits()
        abstract = self.abstract_stored()
        resized = self._resized(checkpoints, step, abstract)
        stored, host = checkpoints.restore(step, abstract | resized)
        if resized:
            stored["exchange"] = self._resize(stored["exchange"])
        like = {
            name: metric_sums.to_host(metric.zeros())
            for name, metric in self.program.metrics.items()
            if metric.lifetime
        }
        return self.from_stored(stored), HostState.from_dict(host, like)

    def restore_to_score(self, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, int]:
        """A state of which only what the model computes with is that of a checkpoint; and how many examples it saw."""
        if self.program.collection is not None:
            self.program.collection.check_fits()
        abstract = self.abstract_stored()
        wanted = {
            name: abstract[name] for name in ("step", "params", "variables", "averages", "tables") if name in abstract
        }
        stored, host = checkpoints.read(step, wanted)
        rest = self.program.abstract_state()
        state = dataclasses.replace(
            rest,
            step=stored["step"],
            params=stored["params"],
            variables=stored.get("variables", {}),
            averages=stored.get("averages", {}),
            tables={} if self.program.collection is None else self.program.collection.from_stored(stored["tables"]),
        )
        return state, int(host["examples"])

    def abstract_stored(self) -> dict[str, Any]:
        """What a checkpoint holds, as shapes, dtypes and the shardings of this mesh."""
        stored = states.to_stored(self.program.abstract_state())
        collection = self.program.collection
        return stored if collection is None else {**stored, "tables": collection.abstract_stored()}

    def to_stored(self, state: TrainState) -> dict[str, Any]:
        """The state as arrays that know no mesh: tables unpadded and unstacked, under their own names."""
        stored, collection = states.to_stored(state), self.program.collection
        return stored if collection is None else {**stored, "tables": collection.to_stored(state.tables)}

    def from_stored(self, stored: dict[str, Any]) -> TrainState:
        """The state on this mesh."""
        collection = self.program.collection
        tables = {} if collection is None else collection.from_stored(stored["tables"])
        return states.from_stored(stored, self.program.abstract_state(), tables)

    def _resized(self, checkpoints: Checkpointer, step: int | None, abstract: dict[str, Any]) -> dict[str, Any]:
        """The state of the exchange as it was stored, if that was on another number of devices; else {}."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(abstract.get("exchange", {}))
        if not leaves:
            return {}
        held, whole = checkpoints.shapes(step), self.program.replicated
        found = []
        for path, leaf in leaves:
            name = jax.tree_util.keystr((jax.tree_util.DictKey("exchange"), *path), simple=True, separator=".")
            shape = held.get(name) or tuple(leaf.shape)
            if shape[1:] != leaf.shape[1:]:
                return {}  # of another model: restoring says so
            found.append(jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=whole))
        if all(new.shape == leaf.shape for new, (_, leaf) in zip(found, leaves, strict=True)):
            return {}
        return {"exchange": jax.tree.unflatten(structure, found)}

    def _resize(self, stored: dict[str, Any]) -> dict[str, Any]:
        abstract = self.program.abstract_state().exchange
        scheme = self.program.gradients(1).scheme(self.program.model.params)
        resized = {}
        for path, state in stored.items():
            devices = jax.tree.leaves(abstract[path])[0].shape[0]
            new = scheme.resized(path, jax.tree.map(np.asarray, state), devices)
            resized[path] = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), new, abstract[path])
        return resized

    # Steps.

    @contextlib.contextmanager
    def feed(self, host: HostState, steps: int) -> Iterator[Pipeline]:
        """The batches of the next `steps` steps."""
        batches = self.program.task.train_batches(self.data, self.mesh, host.examples)
        with prefetch(batches, self.program) as prefetched:
            yield Pipeline(self.program, prefetched, steps)

    def before_step(self, state: TrainState, host: HostState, step: int) -> HostState:
        """Scores every day that begins in the batch of this step, before anything of that batch is trained."""
        if self.experiment.evaluation.validation != "progressive":
            return host
        for name, first, stop in self.data.days():
            if host.examples <= first < host.examples + self.experiment.data.batch_size:
                with self.records.timer.phase("evaluation"):
                    batches = self.data.range_batches(
                        first, stop, process_index=jax.process_index(), process_count=jax.process_count()
                    )
                    scores = scoring.score(self.program, state, batches, of=f"day {name!r}")
                    values, days = {}, dict(host.progressive)
                    for key, metric in self.program.metrics.items():
                        if not metric.lifetime:
                            continue
                        sums = metric.of_collected(scores.collected)
                        values |= metric.compute(sums)
                        days[key] = metric_sums.merge(days[key], sums) if key in days else sums
                    host = dataclasses.replace(host, progressive=days)
                    self.records.events.evaluation(step - 1, name, values | scores.counted())
        return host

    def log(self, state: TrainState, host: HostState, step: int) -> tuple[TrainState, HostState, dict[str, str]]:
        """Writes the window that ends here; here and before a save training waits for the device.

        Returns also what the progress line shows.
        """
        counted = self._check(state, step)
        state, sums = self.program.take_metrics(state)
        with self.records.timer.phase("blocked"):
            window = metric_sums.to_host(sums)
        steps = window.pop("steps")
        host = dataclasses.replace(host, weight=host.weight + float(steps.weight), lifetime=self._summed(host, window))
        values, lifetime = step_sums.compute(steps), {}
        for name, metric in self.program.metrics.items():
            values |= metric.compute(window[name])
            if metric.lifetime:
                so_far = metric.compute(host.lifetime[name])
                lifetime |= {f"lifetime_{key}": so_far[key] for key in metric.lifetime}
        taken = step
        if state.loss_scale is not None:
            taken -= int(state.loss_scale.skipped)  # schedules go by the steps that were taken
            values |= {"skipped": int(steps.skipped), "loss_scale": float(state.loss_scale.scale)}
        rate = float(np.asarray(self.learning_rate(taken)))
        record = {"examples_seen": host.examples, "weight_seen": host.weight, "learning_rate": rate}
        self.records.events.window(step, record | values | counted | lifetime)
        timing = self._speed(self.records.timer.window())
        self.records.events.timing(step, timing)
        return state, host, self._shown(values, timing, rate)

    def _summed(self, host: HostState, window: Mapping[str, Any]) -> dict[str, Any]:
        """Sums of the whole run; the order of additions is that of windows, so a resumed run adds the same bits."""
        lifetime = dict(host.lifetime)
        for name, metric in self.program.metrics.items():
            if metric.lifetime:
                lifetime[name] = metric_sums.merge(lifetime[name], window[name]) if name in lifetime else window[name]
        return lifetime

    def _shown(self, values: Mapping[str, float], timing: Mapping[str, float], rate: float) -> dict[str, str]:
        described = [v for metric in self.program.metrics.values() for v in metric.values]
        curves = [v for v in described if v.shown == "table and curve" and v.better != "neither"]
        shown = {v.name: values[key] for v in curves if (key := v.window or v.name) in values}
        unit = self._unit
        speed = timing["samples_per_s"] if unit == "examples" else timing.get(f"{unit}_per_s", float("nan"))
        three = dict(list(shown.items())[:3])
        return consoles.progress_fields(rate=f"{consoles.count(speed)} {unit}/s", **three, lr=rate)

    def evaluate(self, state: TrainState, host: HostState, step: int) -> tuple[HostState, dict[str, float]]:
        """Scores the split of intervals; where it is better than before, perhaps the final one too."""
        evaluation = self.experiment.evaluation
        values = self._scores(state, evaluation.split).measure()
        self.records.events.evaluation(step, evaluation.split, values)
        value, sign = values[self.best.name], 1 if self.best.better == "high" else -1
        if host.best.step == 0 or sign * value > sign * host.best.value:
            final = None
            if evaluation.final == "best":
                final = self._scores(state, evaluation.final_split).measure()[self.best.name]
            host = dataclasses.replace(host, best=Best(step, value, final))
        return host, values

    def save(self, state: TrainState, host: HostState, step: int, scored: dict[str, float] | None) -> None:
        """Begins to save a checkpoint."""
        self._check(state, step)
        checkpoints, collection = self.records.checkpoints, self.program.collection
        self.records.events.sync()
        kept = None if scored is None else {self.best.name: scored[self.best.name]}
        updates = None
        if collection is not None and self.experiment.tables.full_every:
            updates = int(np.asarray(state.tables["updates"]))
        since = checkpoints.base_updates(step)
        if collection is None or updates is None or since is None:
            checkpoints.save(step, self.to_stored(state), host.to_dict(), kept, updates=updates)
            return
        tree = {**states.to_stored(state), "tables": collection.untracked_to_stored(state.tables)}
        rows = touched_rows(collection, state.tables, since)
        abstract = self.abstract_stored()
        checkpoints.save_delta(step, tree, rows, host.to_dict(), kept, abstract_tree=abstract, updates=updates)

    def close(self, state: TrainState, host: HostState) -> dict[str, Any]:
        """Scores the final split, with intervals, and adds up the run; returns what the summary says of it."""
        e, timer = self.experiment, self.records.timer
        split = e.evaluation.final_split
        closing: dict[str, Any] = {"steps": e.steps, "examples": host.examples, "weight": host.weight}
        with timer.phase("evaluation"):
            scores = self._scores(state, split)
            values = scores.measure(intervals="bootstrap")
        with timer.phase("checkpoint"):
            # Before anything else is written: if the disk is full, the checkpoint is what the user must hear of.
            self.records.checkpoints.wait()
        with timer.phase("evaluation"):
            self.records.events.evaluation(e.steps, split, values)
            if distributed.is_primary():
                for metric in self.program.metrics.values():
                    metric.keep(self.records.checkpoints.folder.parent, split, scores.collected)
        closing |= summary.of_evaluation(split, values)
        for name, metric in self.program.metrics.items():
            if name in host.progressive:
                closing |= summary.of_evaluation("progressive", metric.compute(host.progressive[name]))
        if e.evaluation.final == "best":
            own = e.evaluation.split
            closing |= summary.of_evaluation(own, self._scores(state, own).measure())
            closing |= {"best_step": host.best.step, f"best_{summary.prefix(own)}_{self.best.name}": host.best.value}
            closing |= {f"{summary.prefix(split)}_{self.best.name}_at_best": host.best.final}
        return closing | self._speed(timer.summary()) | peak_memory(self.mesh.local_mesh.devices.flat)

    def describe(self) -> dict[str, Any]:
        """What the summary says of the model."""
        collection = self.program.collection
        tables = {} if collection is None else {"table_parameters": sum(t.rows * t.dim for t in collection.tables)}
        return {"dense_parameters": self.program.model.size, **tables, **self.program.task.describe(self.data)}

    def score(self, state: TrainState, split: str) -> dict[str, Any]:
        """Scores a split once more; writes nothing."""
        scores = self._scores(state, split)
        return summary.of_evaluation(split, scores.measure(intervals="bootstrap"))

    @property
    def described(self) -> Described:
        """What the run measures."""
        return Described.of(tuple(self.program.metrics.values()))

    def _scores(self, state: TrainState, split: str) -> Scores:
        """Of a split; what one state had is found once."""
        if self._last is None or self._last[0]() is not state:
            self._last = (weakref.ref(state), {})
        found = self._last[1]
        if split not in found:
            batches = self.program.task.eval_batches(self.data, self.mesh, split)
            found[split] = scoring.score(self.program, state, batches, of=f"split {split!r}")
        return found[split]

    @property
    def _unit(self) -> str:
        return self.program.task.unit

    def _speed(self, timing: dict[str, float]) -> dict[str, float]:
        """With units and FLOPs of the model a second and device.

        The FLOPs are those that the model defines, see `Task.work`. MFU is their share of the bfloat16 peak of the
        chip, where that is known.
        """
        devices, none, unit = self.mesh.size, float("nan"), self._unit  # NaN before the first step
        flops = timing.get("flops_per_s", none)
        timing = {name: value for name, value in timing.items() if name != "flops_per_s"}
        if unit == "examples" or not (flops > 0 or unit == "tokens"):
            return timing
        timing = {f"{unit}_per_s": none} | timing
        speed = {
            f"{unit}_per_s_per_device": timing[f"{unit}_per_s"] / devices,
            "tflops_per_s_per_device": flops / devices / 1e12,
        }
        chip = chips.for_device_kind(self.mesh.devices.flat[0].device_kind)
        if chip is not None:
            peak = chip.bf16_flops_per_s / chip.devices_per_chip / 1e12
            speed |= {"peak_tflops_per_s": peak, "mfu": speed["tflops_per_s_per_device"] / peak}
        return timing | speed

    def _check(self, state: TrainState, step: int) -> dict[str, Any]:
        """Nothing that is not finite, and no lookup that went wrong, is ever logged or saved.

        Returns:
          Ids that found no room in an exchange since training began, where there may be any, and the counters of the id
          maps since then, "id_hits/TABLE" and so on.

        Raises:
          UserError: of the steps since the last window one was not finite, or none had an example that counts.
        """
        collection, steps = self.program.collection, state.metrics["steps"]
        with self.records.timer.phase("blocked"):
            nonfinite = int(np.asarray(steps.nonfinite))
            faults = None if collection is None else np.asarray(self.program.faults(state))
            counts = None if collection is None else jax.device_get(self.program.id_counts(state))
        if collection is not None and faults is not None:
            collection.check_faults(faults)
        if nonfinite and not np.asarray(steps.weight.value):
            raise UserError(
                f"Nothing counts in the batches up to step {step}: the sum of their weights is 0. Documents of one "
                "token have no next one to learn; check data.path, data.column and data.marks."
            )
        if nonfinite:
            constant = isinstance(self.experiment.optimizer.learning_rate, optim.Constant)
            rows = " and --set tables.optimizer.learning_rate=..." if collection is not None else ""
            raise UserError(
                f"The loss or the gradient of {nonfinite} steps was not finite in the steps up to {step}. Nothing was "
                f"saved after the last checkpoint. Lower the learning rate{'s' if rows else ''}, "
                f"--set optimizer.learning_rate.{'value' if constant else 'peak'}=...{rows}, and start again from it."
            )
        if collection is None or faults is None or counts is None:
            return {}
        spilled = {"spilled_ids": int(faults[1])} if collection.exchange.spill == "count" else {}
        return spilled | {
            f"id_{counter}/{table}": number
            for table, found in collection.id_totals(counts).items()
            for counter, number in found.items()
            if counter != "misplaced"
        }
