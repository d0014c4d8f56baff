"""The task of networks that classify pictures."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalejax.data.images import pictures
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.nn import counts, wide
from scalejax.numerics.dtypes import Dtypes
from scalejax.train import self_distillation
from scalejax.train.metrics import evaluation
from scalejax.train.metrics.classification import Accuracy
from scalejax.train.metrics.loss import MeanLoss
from scalejax.train.metrics.protocol import SHOWN, Collected, Metric, MetricBase, Value
from scalejax.train.self_distillation import CrossEntropy, Learning
from scalejax.train.task import Batch, Field, Gather, Keys, Loss, TaskBase, Work


class ClassifierConfig(Protocol):
    """The part of the config of an architecture that a task knows."""

    @property
    def learning(self) -> Learning: ...

    def build(self, schema: ImageSchema, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        """A network: (stored pixels [B, H, W, C], purpose) -> logits [B, classes]."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassPictures(MetricBase):
    """Draws the first pictures of a split with their classes and those that were predicted.

    Attributes:
      classes: Names, by label.
    """

    classes: tuple[str, ...]

    @property
    def values(self) -> tuple[Value, ...]:
        return ()

    @property
    def shows(self) -> tuple[str, ...]:
        return ("images", "labels", "logits")

    def keep(self, folder: pathlib.Path, split: str, collected: Collected, sums: object) -> None:
        del sums
        rows = range(min(SHOWN, len(collected["images"])))
        said = collected["logits"].argmax(1)
        names = [(self.classes[collected["labels"][row]], self.classes[said[row]]) for row in rows]
        panels = [pictures.labelled(collected["images"][row], *pair) for row, pair in zip(rows, names, strict=True)]
        caption = "Pictures and their classes; in red what was predicted instead."
        # Wide enough for the names below them.
        svg = pictures.grid(panels, columns=6, scale=max(1.0, 84 / collected["images"].shape[2]))
        evaluation.save_picture(folder, evaluation.Picture(split=split, name="classes", caption=caption, svg=svg))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierTask(TaskBase):
    """Classes of pictures; a `train.task.Task`.

    Attributes:
      config: Architecture, and how it learns.
      schema: Of the pictures.
    """

    config: ClassifierConfig
    schema: ImageSchema
    unit: str = "images"

    def __post_init__(self) -> None:
        if len(self.schema.classes) < 2:
            raise UserError(
                "data: a classifier needs two classes or more; the labels have "
                f"{', '.join(self.schema.classes) or 'none'}. Give pictures of another class."
            )

    def fields(self) -> dict[str, Field]:
        """Pictures and labels, and those of the other views that a way to learn wants."""
        images = Field(shape=self.schema.shape, dtype=self.schema.dtype)
        labels = Field(shape=(), dtype="int32")
        found = {"images": images, "labels": labels, "weights": Field(shape=(), dtype="float32")}
        for view in self.config.learning.views:
            found |= {view.prefix + "images": images, view.prefix + "labels": labels}
        return found

    def init(self, rngs: nnx.Rngs, dtypes: Dtypes) -> nnx.Module:
        """Builds the network, and what waits in it from step to step."""
        network = self.config.build(self.schema, rngs, dtypes)
        rows, classes = self.schema.batch_size, len(self.schema.classes)
        self_distillation.attach(network, self.config.learning, rows=rows, classes=classes, dtype=wide(dtypes.params))
        return network

    def train_batches(self, data: ImageDataSet, mesh: Mesh, start_example: int) -> Iterator[object]:
        """Batches with the other views."""
        del mesh
        process, processes = jax.process_index(), jax.process_count()
        return data.train_batches(
            start_example=start_example,
            process_index=process,
            process_count=processes,
            views=self.config.learning.views,
        )

    def eval_batches(self, data: ImageDataSet, mesh: Mesh, split: str) -> Iterator[object]:
        """Batches whose other views are the pictures themselves: nothing reads them."""
        for batch in data.eval_batches(split, process_index=jax.process_index(), process_count=jax.process_count()):
            others = [
                (view.prefix + name, name) for view in self.config.learning.views for name in ("images", "labels")
            ]
            yield {**batch, **{other: batch[name] for other, name in others}}

    def loss(self, model: Any, batch: Batch, *, keys: Keys | None, gather: Gather) -> Loss:
        """As the config's `learning` says in training, cross-entropy elsewhere."""
        del keys, gather
        if batch.purpose == "training":
            losses, logits = self.config.learning.losses(model, batch)
        else:
            logits = model(batch["images"], batch.purpose)
            losses = CrossEntropy().of(logits, batch["labels"])
        weights = batch["weights"].astype(losses.dtype)
        return Loss((losses * weights).sum(), weights.sum(), outputs={"logits": logits.astype(jnp.float32)})

    def metrics(self) -> tuple[Metric, ...]:
        return (Accuracy(unit="images"), MeanLoss(unit="images"), ClassPictures(classes=self.schema.classes))

    def work(self, shapes: Mapping[str, tuple[int, ...]]) -> Work:
        images = shapes["images"][0]
        network = counts.abstract(self.config.build, self.schema)
        one = jax.ShapeDtypeStruct((1, *self.schema.shape), self.schema.dtype)
        return Work(flops=6 * images * counts.macs(network, one, purpose="evaluation"), count=images)

    def identity(self) -> Mapping[str, str]:
        return self.schema.identity()
