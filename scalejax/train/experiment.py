"""`Experiment`: everything that defines a run, as a tree of frozen dataclasses of plain values.

No default depends on the model: what all recipes of a family share stands in `configs/<family>/_common.py`.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from scalejax import optim
from scalejax.errors import UserError, check_at_least, check_one_of, check_whole
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel import xla_flags
from scalejax.parallel.embedding.config import MappedFeatures, RowOptimizer, RowwiseAdagrad
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.lookup_kernels import Implementation
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan
from scalejax.parallel.embedding.tiers import Tier
from scalejax.parallel.fsdp import Fsdp, Strategy
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.offload import Offload
from scalejax.parallel.rules import REPLICATED, Rules
from scalejax.train.protocols import DataConfig, ModelConfig
from scalejax.train.trackers.protocol import TrackerConfig
from scalejax.train.trackers.tensorboard import TensorBoard
from scalejax.train.trackers.trackio import Trackio
from scalejax.train.trackers.wandb import Wandb

if TYPE_CHECKING:
    from scalejax.train.checkpoints.array_store import AnyArray
    from scalejax.train.checkpoints.manifest import Shaped
    from scalejax.train.checkpoints.trained import Trained

ComputeDtype = Literal["platform", "float32", "bfloat16", "float16", "float64"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of the dense part.

    Attributes:
      params: Master weights, gradients and optimizer state ("float64" needs jax_enable_x64; parity tests use it).
      compute: Matrix products and activations; "platform" is bfloat16 on accelerators and float32 on CPU. Losses,
        norms, softmax and reductions stay in float32 or wider. "float16" needs `Gradients.loss_scaling`.
    """

    params: Literal["float32", "float64"] = "float32"
    compute: ComputeDtype = "platform"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """How embedding tables are stored, looked up and updated; of no meaning for models without tables.

    Attributes:
      optimizer: Optimizer of the tables, learning rate included.
      schedule: Factor on the learning rate of the tables, by step.
      sharding: Where the rows of each table live; `scalejax shard` plans it, `ShardingPlan.load` reads a plan.
      exchange: How ids and rows travel between devices.
      accumulate: How the gradients of a row add up: "ordered" (by example) or "exact" (in fixed point: the same to the
        bit in any order of the batch), see `EmbeddingCollection`.
      id_maps: Features whose ids are any 64-bit integers, and the maps that give them rows of a table of fixed size.
      tiers: Features whose tables rest outside of the devices, which cache some of their rows.
      dedup: Features that are looked up once per distinct row of a device's examples.
      pipeline: What runs a step ahead. "ids": the exchange of the next batch's ids, for which this step does not wait;
        the results are those of "none" to the bit. "stale": its rows are fetched too, before this step updates them:
        the gradient is taken at rows that are one update old, another algorithm (except right after a checkpoint,
        where the pipeline is drained).
      dtype: Rows at rest; None = what the model's tables say.
      implementation: What looks rows up, see `parallel.embedding.lookup_kernels`: "xla", or a kernel for GPUs or TPUs.
        None = the kernel on GPUs, XLA elsewhere. Rows are updated by XLA.
      full_every: Steps between full checkpoints, a multiple of `checkpoints.every`; those in between hold of the tables
        only the rows that were updated since the checkpoint before, and need it to be restored (it is kept as long as
        they are). None = all are full.
    """

    optimizer: RowOptimizer = RowwiseAdagrad()
    schedule: optim.Schedule = optim.Constant()
    sharding: ShardingPlan = ShardingPlan()
    exchange: Exchange = Exchange(roomy_below_bytes=32 * 2**20)
    accumulate: Literal["ordered", "exact"] = "ordered"
    id_maps: tuple[MappedFeatures, ...] = ()
    tiers: tuple[Tier, ...] = ()
    dedup: tuple[DedupGroup, ...] = ()
    pipeline: Literal["none", "ids", "stale"] = "none"
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    implementation: Implementation | None = None
    full_every: int | None = None

    def __post_init__(self) -> None:
        check_one_of("Tables: accumulate", self.accumulate, ("ordered", "exact"))
        check_one_of("Tables: pipeline", self.pipeline, ("none", "ids", "stale"))
        if self.pipeline == "stale" and self.id_maps:
            raise UserError(
                "Tables: pipeline='stale' fetches rows before the update of the step before, which may be that of an "
                "id whose row an id map has just given to another. Set tables.pipeline='ids', which is exact, or "
                "'none'."
            )
        if self.pipeline == "stale" and self.tiers:
            raise UserError(
                "Tables: pipeline='stale' fetches rows a step before tables.tiers bring them to the devices. Set "
                "tables.pipeline='ids', or 'none'."
            )
        if self.exchange.overflow == "count" and self.tiers:
            raise UserError(
                "Tables: which ids find no room in an exchange depends on the slots that tables.tiers give them, and "
                "with tables.exchange.overflow='count' they are left out. Set tables.exchange.overflow='fail'."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients:
    """What happens to gradients between the loss and the optimizer.

    Attributes:
      clip: Gradients of the dense part are scaled down to this global norm where theirs is larger; None = never.
      microbatch: Most examples that a device puts through the model at once; gradients add up over the parts and one
        update follows. None = all. "cache": on CPU so many that temporaries of a model with tables stay in the caches,
        at most 1,024; elsewhere all.
      loss_scaling: How the factor on the loss moves, without which gradients in float16 underflow; a step whose
        gradients overflow is skipped on all devices. None = losses are not scaled.
    """

    clip: float | None = None
    microbatch: int | Literal["cache"] | None = None
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"Gradients: clip must be above 0, or None; got {self.clip}.")
        if isinstance(self.microbatch, str) and self.microbatch != "cache":
            raise ValueError(f"Gradients: microbatch must be a number, 'cache' or None; got {self.microbatch!r}.")
        if isinstance(self.microbatch, int) and self.microbatch < 1:
            raise ValueError(f"Gradients: microbatch must be at least 1, 'cache' or None; got {self.microbatch}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the state of a run lies.

    Attributes:
      mesh: Devices per mesh axis; None = the first device alone.
      rules: Logical axis of a parameter -> mesh axes.
      offload: What rests in host memory between steps, see `parallel.offload`.
    """

    mesh: MeshShape | None = MeshShape()
    rules: Rules = REPLICATED
    offload: Offload = "none"

    def __post_init__(self) -> None:
        if self.offload not in typing.get_args(Offload):
            choices = ", ".join(map(repr, typing.get_args(Offload)))
            raise ValueError(f"Placement: offload must be one of {choices}; got {self.offload!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and on what a run is scored.

    Attributes:
      every: Steps between evaluations on `split`; 0 = only at the end.
      split: Split scored at intervals.
      final_split: Split scored at the end.
      final: "end": the final split is scored at the end alone. "best": also wherever `split` scores better than
        before, and the summary says what it had there.
      validation: "split" scores held-out examples only; "progressive" also scores each day of the training stream
        before it is trained (needs data in time order).
      patience: Evaluations on `split` in a row that are no better than the best, after which the run ends at the
        next checkpoint; None = it runs all steps.
      average: Name of the running averages that are scored in place of the parameters; None = the parameters.
      statistics: Batches, the first of the training stream, over which the means of a BatchNorm are averaged anew for
        what is scored; 0 = the running means of training. For averages of parameters and for parts of a supernet.
    """

    every: int = 0
    split: str = "validation"
    final_split: str = "test"
    final: Literal["end", "best"] = "end"
    validation: Literal["split", "progressive"] = "split"
    patience: int | None = None
    average: str | None = None
    statistics: int = 0

    def __post_init__(self) -> None:
        if self.statistics < 0:
            raise ValueError(f"Evaluation: statistics must be at least 1, or 0 for none; got {self.statistics}.")
        if self.patience is not None and (self.patience < 1 or self.every < 1):
            raise ValueError(
                f"Evaluation: patience must be at least 1 and needs `every`, or None; got {self.patience} with every="
                f"{self.every}."
            )
        if self.every < 0:
            raise ValueError(f"Evaluation: every must be at least 1, or 0 for only the end; got {self.every}.")
        for field, choices in (("final", ("end", "best")), ("validation", ("split", "progressive"))):
            check_one_of(f"Evaluation: {field}", getattr(self, field), choices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When to save and what to keep.

    Attributes:
      every: Steps between checkpoints; the last step is always saved. 0 = only the last.
      every_seconds: Seconds after which a checkpoint is due wherever the steps are; 0 = never. None = 300, but with
        `tables.pipeline="stale"` never: a save drains that pipeline, and one by the clock would change its numbers.
      keep_last: Newest checkpoints kept.
      keep_best: Also kept: the best by `best_metric`.
      best_metric: A value of the evaluation record, such as "logloss", "auc", "loss" or "accuracy"; None = the first
        that the model's metrics give.
    """

    every: int = 1000
    every_seconds: float | None = None
    keep_last: int = 2
    keep_best: int = 1
    best_metric: str | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"Checkpoints: every must be at least 1, or 0 for only the last step; got {self.every}.")
        if self.every_seconds is not None and not self.every_seconds >= 0:
            raise ValueError(f"Checkpoints: every_seconds must be above 0, or 0 for never; got {self.every_seconds}.")


@runtime_checkable
class Surgery(Protocol):
    """Makes another model of a trained one; a frozen dataclass of plain values.

    It may have a class variable REMAKES, names of the fields of the model's config that it makes anew, or their last
    words: all others must then be those of the trained model (`train.architecture`). Without it none is compared.
    """

    def operate(self, trained: "Trained", fresh: "Trained") -> "Trained":
        """The model to go on with.

        Args:
          trained: What there is. Arrays are read when they are indexed.
          fresh: The model to be, as it is drawn at the beginning of a run.

        Returns:
          Parameters, variables and tables with the paths and shapes of `fresh`; best lazy ones (`LazyArray`).
        """
        ...


@runtime_checkable
class StatefulSurgery(Surgery, Protocol):
    """A surgery of a phase in which the optimizer, its schedule, averages and tables go on.

    It also makes the dense part of the state of the run: parameters, averages and what the optimizer knows, as arrays
    by the names that they have in a checkpoint, "params.PATH", "optimizer.0.mu.PATH" and so on.
    """

    @property
    def reads_history(self) -> bool:
        """Whether it reads more than the newest state: then checkpoints at the ends of phases are kept for it."""
        ...

    def check(self, history: "Sequence[Mapping[str, Shaped]]", fresh: "Mapping[str, Shaped]") -> None:
        """Raises UserError if `operate_state` could not do it; called before anything is trained."""
        ...

    def operate_state(
        self,
        history: "Sequence[Mapping[str, AnyArray]]",
        fresh: "Mapping[str, AnyArray]",
        optimizers: Sequence[optim.Optimizer],
    ) -> "Mapping[str, AnyArray]":
        """The state to go on with.

        Args:
          history: At the end of each phase so far; the last is the newest. Arrays are read when they are indexed; only
            with `reads_history` may those before the newest be.
          fresh: As it is drawn at the beginning of a run, with another seed in every phase.
          optimizers: Which the states of `history` are of.

        Returns:
          Arrays with the names and shapes of `fresh`.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Init:
    """What the parameters of a run begin with.

    Attributes:
      path: Run folder, or a folder of another form that the model can read (of language models those of `scalejax
        convert` and of Hugging Face).
      step: Which checkpoint of a run; None = the newest.
      average: Take the mean of the parameters of this checkpoint and the average - 1 before it.
      digest: Beginning of the SHA-256 in the manifest of the checkpoint; another checkpoint is refused. None = any.
      surgery: What makes the model of this run of that one; None = they are the same.
    """

    path: str
    step: int | None = None
    average: int = 1
    digest: str | None = None
    surgery: Surgery | None = None


@runtime_checkable
class DerivedValue(Protocol):
    """What a phase makes of a field as the run begins with it, so that `--set` of that field holds in the phase too."""

    def derived(self, first: Any) -> Any:
        """The value in the phase.

        Args:
          first: The value before the first phase.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """A stretch of a run that follows what comes before, in the same run folder.

    Steps, examples and random numbers go on. The optimizer goes on too, and its schedule, which is then as long as all
    phases that share it, unless the phase changes the optimizer, the trained parameters or, by a surgery that is no
    `StatefulSurgery`, the model: then both begin anew. Tables keep the state of their optimizer unless such a surgery
    or another optimizer changes them.
    A phase with other data begins with their first example.

    Attributes:
      name: Of letters, digits, - and _, unlike those of the other phases.
      steps: How many.
      changes: Path of a field of the experiment -> its value from here on, in later phases too; or a `DerivedValue`,
        which begins with the run's value, whatever phases between have changed of it.
      surgery: What makes the model of this phase of that of the phase before; None = it is the same.
    """

    name: str
    steps: int
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    surgery: Surgery | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise UserError(f"Phase: name must be of letters, digits, - and _; got {self.name!r}.")
        check_whole(f"Phase {self.name!r}: steps", self.steps, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run.

    Attributes:
      model: Architecture.
      data: Where examples come from; holds the global batch size.
      steps: Optimizer steps, those of `phases` not counted; fewer than 2**31 in all, as they are counted in 32 bits.
      optimizer: Optimizer of the parameters; embedding tables have their own, `tables.optimizer`.
      init: What the parameters begin with, and the tables if the model has some: a run folder, whose newest checkpoint
        is taken, or an `Init`; None = they are drawn. Optimizer, steps and the position in the data begin anew.
      trainable: Regular expression of paths ("head/.*"): parameters that it does not name whole are frozen, and have no
        gradient and no optimizer state.
      averages: Running averages of the trained parameters, kept beside them.
      strategy: How parameters, gradients and optimizer state are divided over `replica` and `fsdp`, and how gradients
        are reduced.
      tables: Embedding tables.
      gradients: What happens to gradients before the optimizer.
      placement: Devices, and what lies where on them.
      precision: Dtypes.
      quantization: Number formats of modules and tables by path ("layers/mlp/gate", "tables/NAME"); the first rule that
        matches holds, and so exceptions come first. Parameters, their gradients and the optimizer stay in
        `precision.params`.
      evaluation: When and on what the run is scored.
      checkpoints: When to save and what to keep.
      xla_flags: Names of sets of compiler options, see `parallel.xla_flags.SETS`; those of other platforms are ignored.
      seed: Seeds parameters and dropout, in [0, 2**32) (the order of the data has its own seed).
      log_every: Steps between lines of metrics; these are the windows of windowed metrics.
      trackers: Where curves and pictures go besides the run folder, see `train.trackers`.
      phases: What follows after `steps`, with other fields or another model.
    """

    model: ModelConfig
    data: DataConfig
    steps: int
    optimizer: optim.Optimizer = optim.AdamW()
    init: str | Init | None = None
    trainable: str = ".*"
    averages: tuple[optim.Average, ...] = ()
    strategy: Strategy = Fsdp()
    tables: Tables = Tables()
    gradients: Gradients = Gradients()
    placement: Placement = Placement()
    precision: Precision = Precision()
    quantization: tuple[QuantizationRule, ...] = ()
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    xla_flags: tuple[str, ...] = ()
    seed: int = 0
    log_every: int = 100
    trackers: tuple[TensorBoard | Wandb | Trackio | TrackerConfig, ...] = (TensorBoard(),)
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= self.total_steps < 2**31:
            raise ValueError(f"Experiment: steps must be at least 1 and less than 2**31; got {self.total_steps}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"Experiment: seed must be at least 0 and less than 2**32; got {self.seed}.")
        check_at_least("Experiment: log_every", self.log_every, 1)
        every, full = self.checkpoints.every, self.tables.full_every
        if full is not None and (every == 0 or full < 1 or full % every):
            raise ValueError(
                f"Experiment: tables.full_every must be a multiple of checkpoints.every, {every}, or None for only "
                f"full checkpoints; got {full}."
            )
        if self.evaluation.patience and (self.phases or every == 0):
            raise ValueError(
                "Experiment: with evaluation.patience a run ends at a checkpoint and has no phases; got "
                f"checkpoints.every={every} and {len(self.phases)} phases. Change them, or set patience=none."
            )
        if self.tables.pipeline == "stale" and self.checkpoints.every_seconds:
            raise UserError(
                f"checkpoints.every_seconds={self.checkpoints.every_seconds:g} means saves by the clock, and "
                "tables.pipeline='stale' drains at every save, so that its numbers would follow the clock. Leave "
                "checkpoints.every_seconds out and save by steps, checkpoints.every, or set tables.pipeline='ids'."
            )
        xla_flags.check(self.xla_flags)

    @property
    def save_seconds(self) -> float:
        """Seconds after which a checkpoint is due; infinity for never."""
        seconds = self.checkpoints.every_seconds
        if seconds is None:
            seconds = 0 if self.tables.pipeline == "stale" else 300
        return seconds or float("inf")

    @property
    def total_steps(self) -> int:
        """Steps of the run, those of its phases included."""
        return self.steps + sum(phase.steps for phase in self.phases)
