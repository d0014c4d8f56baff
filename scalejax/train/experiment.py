"""`Experiment`: everything that defines a run, as a tree of frozen dataclasses of plain values."""

import dataclasses
import typing
from typing import Literal

from scalejax import optim
from scalejax.data.graphs import NodeData
from scalejax.errors import UserError
from scalejax.numerics.rules import QuantizationRule
from scalejax.parallel import xla_flags
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.config import MappedFeatures, RowOptimizer, RowwiseAdagrad
from scalejax.parallel.embedding.jagged import DedupGroup
from scalejax.parallel.embedding.plan import Exchange, ShardingPlan
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradient_scaling import LossScaling
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.offload import Offload
from scalejax.parallel.rules import LLM, REPLICATED, Rules
from scalejax.train.protocols import DataConfig, DenseModelConfig, GraphModelConfig, ModelConfig

Strategy = Fsdp | Ddp

ComputeDtype = Literal["platform", "float32", "bfloat16", "float16", "float64"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes of the dense part.

    Attributes:
      params: Master weights, gradients and optimizer state ("float64" needs jax_enable_x64; parity tests use it).
      compute: Matrix products and activations; "platform" is bfloat16 on accelerators and float32 on CPU. Losses,
        norms, softmax and reductions stay in float32 or wider. "float16" needs `DenseExperiment.loss_scaling`.
      tables: Rows of the embedding tables at rest; None = what the model's tables say.
    """

    params: Literal["float32", "float64"] = "float32"
    compute: ComputeDtype = "platform"
    tables: Literal["float32", "bfloat16", "float64"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When to save and what to keep.

    Attributes:
      every: Steps between checkpoints; the last step is always saved. 0 = only the last.
      keep_last: Newest checkpoints kept.
      keep_best: Also kept: the best by `best_metric`.
      full_every: Steps between full checkpoints, a multiple of `every`; those in between hold of the tables only the
        rows that were updated since the checkpoint before, and need it to be restored (it is kept as long as they
        are). None = all are full.
      best_metric: Field of the evaluation record; "logloss", "ne" and "loss" are better low, "auc" and "accuracy"
        better high.
    """

    every: int = 1000
    keep_last: int = 2
    keep_best: int = 1
    best_metric: Literal["logloss", "ne", "auc", "loss", "accuracy"] = "logloss"
    full_every: int | None = None

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"Checkpoints: every must be at least 1, or 0 for only the last step; got {self.every}.")
        if self.full_every is not None and (self.every == 0 or self.full_every < 1 or self.full_every % self.every):
            raise ValueError(
                f"Checkpoints: full_every must be a multiple of every, {self.every}, or None for only full ones; got "
                f"{self.full_every}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """One run.

    Attributes:
      model: Architecture.
      data: Where examples come from; holds the global batch size.
      steps: Optimizer steps, fewer than 2**31: they are counted in 32 bits.
      optimizer: Optimizer of the dense part.
      row_optimizer: Optimizer of the embedding tables, learning rate included.
      row_schedule: Factor on the learning rate of the tables, by step.
      mesh: Devices per mesh axis.
      rules: Logical axis of a parameter -> mesh axes.
      exchange: How ids and rows travel between devices.
      sharding: Where the rows of each table live; `scalejax shard` plans it, `ShardingPlan.load` reads a plan.
      accumulate: How the gradients of a row add up: "ordered" (by example) or "exact" (in fixed point: the same to the
        bit in any order of the batch), see `EmbeddingCollection`.
      id_maps: Features whose ids are any 64-bit integers, and the maps that give them rows of a table of fixed size.
      dedup: Features that are looked up once per distinct row of a device's examples.
      pipeline: What runs a step ahead. "ids": the exchange of the next batch's ids runs beside this step; the results
        are those of "none" to the bit. "stale": its rows are fetched too, before this step updates them: the gradient
        is taken at rows that are one update old, another algorithm (except right after a checkpoint, where the
        pipeline is drained).
      precision: Dtypes.
      quantization: Number formats of modules and tables by path ("bottom/layers/0", "tables/NAME"); the first rule that
        matches holds, and so exceptions come first. Parameters, their gradients and the optimizer stay in
        `precision.params`.
      microbatch: Most examples that a device puts through the dense part at once; gradients add up over the parts and
        one update follows. None = 1,024 on CPU, where temporaries then stay in the caches, and everything elsewhere.
      seed: Seeds parameters and dropout, in [0, 2**32) (the order of the data has its own seed).
      log_every: Steps between lines of metrics; these are the windows of windowed metrics.
      eval_every: Steps between evaluations on the validation split; 0 = only at the end.
      eval_split: Split scored at intervals.
      final_split: Split scored at the end.
      validation: "split" scores held-out examples only; "progressive" also scores each day of the training stream
        before it is trained (needs data in time order).
      checkpoints: When to save and what to keep.
    """

    model: ModelConfig
    data: DataConfig
    steps: int
    optimizer: optim.Optimizer = optim.Adam()
    row_optimizer: RowOptimizer = RowwiseAdagrad()
    row_schedule: optim.Schedule = optim.Constant()
    mesh: MeshShape = MeshShape()
    rules: Rules = REPLICATED
    exchange: Exchange = Exchange(roomy_below_bytes=32 * 2**20)
    sharding: ShardingPlan = ShardingPlan()
    accumulate: Literal["ordered", "exact"] = "ordered"
    id_maps: tuple[MappedFeatures, ...] = ()
    dedup: tuple[DedupGroup, ...] = ()
    pipeline: Literal["none", "ids", "stale"] = "none"
    precision: Precision = Precision()
    quantization: tuple[QuantizationRule, ...] = ()
    microbatch: int | None = None
    seed: int = 0
    log_every: int = 100
    eval_every: int = 0
    eval_split: str = "validation"
    final_split: str = "test"
    validation: Literal["split", "progressive"] = "split"
    checkpoints: Checkpoints = Checkpoints()

    def __post_init__(self) -> None:
        _check_common("Experiment", self)
        if self.precision.compute == "float16":
            raise UserError(
                "Experiment: precision.compute='float16' needs a scaled loss, which runs with embedding tables do not "
                "have. Use 'bfloat16', whose range is that of float32."
            )
        if self.accumulate not in ("ordered", "exact"):
            raise ValueError(f"Experiment: accumulate must be 'ordered' or 'exact'; got {self.accumulate!r}.")
        if self.pipeline not in ("none", "ids", "stale"):
            raise ValueError(f"Experiment: pipeline must be 'none', 'ids' or 'stale'; got {self.pipeline!r}.")
        if self.pipeline == "stale" and self.id_maps:
            raise UserError(
                "Experiment: pipeline='stale' fetches rows before the update of the step before, which may be that of "
                "an id whose row an id map has just given to another. Set pipeline='ids', which is exact, or 'none'."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseExperiment:
    """One run of a model without embedding tables, such as a language model.

    Attributes:
      model: Architecture.
      data: Where examples come from; holds the global batch size.
      steps: Optimizer steps, fewer than 2**31.
      optimizer: Optimizer.
      clip: Gradients are scaled down to this global norm where theirs is larger; None = never.
      loss_scaling: How the factor on the loss moves, without which gradients in float16 underflow; a step whose
        gradients overflow is skipped on all devices. None = losses are not scaled.
      strategy: How parameters, gradients and optimizer state are divided over `replica` and `fsdp`, and how gradients
        are reduced.
      offload: What rests in host memory between steps, see `parallel.offload`.
      xla_flags: Names of sets of compiler options, see `parallel.xla_flags.SETS`; those of other platforms are ignored,
        as the default is where there is no CPU.
      mesh: Devices per mesh axis.
      rules: Logical axis of a parameter -> mesh axes.
      precision: Dtypes (`tables` is not used).
      quantization: Number formats of modules by path ("layers/mlp/gate"); the first rule that matches holds, and so
        exceptions come first. Parameters, their gradients and the optimizer stay in `precision.params`.
      microbatch: Most examples that a device puts through the model at once; gradients add up over the parts and one
        update follows. None = all.
      seed: Seeds parameters and dropout, in [0, 2**32) (the order of the data has its own seed).
      log_every: Steps between lines of metrics; these are the windows of windowed metrics.
      eval_every: Steps between evaluations on `eval_split`; 0 = only at the end.
      eval_split: Split scored at intervals.
      final_split: Split scored at the end.
      checkpoints: When to save and what to keep.
    """

    model: DenseModelConfig
    data: DataConfig
    steps: int
    optimizer: optim.Optimizer = optim.AdamW()
    clip: float | None = 1.0
    loss_scaling: LossScaling | None = None
    strategy: Strategy = Fsdp()
    offload: Offload = "none"
    xla_flags: tuple[str, ...] = ("cpu-plain-products",)
    mesh: MeshShape = MeshShape()
    rules: Rules = LLM
    precision: Precision = Precision()
    quantization: tuple[QuantizationRule, ...] = ()
    microbatch: int | None = None
    seed: int = 0
    log_every: int = 10
    eval_every: int = 0
    eval_split: str = "validation"
    final_split: str = "validation"
    checkpoints: Checkpoints = Checkpoints(best_metric="loss")

    def __post_init__(self) -> None:
        _check_common("DenseExperiment", self)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"DenseExperiment: clip must be above 0, or None; got {self.clip}.")
        if self.offload not in typing.get_args(Offload):
            choices = ", ".join(map(repr, typing.get_args(Offload)))
            raise ValueError(f"DenseExperiment: offload must be one of {choices}; got {self.offload!r}.")
        xla_flags.check(self.xla_flags)
        if self.precision.tables is not None:
            raise ValueError("DenseExperiment: precision.tables must be None: there are no embedding tables.")
        if self.checkpoints.full_every is not None:
            raise ValueError("DenseExperiment: checkpoints.full_every must be None: only embedding tables have deltas.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphExperiment:
    """One run of a model that classifies the nodes of one graph.

    A step is a pass over the whole graph, or over a mini-batch with sampled neighbours where the data have fan-outs.

    Attributes:
      model: Architecture.
      data: The graph; how it is normalised and sampled.
      steps: Optimizer steps, fewer than 2**31; without fan-outs these are epochs.
      optimizer: Optimizer.
      mesh: Devices over which nodes are cut, in blocks of rows that fetch what they read of others; all axes count
        alike. None = one device.
      precision: Dtypes (`tables` is not used).
      seed: Seeds parameters and dropout, in [0, 2**32).
      log_every: Steps between lines of metrics; these are the windows of windowed metrics.
      eval_every: Steps between evaluations on `eval_split`; 0 = only at the end.
      eval_split: Split scored at intervals; its best step is reported.
      final_split: Split scored beside it, and at the end.
      checkpoints: When to save and what to keep.
    """

    model: GraphModelConfig
    data: NodeData
    steps: int
    optimizer: optim.Optimizer = optim.AdamL2()
    mesh: MeshShape | None = None
    precision: Precision = Precision()
    seed: int = 0
    log_every: int = 10
    eval_every: int = 1
    eval_split: str = "validation"
    final_split: str = "test"
    checkpoints: Checkpoints = Checkpoints(every=0, best_metric="accuracy")

    def __post_init__(self) -> None:
        _check_common("GraphExperiment", self)
        if self.precision.tables is not None:
            raise ValueError("GraphExperiment: precision.tables must be None: there are no embedding tables.")
        if self.precision.compute == "float16":
            raise UserError(
                "GraphExperiment: precision.compute='float16' needs a scaled loss, which runs on graphs do not have. "
                "Use 'bfloat16', whose range is that of float32."
            )
        if self.checkpoints.full_every is not None:
            raise ValueError("GraphExperiment: checkpoints.full_every must be None: only embedding tables have deltas.")
        if self.checkpoints.best_metric not in ("loss", "accuracy", "auc"):
            raise UserError(
                "GraphExperiment: checkpoints.best_metric must be 'loss', 'accuracy' or, where labels are tasks, "
                f"'auc'; got {self.checkpoints.best_metric!r}."
            )


AnyExperiment = Experiment | DenseExperiment | GraphExperiment


def _check_common(name: str, experiment: AnyExperiment) -> None:
    """What every kind of run has.

    Raises:
      ValueError: a field is out of its range.
    """
    e = experiment
    if not 1 <= e.steps < 2**31:
        raise ValueError(f"{name}: steps must be at least 1 and less than 2**31; got {e.steps}.")
    if not isinstance(e, GraphExperiment) and e.microbatch is not None and e.microbatch < 1:
        raise ValueError(f"{name}: microbatch must be at least 1, or None; got {e.microbatch}.")
    if not 0 <= e.seed < 2**32:
        raise ValueError(f"{name}: seed must be at least 0 and less than 2**32; got {e.seed}.")
    if e.log_every < 1:
        raise ValueError(f"{name}: log_every must be at least 1; got {e.log_every}.")
    if e.eval_every < 0:
        raise ValueError(f"{name}: eval_every must be at least 1, or 0 for only the end; got {e.eval_every}.")
