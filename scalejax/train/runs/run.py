"""A run bound to its data and its devices: checkpoints, windows, evaluations and the closing summary of any model."""

import contextlib
import dataclasses
import functools
import math
import pathlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

from scalejax import chips, optim
from scalejax.errors import UserError
from scalejax.parallel import offload, xla_flags
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.plan.placement import PlanRefused
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan
from scalejax.parallel.embedding.row_cache import RowCache, Tiers
from scalejax.parallel.embedding.stored.tracking import touched_rows
from scalejax.parallel.embedding.update.host_row_plans import Room
from scalejax.parallel.gradients.blocks import WholeCopy
from scalejax.parallel.mesh import check_processes
from scalejax.train import distributed, phases
from scalejax.train import state as states
from scalejax.train.batches.convert import prefetch
from scalejax.train.batches.pipeline import Pipeline
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints import trained
from scalejax.train.checkpoints.array_store import AnyArray, LazyArray
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.checkpoints.manifest import HostRecord
from scalejax.train.experiment import Experiment, Init, StatefulSurgery
from scalejax.train.metrics import steps as step_sums
from scalejax.train.metrics import sums as metric_sums
from scalejax.train.phases import ResolvedPhase
from scalejax.train.protocols import DataSet
from scalejax.train.reports import exchange, summary
from scalejax.train.reports.progress import Window
from scalejax.train.reports.records import Records
from scalejax.train.reports.timing import peak_memory
from scalejax.train.runs import binding, run_state, scoring
from scalejax.train.runs.run_state import Best, HostState
from scalejax.train.runs.scoring import Scores
from scalejax.train.state import StoredState, TrainState
from scalejax.train.step import Program


class Run:
    """An experiment bound to its data and its devices.

    `log`, `evaluate`, `before_step` and `close` write their records where `attach` said, and book the time there.
    `remarks` are what a user should know of how the state came about. `room` is for what the host sorts of its batches.
    """

    def __init__(self, program: Program, data: DataSet[object], phase: ResolvedPhase | None = None) -> None:
        self.program, self.data, self.experiment = program, data, program.experiment
        self.phase = phases.resolved(self.experiment)[0] if phase is None else phase
        self.learning_rate = self.experiment.optimizer.learning_rate.build(self.experiment.steps)
        self.best = binding.best_value(self.experiment, tuple(program.metrics.values()))
        self.remarks: tuple[str, ...] = ()
        self._residuals: list[tuple[int, float]] = []
        self._last_exchanged: dict[str, float] = {}
        self.room = Room()
        self.tables: EmbeddingCollection | Tiers | None = program.collection
        if program.collection is not None and self.experiment.tables.tiers:
            self.tables = Tiers(program.tables, self.experiment.tables.tiers, program.collection)
        self._records: Records | None = None
        # A weak reference: scores that are kept for a second reader must not keep the arrays of their state.
        self._last: tuple[weakref.ref[TrainState], dict[str, Scores]] | None = None

    @classmethod
    def bind(
        cls, experiment: Experiment, data: DataSet[object], mesh: Mesh, phase: ResolvedPhase | None = None
    ) -> "Run":
        """Binds an experiment, or a phase of it, to its data and a mesh.

        Raises:
          UserError: as `binding.bind` and `check_processes`, or state must not rest in the memory of this host.
        """
        phase = phases.resolved(experiment)[0] if phase is None else phase
        experiment = phase.experiment
        check_processes(mesh)
        if experiment.placement.offload != "none":
            offload.check(mesh.devices)
        program = binding.bind(experiment, data.schema, mesh, data)
        return cls(dataclasses.replace(program, schedules_from=phase.optimizer_from), data, phase)

    @classmethod
    def bind_to_score(cls, experiment: Experiment, data: DataSet[object], mesh: Mesh, console: Console | None) -> "Run":
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
    def compiler_options(self) -> dict[str, xla_flags.Value]:
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
        """What a checkpoint must share with the run that goes on from it.

        Meshes may differ, and batch sizes, but where variables are rows of the batch.
        """
        e, tables = self.experiment, self.program.collection is not None
        optimizer = type(e.optimizer).__name__ + (f" / {type(e.tables.optimizer).__name__}" if tables else "")
        scaled = " of a scaled loss" if e.gradients.loss_scaling else ""
        identity = {
            **self.program.task.identity(),
            "model": f"{type(e.model).__name__} {self.program.model.digest()}",
            "optimizer": optimizer + scaled,
            "data": self.data.fingerprint(),
        }
        if e.tables.id_maps:
            identity["id_maps"] = repr(e.tables.id_maps)
        if jax.tree.leaves(self.program.abstract_state().exchange):
            identity["exchange"] = e.strategy.remembers
        if self.phase.name:
            identity["phase"] = self.phase.name
        if self.phase.scores_from:
            identity["scores_from"] = str(self.phase.scores_from)
        if self.phase.schedule:
            identity["schedule"] = self.phase.schedule
        return identity

    @property
    def frozen(self) -> frozenset[str]:
        """Names, in a checkpoint, of what no step of this run changes."""
        return frozenset(f"params.{path}" for path in self.program.model.params if path not in self.program.trained)

    # State.

    def begin(self) -> tuple[TrainState, HostState]:
        """A fresh state, and what the host knows.

        Raises:
          UserError: the model that the parameters are to begin with cannot be read, or does not fit.
        """
        state, init = self.program.init(self.tables), self.experiment.init
        if init is not None:
            init = Init(path=init) if isinstance(init, str) else init
            source = run_state.opened(self.program, init)
            where = f"init={init.path}"
            run_state.check_ids(self.data, source, where)
            state = run_state.with_model(self.program, self.tables, state, source, init.surgery, where)
            run_state.check_architecture(self.program, source, init)
        return state, HostState()

    def follow(
        self, before: "Run", checkpoints: Checkpointer, earlier: "Sequence[Run]" = ()
    ) -> tuple[TrainState, HostState]:
        """State and what the host knows at the beginning of this phase, of what the phase before saved last.

        Args:
          before: The phase before.
          checkpoints: Those of the run, as `before` saves them.
          earlier: The phases before that one.

        Raises:
          UserError: the model of the phase before does not fit this one.
        """
        phase, kept = self.phase, self.kept(before, earlier)
        stateful = phase.surgery if isinstance(phase.surgery, StatefulSurgery) else None
        stateless = None if stateful else phase.surgery
        where, redraw = f"phases: {phase.name!r}", phase.start if stateful else 0
        if any(name.startswith("tables.") for name in kept):  # no tables are drawn that nobody will see
            stored: StoredState = {
                **states.to_stored(self.program.init_dense(redraw)),
                "tables": self.abstract_stored().get("tables", {}),
            }
        else:
            state = self.program.init(self.tables, redraw)
            if stateless is not None or self.tables is not None:
                checkpoints.wait()
                source = trained.open_run(checkpoints.folder.parent, phase.start)
                if stateless is not None:
                    state = run_state.with_model(self.program, self.tables, state, source, stateless, where)
                elif self.tables is not None:
                    state = run_state.with_rows(self.program, self.tables, state, source, where)
            stored = self.to_stored(state)
            del state
        structure, leaves = jax.tree.structure(stored), manifests.named_leaves(stored)
        del stored
        made: set[str] = set()
        if stateful is not None:
            checkpoints.wait()
            fresh = {name: leaves[name] for name in self._operated(leaves, before)}
            history = [self._dense_at(run, checkpoints.folder.parent) for run in (*earlier, before)]
            optimizers = [run.experiment.optimizer for run in (*earlier, before)]
            arrays = stateful.operate_state(history, run_state.on_host(self.program, fresh), optimizers)
            leaves |= run_state.placed(arrays, fresh)
            made.update(fresh)
        for name in kept:  # let go before its successor is read
            leaves[name] = None
        arrays, saved = checkpoints.read(phase.start, kept)
        leaves |= self._resize(arrays)
        for average in self.experiment.averages:
            for path in self.program.trained:
                if (name := f"averages.{average.name}.{path}") not in kept and name not in made:
                    # Not the same buffer: a step donates both.
                    leaves[name] = jax.device_put(leaves[f"params.{path}"], leaves[name].sharding, may_alias=False)
        return self.from_stored(jax.tree.unflatten(structure, leaves.values())), self._host_after(before, saved)

    def _operated(self, names: Iterable[str], before: "Run") -> list[str]:
        """Names of what a `StatefulSurgery` makes of what the phase before had."""
        parts = ("params.", "averages.", *(("optimizer.",) if self.phase.keeps_optimizer else ()))
        earlier = manifests.named_leaves(before.abstract_stored())
        return [n for n in names if n.startswith(parts) and (n in earlier or not n.startswith("averages."))]

    def _dense_at(self, run: "Run", folder: pathlib.Path) -> dict[str, AnyArray]:
        """The dense part of the state at the end of a phase; its checkpoint is opened when an array is indexed."""
        opened = functools.cache(lambda: trained.open_dense(folder, run.phase.stop))
        return {
            name: LazyArray(x.shape, x.dtype, lambda index, name=name: opened()[name][index])
            for name, x in manifests.named_leaves(run.abstract_stored()).items()
            if name.startswith(("params.", "averages.", "optimizer."))
        }

    def kept(self, before: "Run", earlier: "Sequence[Run]" = ()) -> dict[str, jax.ShapeDtypeStruct]:
        """What of the stored state is that of the phase before, by name, as shapes, dtypes and shardings here.

        Args:
          before: The phase before.
          earlier: The phases before that one.

        Raises:
          UserError: this phase has another model and no surgery that makes it.
        """
        phase, now = self.phase, manifests.named_leaves(self.abstract_stored())
        if isinstance(phase.surgery, StatefulSurgery):
            history = [manifests.named_leaves(run.abstract_stored()) for run in (*earlier, before)]
            phase.surgery.check(history, {name: now[name] for name in self._operated(now, before)})
        counted = getattr(self.data, "counted", ())
        if counted and self.tables is not None and self.data.fingerprint() != before.data.fingerprint():
            raise UserError(
                f"phases: {phase.name!r} has other data, where ids of {', '.join(counted[:5])} are counted anew, so "
                "that rows of tables would be those of other values. Put all rows into one table."
            )
        there = {name: manifests.describe(x) for name, x in manifests.named_leaves(before.abstract_stored()).items()}
        stateful = isinstance(phase.surgery, StatefulSurgery)
        same_rows = type(self.experiment.tables.optimizer) is type(before.experiment.tables.optimizer)
        same_exchange = phase.keeps_optimizer and self.experiment.strategy == before.experiment.strategy

        def stays(name: str) -> bool:
            part, _, rest = name.partition(".")
            if part in ("step", "key"):
                return True
            if stateful and part in ("params", "averages", "optimizer", "exchange"):
                return False
            if part in ("optimizer", "loss_scale"):
                return phase.keeps_optimizer
            if part == "exchange":
                return same_exchange and name in there
            if part == "metrics" or (phase.surgery is not None and not stateful):
                return False
            if part == "averages":
                return name in there
            if part == "variables" and self.program.model.variable_specs[rest] != P():  # rows of a batch
                return self.data is before.data and there.get(name) == manifests.describe(now[name])
            return same_rows or part != "tables"

        now |= run_state.resized(self.program, {name: tuple(x["shape"]) for name, x in there.items()})
        kept = {name: leaf for name, leaf in now.items() if stays(name)}
        differences = manifests.describe_mismatch(kept, {name: there[name] for name in kept if name in there})
        if phase.surgery is None:
            differences = [
                *manifests.differences(before.program.task.identity(), self.program.task.identity()),
                *differences,
            ]
        if differences:
            raise UserError(
                f"phases: {phase.name!r} has no surgery, and so it must have the model of the phase before, which it "
                f"has not: {'; '.join(differences[:3])}. Give it a surgery that makes the one of the other."
            )
        return kept

    def _host_after(self, before: "Run", saved: HostRecord) -> HostState:
        """What the host knows, of what it knew at the end of the phase before."""
        host = HostState.from_dict(saved, before.zero_sums())
        if tuple(self.program.metrics.values()) != tuple(before.program.metrics.values()):
            host = dataclasses.replace(host, lifetime={}, progressive={})
        if self.phase.scores_from != before.phase.scores_from:
            host = dataclasses.replace(host, best=Best())
        if self.data.fingerprint() != before.data.fingerprint():
            host = dataclasses.replace(host, data_from=host.examples)
        return host

    def zero_sums(self) -> dict[str, object]:
        """Host sums of the metrics that have values for the whole run."""
        metrics = self.program.metrics.items()
        return {name: metric_sums.to_host(metric.zeros()) for name, metric in metrics if metric.lifetime}

    def restore(self, checkpoints: Checkpointer, step: int | None) -> tuple[TrainState, HostState]:
        """Both of a checkpoint, the newest for None."""
        if self.program.collection is not None:
            self.program.collection.check_fits()
        abstract = self.abstract_stored()
        structure, leaves = jax.tree.structure(abstract), manifests.named_leaves(abstract)
        leaves |= run_state.resized(self.program, checkpoints.shapes(step)) if abstract.get("exchange") else {}
        stored, host = checkpoints.restore(step, jax.tree.unflatten(structure, leaves.values()))
        arrays = manifests.named_leaves(stored)
        stored = jax.tree.unflatten(structure, self._resize(arrays).values())
        return self.from_stored(stored), HostState.from_dict(host, self.zero_sums())

    def open_to_score(self, folder: pathlib.Path, step: int | None) -> tuple[TrainState, int]:
        """A state of which only what the model computes with is that of a run; and how many examples it saw.

        Args:
          folder: Of the run.
          step: Of the checkpoint; None = the newest.

        Raises:
          UserError: no such checkpoint, another model or other data, a damaged file.
        """
        found, program = trained.open_run(folder, step), self.program
        here = {name: self.identity().get(name) for name in ("data", "id_maps", *program.task.identity())}
        different = manifests.differences(found.identity, here) if found.identity else []
        if different:
            raise UserError(
                f"{found.origin} is of other data or another model: {'; '.join(different)}. Use the recipe, the --set "
                "values and the data that the run began with (experiment.json in its folder)."
            )
        state, model = program.abstract_state(), program.model
        # Rows of a batch of another size mean nothing here.
        zeros = {
            path: np.zeros(x.shape, x.dtype)
            for path, x in model.variables.items()
            if model.variable_specs[path] != P() and getattr(found.variables.get(path), "shape", None) != x.shape
        }
        shapes = {path: x for path, x in (model.params | model.variables).items() if path not in zeros}
        arrays = trained.matched(found, shapes, f"RUN_FOLDER {folder}") | zeros
        scored = self.experiment.evaluation.average
        if scored is not None and scored not in found.averages:
            known = ", ".join(found.averages) or "none"
            raise UserError(f"evaluation.average is {scored!r}, and the averages in {found.origin} are: {known}.")
        averages = {} if scored is None else {scored: run_state.placed(found.averages[scored], state.averages[scored])}
        copies = {path: leaf.value for path, leaf in state.exchange.items() if isinstance(leaf, WholeCopy)}
        copies = run_state.placed({path: found.copies.get(path, arrays[path]) for path in copies}, copies)
        state = dataclasses.replace(
            state,
            step=np.array(found.step, np.int32),
            params=run_state.placed(arrays, state.params),
            variables=run_state.placed(arrays, state.variables),
            averages=averages,
            exchange={path: WholeCopy(x) for path, x in copies.items()},
        )
        if program.collection is not None and self.tables is not None:
            program.collection.check_fits()
            rest = jax.tree.map(run_state.nothing, self.tables.abstract_stored())  # what only an update reads
            rows = run_state.tables_of(program, self.tables, found, rest, f"RUN_FOLDER {folder}")
            state = dataclasses.replace(state, tables=rows)
        return state, found.examples

    def abstract_stored(self) -> StoredState:
        """What a checkpoint holds, as shapes, dtypes and the shardings of this mesh."""
        stored = states.to_stored(self.program.abstract_state())
        return stored if self.tables is None else {**stored, "tables": self.tables.abstract_stored()}

    def to_stored(self, state: TrainState) -> StoredState:
        """The state as arrays that know no mesh: tables unpadded and unstacked, under their own names."""
        stored = states.to_stored(state)
        return stored if self.tables is None else {**stored, "tables": self.tables.to_stored(state.tables)}

    def from_stored(self, stored: StoredState) -> TrainState:
        """The state on this mesh."""
        tables = {} if self.tables is None else self.tables.from_stored(stored.get("tables", {}))
        return states.from_stored(stored, self.program.abstract_state(), tables)

    def _resize(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Arrays of a checkpoint, the state of the exchange for the devices of this mesh."""
        resized, remarks = run_state.resize(self.program, arrays)
        self.remarks = remarks or self.remarks
        return arrays | resized

    def end(self) -> None:
        """Lets go of what lies on the host for the steps of this phase."""
        if isinstance(self.tables, Tiers):
            self.tables.close()

    # Steps.

    @contextlib.contextmanager
    def feed(self, host: HostState, steps: int, first_step: int = 1) -> Iterator[Pipeline]:
        """The batches of the next `steps` steps, from a number of a step on."""
        batches = self.program.task.train_batches(self.data, self.mesh, host.position)
        cache = self.tables.training() if isinstance(self.tables, Tiers) else None
        with prefetch(batches, self.program, first_step=first_step, cache=cache, room=self.room) as prefetched:
            yield Pipeline(self.program, prefetched, steps, cache)

    def _reading(self, state: TrainState) -> RowCache | None:
        """Through which the tables of the newest state are scored, where they have tiers."""
        return self.tables.scoring(state.tables) if isinstance(self.tables, Tiers) else None

    def before_step(self, state: TrainState, host: HostState, step: int) -> HostState:
        """Scores every day that begins in the batch of this step, before anything of that batch is trained."""
        if self.experiment.evaluation.validation != "progressive":
            return host
        for name, first, stop in self.data.days():
            if host.position <= first < host.position + self.experiment.data.batch_size:
                with self.records.timer.phase("evaluation"):
                    batches = self.data.range_batches(
                        first, stop, process_index=jax.process_index(), process_count=jax.process_count()
                    )
                    scored = self._with_new_statistics(state)
                    cache = self._reading(state)
                    scores = scoring.score(self.program, scored, batches, of=f"day {name!r}", cache=cache)
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

    def log(self, state: TrainState, host: HostState, step: int) -> tuple[TrainState, HostState, Window]:
        """Writes the window that ends here; here and before a save training waits for the device.

        Returns also what is shown of it.
        """
        counted = self._check(state, step)
        state, sums = self.program.take_metrics(state)
        with self.records.timer.phase("blocked"):
            window = metric_sums.to_host(sums)
        steps, error = window.pop("steps"), window.pop("exchange_error", None)
        host = dataclasses.replace(host, weight=host.weight + float(steps.weight), lifetime=self._summed(host, window))
        values, lifetime = step_sums.compute(steps), {}
        if error is not None:
            values |= self._exchanged(state, step, float(error), values["grad_norm"])
        for name, metric in self.program.metrics.items():
            values |= metric.compute(window[name])
            if metric.lifetime:
                so_far = metric.compute(host.lifetime[name])
                lifetime |= {f"lifetime_{key}": so_far[key] for key in metric.lifetime}
        taken = step - self.program.schedules_from
        if state.loss_scale is not None:
            taken -= int(state.loss_scale.skipped)  # schedules go by the steps that were taken
            values |= {"skipped": int(steps.skipped), "loss_scale": float(state.loss_scale.scale)}
        rate = float(np.asarray(self.learning_rate(taken)))
        record = {"examples_seen": host.examples, "weight_seen": host.weight, "learning_rate": rate}
        phase: dict[str, str] = {}
        if self.phase.among > 1:
            phase = {"phase": self.phase.name}
            record |= {"flops_seen": host.flops} if host.flops else {}
        self.records.events.window(step, phase | record | values | counted | lifetime)
        timing = self._speed(self.records.timer.window())
        self.records.events.timing(step, phase | timing)
        return state, host, self._shown(values, timing, rate)

    def _exchanged(self, state: TrainState, step: int, error: float, norm: float) -> dict[str, float]:
        """What a window says of an exchange that compresses; warns where its residual grows and grows."""
        values = {exchange.ERROR: error}
        if jax.tree.leaves(state.exchange):
            with self.records.timer.phase("blocked"):
                values[exchange.RESIDUAL] = float(self.program.residual(state, norm))
            self._residuals = [*self._residuals[-exchange.GROWING - 1 :], (step, values[exchange.RESIDUAL])]
            if text := exchange.warning(self._residuals):
                self.records.progress.warning(step, text)
        self._last_exchanged = values
        return values

    def _summed(self, host: HostState, window: Mapping[str, object]) -> dict[str, object]:
        """Sums of the whole run; the order of additions is that of windows, so a resumed run adds the same bits."""
        lifetime = dict(host.lifetime)
        for name, metric in self.program.metrics.items():
            if metric.lifetime:
                lifetime[name] = metric_sums.merge(lifetime[name], window[name]) if name in lifetime else window[name]
        return lifetime

    def _shown(self, values: Mapping[str, float], timing: Mapping[str, float], rate: float) -> Window:
        unit = self._unit
        speed = timing["samples_per_s"] if unit == "examples" else timing.get(f"{unit}_per_s", float("nan"))
        return Window(
            metrics=self._first_curves(values, windows=True),
            learning_rate=rate,
            examples_per_s=timing["samples_per_s"],
            rate=speed,
            unit=unit,
        )

    def _first_curves(self, values: Mapping[str, float], *, windows: bool = False) -> dict[str, float]:
        """The three values that are shown while training."""
        described = [v for metric in self.program.metrics.values() for v in metric.values]
        curves = [v for v in described if v.shown == "table and curve" and v.better != "neither"]
        keys = {v.name: (v.window or v.name) if windows else v.name for v in curves}
        return dict([(name, values[key]) for name, key in keys.items() if key in values][:3])

    def scores_at(self, step: int) -> bool:
        """Whether the split of intervals is scored after a step."""
        every = self.experiment.evaluation.every
        return step == self.phase.stop or bool(every and step % every == 0)

    def ends_early(self, host: HostState, step: int) -> bool:
        """Whether so many evaluations up to a step were no better than the best that the run ends there."""
        patience, every = self.experiment.evaluation.patience, self.experiment.evaluation.every
        return patience is not None and host.best.step > 0 and (step - host.best.step) // every >= patience

    def evaluate(self, state: TrainState, host: HostState, step: int, saved: bool) -> HostState:
        """Scores the split of intervals; where it is better than before, perhaps the final one too.

        Args:
          state: After the step.
          host: What the host knew then.
          step: Which.
          saved: The step has a checkpoint, which gets the scores.
        """
        evaluation = self.experiment.evaluation
        values = self._scores(state, evaluation.split).measure()
        self.records.events.evaluation(step, evaluation.split, values)
        self.records.progress.evaluation(step, evaluation.split, values, self._first_curves(values))
        value, sign = values[self.best.name], 1 if self.best.better == "high" else -1
        if host.best.step == 0 or math.isnan(host.best.value) or sign * value > sign * host.best.value:
            final = None
            if evaluation.final == "best":
                final = self._scores(state, evaluation.final_split).measure()[self.best.name]
            host = dataclasses.replace(host, best=Best(step, value, final))
        if saved:
            # The line first: a checkpoint that has its scores is never scored again.
            self.records.events.sync()
            self.records.checkpoints.add_scores(step, host.to_dict(), {self.best.name: value})
        return host

    def save(self, state: TrainState, host: HostState, step: int) -> None:
        """Begins to save a checkpoint."""
        self._check(state, step)
        checkpoints, collection = self.records.checkpoints, self.program.collection
        # Lines first: whatever checkpoint survives, the windows up to its step are on disk.
        self.records.events.sync()
        updates = None
        if collection is not None and self.experiment.tables.full_every:
            updates = int(np.asarray(state.tables["updates"]))
        since = checkpoints.base_updates(step)
        if collection is None or updates is None or since is None:
            checkpoints.save(step, self.to_stored(state), host.to_dict(), updates=updates)
            return
        tree = {**states.to_stored(state), "tables": collection.untracked_to_stored(state.tables)}
        rows = touched_rows(collection.stacks, state.tables, since)
        abstract = self.abstract_stored()
        checkpoints.save_delta(step, tree, rows, host.to_dict(), abstract_tree=abstract, updates=updates)

    def close(self, state: TrainState, host: HostState) -> dict[str, object]:
        """Scores the final split, with intervals, and adds up the run; returns what the summary says of it."""
        e, timer = self.experiment, self.records.timer
        split, step = e.evaluation.final_split, int(state.step)
        closing: dict[str, object] = {"steps": step, "examples": host.examples, "weight": host.weight}
        with timer.phase("evaluation"):
            scores = self._scores(state, split)
            values = scores.measure(intervals="bootstrap")
        with timer.phase("checkpoint"):
            # Before anything else is written: if the disk is full, the checkpoint is what the user must hear of.
            self.records.checkpoints.wait()
        with timer.phase("evaluation"):
            self.records.events.evaluation(step, split, values)
            if distributed.is_primary():
                for name, metric in self.program.metrics.items():
                    metric.keep(self.records.checkpoints.folder.parent, split, scores.collected, scores.sums[name])
        closing |= summary.of_evaluation(split, values | scores.tabulate())
        for name, metric in self.program.metrics.items():
            if name in host.progressive:
                closing |= summary.of_evaluation("progressive", metric.compute(host.progressive[name]))
        if e.evaluation.final == "best":
            own = e.evaluation.split
            closing |= summary.of_evaluation(own, self._scores(state, own).measure())
            closing |= {"best_step": host.best.step, f"best_{summary.prefix(own)}_{self.best.name}": host.best.value}
            closing |= {f"{summary.prefix(split)}_{self.best.name}_at_best": host.best.final}
        closing |= self._last_exchanged
        return closing | self._speed(timer.summary()) | peak_memory(self.mesh.local_devices)

    def describe(self) -> dict[str, object]:
        """What the summary says of the model."""
        tables = {} if self.tables is None else {"table_parameters": sum(t.rows * t.dim for t in self.tables.tables)}
        return {"dense_parameters": self.program.model.size, **tables, **self.program.task.describe(self.data)}

    def score(self, state: TrainState, split: str) -> dict[str, float | list[list[float]]]:
        """Scores a split once more; writes nothing."""
        scores = self._scores(state, split)
        return summary.of_evaluation(split, scores.measure(intervals="bootstrap") | scores.tabulate())

    def _scores(self, state: TrainState, split: str) -> Scores:
        """Scores of a split; those of one state are computed once."""
        if self._last is None or self._last[0]() is not state:
            self._last = (weakref.ref(state), {})
        found = self._last[1]
        if split not in found:
            state = self._with_new_statistics(state)
            batches = self.program.task.eval_batches(self.data, self.mesh, split)
            cache = self._reading(state)
            found[split] = scoring.score(self.program, state, batches, of=f"split {split!r}", cache=cache)
        return found[split]

    def _with_new_statistics(self, state: TrainState) -> TrainState:
        """The state with the means of the first training batches, if the evaluation wants them anew."""
        program, count = self.program, self.experiment.evaluation.statistics
        if not count:
            return state
        means = {path: state.variables[path] for path in program.model.statistics}
        read, cache = state, self._reading(state)
        first = program.task.train_batches(self.data, self.mesh, 0)
        with prefetch(first, program, purpose="scoring", cache=cache) as batches:
            for number in range(count):
                batch = next(batches)[1]
                if cache is not None:
                    read = dataclasses.replace(read, tables=cache.advance(read.tables))
                variables = program.statistics_step(read, batch)
                found = {path: variables[path] for path in means}
                if number == 0 and all(np.array_equal(found[path], mean) for path, mean in means.items()):
                    raise UserError(
                        f"evaluation.statistics: {next(iter(means))!r} stays as it is where the purpose of a batch is "
                        "'statistics'. A module with running means has to set them to those of the batch then, as "
                        "nn.BatchNorm does."
                    )
                share = 1 / (number + 1)
                means = jax.tree.map(lambda mean, new, share=share: mean + share * (new - mean), means, found)
                jax.block_until_ready(means)  # virtual devices must not queue steps
        return dataclasses.replace(state, variables=state.variables | means)

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

    def _check(self, state: TrainState, step: int) -> dict[str, int]:
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
        overflowed = {"overflow_ids": int(faults[1])} if collection.exchange.overflow == "count" else {}
        return overflowed | {
            f"id_{counter}/{table}": number
            for table, found in collection.id_totals(counts).items()
            for counter, number in found.items()
            if counter != "misplaced"
        }
