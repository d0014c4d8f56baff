"""`Task`: all that training, planning and the command line know of a model.

A task is a model bound to the schema of its data. It says what a batch holds, how to build the model, what its loss
is, and what is measured; it is single-device code and knows no mesh. One file in `models/` and one recipe make a new
kind of model:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ClassifierTask(TaskBase):
        config: ClassifierConfig
        schema: ImageSchema

        def fields(self):
            return {
                "images": Field(shape=(28, 28), dtype="float32"),
                "labels": Field(shape=(), dtype="int32"),
                "weights": Field(shape=(), dtype="float32"),
            }

        def init(self, rngs, dtypes): ...

        def loss(self, model, batch, *, keys, gather):
            logits = model(batch["images"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
            return Loss((losses * batch["weights"]).sum(), batch["weights"].sum(), outputs={"logits": logits})

        def metrics(self):
            return (Accuracy(unit="images"), MeanLoss(unit="images"))

`TaskBase` has what most tasks share.
"""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.gradients.blocks import Gather
from scalejax.parallel.gradients.compute import Keys, Loss
from scalejax.parallel.mesh import AXES, BATCH_AXES, check_batch
from scalejax.parallel.towers import Partition
from scalejax.train.batch import Batch
from scalejax.train.checkpoints.trained import Trained
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import Metric

__all__ = ["Batch", "Field", "Gather", "Keys", "Loss", "Task", "TaskBase", "Work", "whole"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Field:
    """One array of a batch.

    Attributes:
      shape: Of one example, without the axis of examples; with scope "step" of the whole array, with scope "device" of
        what one device has. None = any size; a size along "sequence" is the largest.
      dtype: Of the array.
      axes: Logical name of each axis of `shape`, see `parallel.activations`; () = none has one.
      scope: "example": a row for each example, cut over devices and parts. "step": the same everywhere. "device": each
        device has its own.
      arrange: "zigzag": positions, the first axis of `shape`, in the order in which `context` cuts them evenly.
      fill: Value of padding, with which positions are filled up to a length that divides.
    """

    shape: tuple[int | None, ...]
    dtype: jax.typing.DTypeLike
    axes: tuple[str | None, ...] = ()
    scope: Literal["example", "step", "device"] = "example"
    arrange: Literal["as-is", "zigzag"] = "as-is"
    fill: int = 0

    @property
    def spec(self) -> P:
        """How the global array lies on a mesh."""
        if self.scope == "device":
            return P(AXES)
        named = (tuple(a for a in ACTIVATIONS.mesh_axes(name)) or None for name in self.axes)
        return P(BATCH_AXES, *named) if self.scope == "example" else P(*named)

    def check(self, name: str, array: np.ndarray) -> None:
        """Refuses a host array that is not what the field says.

        Raises:
          UserError: names the field, what was wanted and what came.
        """
        own = array.shape if self.scope == "step" else array.shape[1:]
        wanted = np.dtype(self.dtype)
        if array.dtype != wanted:
            raise UserError(
                f"Field {name!r} must be of {wanted}; the data has {array.dtype}. Convert it in the reader."
            )
        fits = len(own) == len(self.shape) and all(
            size is None or size == have or (axis == "sequence" and have < size)
            for size, have, axis in zip(self.shape, own, self.axes or (None,) * len(own), strict=True)
        )
        if not fits:
            of = {"example": "an example", "step": "a step", "device": "a device"}[self.scope]
            raise UserError(
                f"Field {name!r} must have the shape {self.shape} of {of}; the data has {own}. Change `fields` of the "
                "task, or the reader."
            )


def whole(params: Any) -> Any:
    """The gather of parameters that are whole already."""
    return params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Placed:
    """A global batch on the devices, as a step takes it.

    Attributes:
      fields: See `Batch`.
      features: Ids of embedding tables; None where there are none.
      constants: See `Batch`.
    """

    fields: dict[str, Any]
    features: DeviceJagged | None = None
    constants: object = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a batch is, as work.

    Attributes:
      flops: FLOPs of forward and backward, 6 a multiply-accumulate of the model's matrices, nothing recomputed; 0 =
        nobody has counted.
      count: How many of the task's unit it has: tokens, images, nodes.
    """

    flops: float
    count: float


def host_fields(task: "Task", batch: object, seed: int, step: int) -> Mapping[str, object]:
    """The fields of a host batch as NumPy arrays, with those that the task draws for a step of a run."""
    return task.host_fields(batch, task.drawn(np.random.default_rng((seed, step))))


class Task(Protocol):
    """A model bound to a schema; see `TaskBase` for the defaults of all but `fields`, `init` and `loss`."""

    @property
    def schema(self) -> Any:
        """What the data is like."""
        ...

    @property
    def fetches(self) -> Literal["whole", "blocks"]:
        """Who makes parameters whole: the step, all at once, or the model, block by block with `gather`."""
        ...

    @property
    def draws(self) -> Literal["training", "evaluation too"]:
        """Whether `loss` also gets keys in evaluations: one for each example, by its number."""
        ...

    @property
    def planned_from(self) -> Literal["schema", "data"]:
        """What a plan of a step needs: "data", where these alone know the sizes of fields and constants."""
        ...

    @property
    def towers(self) -> Partition | None:
        """Features that a host may look up for all examples, by tower; None = there are none.

        Where `tables.exchange.route` is "towers", `Batch.embedded` is then a `HalfWay`, and parameters whose first axis
        is named "towers" lie apart, on the host of their tower.
        """
        ...

    @property
    def unit(self) -> str:
        """What `work` counts: "examples", "tokens", "images", "nodes"."""
        ...

    @property
    def apart(self) -> Mapping[str, tuple[str, ...]]:
        """Path of a parameter -> data axes along which devices hold different ones (explicit form only)."""
        ...

    def fields(self) -> Mapping[str, object]:
        """What a batch holds: {name: `Field`, or a pytree of them}."""
        ...

    def tables(self) -> tuple[TableConfig, ...]:
        """The embedding tables that the model looks up; their optimizer is that of the run."""
        ...

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        """Builds the model.

        Its `nnx.Param`s carry `logical_axes` metadata; other variables may, too: a first axis "batch" says that their
        rows are those of the batch.
        """
        ...

    def check(self, experiment: Any, mesh: Mesh, data: Any = None) -> None:
        """Refuses what this model cannot do in a run.

        Args:
          experiment: A `train.experiment.Experiment`.
          mesh: Its devices.
          data: Its data; None = they are not read.

        Raises:
          UserError: names both fields that do not go together.
        """
        ...

    def open_folder(self, path: pathlib.Path) -> Trained:
        """A model in a folder that is no run, in a form that this family of models knows.

        Raises:
          UserError: it is in no such form.
        """
        ...

    def write_folder(self, path: pathlib.Path, trained: Trained) -> None:
        """Writes a model in a form of others, which `open_folder` reads, in a new folder.

        Raises:
          UserError: there is no such form, or the disk refuses.
        """
        ...

    def constants(self, data: Any, mesh: Mesh) -> object:
        """What the model reads in every step, a pytree of arrays on the devices of the mesh; made once."""
        ...

    def abstract_constants(self, data: Any, mesh: Mesh) -> object:
        """The same as shapes, dtypes and shardings, on a mesh whose devices need not be here."""
        ...

    def host_fields(self, batch: Any, drawn: Mapping[str, object]) -> Mapping[str, object]:
        """The fields of a host batch as NumPy arrays, with what `drawn` gave."""
        ...

    def drawn(self, rng: np.random.Generator) -> Mapping[str, object]:
        """Fields of scope "step" that are not in the data: the host draws them for each step, a path of a supernet say.

        Args:
          rng: Made of the run's seed and the number of the step, from 1; 0 in evaluations.
        """
        ...

    def loss(self, model: Any, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """What the model finds out about a batch.

        Args:
          model: What `init` returned.
          batch: The whole batch, that of one device, or a part of it.
          keys: None = nothing random, as in evaluations unless `draws` says otherwise.
          gather: Makes the parameters of a block whole, {path: array} to the same (`nn.layers.Gather`).
        """
        ...

    def weight(self, batch: Batch) -> jax.Array:
        """float[]: what `Loss.weight` of the global batch will be, before the loss is computed."""
        ...

    def metrics(self) -> tuple[Metric, ...]:
        """What is measured; the first value of the first decides which checkpoint is best."""
        ...

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        """The work of a global batch whose fields have these shapes."""
        ...

    def advice(self) -> Mapping[tuple[str, ...], str]:
        """What can be done with a trained model besides scoring it: arguments of `scalejax` -> what for.

        "{run}" stands for the folder of the run.
        """
        ...

    def describe(self, data: Any) -> Mapping[str, object]:
        """What the summary of a run says of model and data besides the number of parameters."""
        ...

    def identity(self) -> Mapping[str, str]:
        """Settings by name that trained parameters go with although their shapes need not tell; others are refused."""
        ...

    def train_batches(self, data: Any, mesh: Mesh, start_example: int) -> Iterator[object]:
        """This process's slice of each global batch, without end."""
        ...

    def eval_batches(self, data: Any, mesh: Mesh, split: str) -> Iterator[object]:
        """One pass over a split."""
        ...


class TaskBase:
    """The parts of a `Task` that most share."""

    schema: Any
    fetches: Literal["whole", "blocks"] = "whole"
    draws: Literal["training", "evaluation too"] = "training"
    planned_from: Literal["schema", "data"] = "schema"
    towers: Partition | None = None
    unit: str = "examples"

    @property
    def apart(self) -> Mapping[str, tuple[str, ...]]:
        return {}

    def tables(self) -> tuple[TableConfig, ...]:
        return ()

    def check(self, experiment: Any, mesh: Mesh, data: Any = None) -> None:
        del data
        for size in getattr(experiment.data, "batch_sizes", (experiment.data.batch_size,)):
            check_batch(size, mesh, over="all axes" if self.tables() else "batch axes")

    def open_folder(self, path: pathlib.Path) -> Trained:
        if not path.is_dir():
            raise UserError(f"init={path} does not exist. Give a folder that `scalejax train` wrote.")
        raise UserError(
            f"init={path} is no run folder, and {type(self).__name__} knows no other. Give a folder that `scalejax "
            "train` wrote."
        )

    def write_folder(self, path: pathlib.Path, trained: Trained) -> None:
        del trained
        raise UserError(
            f"DEST {path} cannot be written: {type(self).__name__} knows no form of others. Use the run "
            "folder as it is."
        )

    def constants(self, data: Any, mesh: Mesh) -> object:
        del data, mesh

    def abstract_constants(self, data: Any, mesh: Mesh) -> object:
        del data, mesh

    def fields(self) -> Mapping[str, object]:
        raise NotImplementedError(f"{type(self).__name__} has to say what a batch holds: fields() -> {{name: Field}}.")

    def host_fields(self, batch: Any, drawn: Mapping[str, object]) -> Mapping[str, object]:
        found = {}
        for name in self.fields():
            if name in drawn:
                found[name] = drawn[name]
                continue
            held = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
            if held is None:
                named = batch if isinstance(batch, Mapping) else vars(batch)
                raise UserError(
                    f"The batch has no field {name!r}, which {type(self).__name__} reads; it has "
                    f"{', '.join(map(str, named))}. Name it in the reader, or change `fields` of the task."
                )
            found[name] = held
        return found

    def drawn(self, rng: np.random.Generator) -> Mapping[str, object]:
        del rng
        return {}

    def weight(self, batch: Batch) -> jax.Array:
        return batch["weights"].astype(jnp.promote_types(batch["weights"].dtype, jnp.float32)).sum()

    def metrics(self) -> tuple[Metric, ...]:
        return (MeanLoss(),)

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        return Work(flops=0.0, count=next(iter(shapes.values()))[0])

    def advice(self) -> Mapping[tuple[str, ...], str]:
        return {}

    def describe(self, data: Any) -> Mapping[str, object]:
        del data
        return {}

    def identity(self) -> Mapping[str, str]:
        return {}

    def train_batches(self, data: Any, mesh: Mesh, start_example: int) -> Iterator[object]:
        del mesh
        return data.train_batches(
            start_example=start_example, process_index=jax.process_index(), process_count=jax.process_count()
        )

    def eval_batches(self, data: Any, mesh: Mesh, split: str) -> Iterator[object]:
        del mesh
        return data.eval_batches(split, process_index=jax.process_index(), process_count=jax.process_count())
