"""How a classifier learns from labels and from itself: self-discipline on multiple channels (SMC), and its rivals.

A network is a function of pictures, `network(images, purpose) -> logits [B, classes]`. A `Learning` makes losses of a
batch with it; it is one field of a model's config, so that a comparison is one `--set model.learning=...` a run:

    CrossEntropy()   labels, smoothed if wanted
    Smc()            Zhao, Luo and Wang, arXiv 2304.14224
    Dlb()            self-distillation from the last mini-batch, Shen et al., arXiv 2203.16172
    Sam()            sharpness-aware minimization, Foret et al., arXiv 2010.01412

SMC in step t, b_t being its examples in the order that all channels share, f the network and w_t its parameters:

    q_{t+1} = f(w_t, other view of b_{t+1})      no gradient; the only pass that moves running means
    z_t     = f(w_t, own view of b_t)            means of its own batch
    a_t     = alpha (1 - (1 + cos(pi t / T)) / 2)
    L       = (1 - a_t) CE(z_t, y) + a_t KL(softmax(q_t / tau) || softmax(z_t / tau))

The teacher of a batch is so the same network one update ago, on another view; a_0 is 0, when nothing waits yet. KL has
no factor tau^2, as in the authors' code. With n channels there are n - 1 other views, which go through the network at
once, and the mean of their soft labels is the target: that rule is ours, n > 2 was not to be read.

What waits for the next step is a variable of the network with a row for each example of a batch. It is part of every
checkpoint, lies where its examples lie, and is never gathered.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax.data.images.dataset import View
from scalejax.errors import UserError
from scalejax.parallel.mesh import sum_over_batch
from scalejax.train.batch import Batch

QUEUE = "soft_labels"
"""Attribute of a network under which logits wait for the next step."""


class SoftLabels(nnx.Variable[jax.Array]):
    """Logits that wait for the next step, wide[rows of a batch, views, classes]."""


class Learning(Protocol):
    """A way to learn; `CrossEntropy`, `Smc`, `Dlb`, `Sam`."""

    @property
    def views(self) -> tuple[View, ...]:
        """Fields that training batches have besides their own."""
        ...

    @property
    def queued(self) -> int:
        """How many sets of logits of each example are kept for the next step."""
        ...

    def losses(self, network: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Losses of the examples of a training batch, wide[B], and their logits, wide[B, C]; changes variables."""
        ...


def attach(network: nnx.Module, learning: Learning, *, rows: int | None, classes: int, dtype: Any) -> None:
    """Gives a network the variable in which logits wait, if the way to learn has some.

    Raises:
      UserError: the data does not say how many rows a batch has.
    """
    if not learning.queued:
        return
    if rows is None:
        raise UserError(
            f"model.learning={type(learning).__name__} keeps soft labels for the examples of the next batch, but the "
            "schema of the data does not say how many a batch has. Set batch_size of the ImageSchema."
        )
    zeros = jnp.zeros((rows, learning.queued, classes), dtype)
    setattr(network, QUEUE, SoftLabels(zeros, logical_axes=("batch", None, None)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy with labels.

    Attributes:
      smoothing: Share of the target that is spread evenly over all classes (Szegedy et al., 2016).
    """

    smoothing: float = 0.0

    @property
    def views(self) -> tuple[View, ...]:
        return ()

    @property
    def queued(self) -> int:
        return 0

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise UserError(f"CrossEntropy: smoothing must be in [0, 1), 0.1 say; got {self.smoothing}.")

    def losses(self, network: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        logits = network(batch["images"], "training")
        return self.of(logits, batch["labels"]), logits

    def of(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """wide[B, C] and int32[B] -> wide[B]."""
        logs = jax.nn.log_softmax(logits)
        right = jnp.take_along_axis(logs, labels[:, None], 1)[:, 0]
        return -(1 - self.smoothing) * right - self.smoothing * logs.mean(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smc:
    """Self-discipline on multiple channels; the defaults are those of the authors' code.

    Attributes:
      channels: Views of each example; 2 is the paper's SMC-2.
      alpha: Weight of the soft labels at the end of the run.
      temperature: Of soft labels and of what is compared with them.
      shared_views: Whether the teacher sees the very picture that the network sees one step later. The authors' two
        loaders have equal seeds and so, as far as can be read, equal crops and flips: this mimics it.
      base: What labels teach.
    """

    channels: int = 2
    alpha: float = 0.9
    temperature: float = 1.5
    shared_views: bool = False
    base: CrossEntropy = CrossEntropy()

    def __post_init__(self) -> None:
        if self.channels < 2:
            raise UserError(f"Smc: channels must be at least 2, a view to learn from and one of a teacher; got {self}.")
        if not 0 <= self.alpha <= 1:
            raise UserError(f"Smc: alpha must be in [0, 1], it is the weight of soft labels; got {self.alpha}.")
        _check_temperature("Smc", self.temperature)

    @property
    def views(self) -> tuple[View, ...]:
        """Those of the teacher, a batch ahead."""
        return tuple(
            View(prefix=f"ahead{n}_", channel=0 if self.shared_views else n, ahead=1) for n in range(1, self.channels)
        )

    @property
    def queued(self) -> int:
        return self.channels - 1

    def losses(self, network: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        # Of a copy: what the pass makes of the running means is dropped with it, so that they move once a step.
        logits = nnx.clone(network)(batch["images"], "training")
        queue = getattr(network, QUEUE)
        a = weight(batch.progress, self.alpha, logits.dtype)
        soft = distance(queue[...].astype(logits.dtype), logits, self.temperature)
        losses = (1 - a) * self.base.of(logits, batch["labels"]) + a * soft
        queue[...] = self._teach(network, batch).astype(queue[...].dtype)
        return losses, logits

    def _teach(self, network: Any, batch: Batch) -> jax.Array:
        """Logits of the next batch, wide[B, channels - 1, C]."""
        views = [batch[view.prefix + "images"] for view in self.views]
        # Views of an example side by side: rows of a device stay on it.
        images = jnp.stack(views, 1).reshape(-1, *views[0].shape[1:])
        logits = jax.lax.stop_gradient(network(images, "training"))
        return logits.reshape(-1, len(views), logits.shape[-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dlb:
    """Self-distillation from the last mini-batch: each batch comes once more, in another view, beside the next one.

    L is the cross-entropy over both, and alpha tau^2 KL(logits of one step ago || logits now) of those that came again:
    two passes forward and backward for each new batch, as in the authors' code.

    Attributes:
      alpha: Weight of the soft labels.
      temperature: Of both sides.
      base: What labels teach.
    """

    alpha: float = 1.0
    temperature: float = 3.0
    base: CrossEntropy = CrossEntropy()

    @property
    def views(self) -> tuple[View, ...]:
        """The batch before."""
        return (View(prefix="before_", channel=1, ahead=-1),)

    @property
    def queued(self) -> int:
        return 1

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise UserError(f"Dlb: alpha must be at least 0, it is the weight of soft labels; got {self.alpha}.")
        _check_temperature("Dlb", self.temperature)

    def losses(self, network: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        images = jnp.stack([batch["images"], batch["before_images"]], 1)
        both = network(images.reshape(-1, *images.shape[2:]), "training")
        logits, again = jnp.moveaxis(both.reshape(len(images), 2, -1), 1, 0)
        queue = getattr(network, QUEUE)
        soft = self.temperature**2 * distance(queue[...].astype(again.dtype), again, self.temperature)
        new, old = self.base.of(logits, batch["labels"]), self.base.of(again, batch["before_labels"])
        queue[...] = jax.lax.stop_gradient(logits)[:, None].astype(queue[...].dtype)
        return jnp.where(_begun(batch), (new + old) / 2 + self.alpha * soft, new), logits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sam:
    """Sharpness-aware minimization: the gradient is taken at w + radius g / |g|, g the gradient of the batch at w.

    g is that of the *global* batch (with microbatches of the part). Running means follow the first of the two passes.

    Attributes:
      radius: Length of the step to where the gradient is taken.
      base: What labels teach.
    """

    radius: float = 0.05
    base: CrossEntropy = CrossEntropy()

    @property
    def views(self) -> tuple[View, ...]:
        return ()

    @property
    def queued(self) -> int:
        return 0

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise UserError(f"Sam: radius must be above 0, 0.05 say; got {self.radius}.")

    def losses(self, network: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        structure, params, rest = nnx.split(network, nnx.Param, ...)

        def first(params: Any) -> tuple[jax.Array, Any]:
            model = nnx.merge(structure, params, rest, copy=True)
            losses, _ = self.base.losses(model, batch)
            return (losses * batch["weights"].astype(losses.dtype)).sum(), nnx.split(model, nnx.Param, ...)[2]

        slope, moved = jax.grad(first, has_aux=True)(jax.lax.stop_gradient(params))
        # Whatever the weight of the batch, it does not change the direction.
        slope = jax.tree.map(sum_over_batch, slope)
        length = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(slope)))
        step = self.radius / jnp.maximum(length, 1e-12)
        there = jax.tree.map(lambda w, g: w + jax.lax.stop_gradient(step.astype(w.dtype) * g), params, slope)
        losses, logits = self.base.losses(nnx.merge(structure, there, rest, copy=True), batch)
        nnx.update(network, jax.lax.stop_gradient(moved))
        return losses, logits


AnyLearning = CrossEntropy | Smc | Dlb | Sam


def weight(progress: jax.Array | None, alpha: float, dtype: Any = jnp.float32) -> jax.Array:
    """a_t = alpha (1 - (1 + cos(pi t / T)) / 2) for progress t / T: from 0 to alpha."""
    assert progress is not None, "a batch that is trained has its progress"
    return alpha * (1 - (1 + jnp.cos(jnp.pi * progress.astype(dtype))) / 2)


def distance(waiting: jax.Array, logits: jax.Array, temperature: float) -> jax.Array:
    """KL(p || softmax(z / tau)), p the mean over views of softmax(q / tau): q wide[B, views, C], z wide[B, C]."""
    p = jax.nn.softmax(jax.lax.stop_gradient(waiting) / temperature).mean(1)
    return (jax.scipy.special.xlogy(p, p) - p * jax.nn.log_softmax(logits / temperature)).sum(1)


def _begun(batch: Batch) -> jax.Array:
    assert batch.progress is not None, "a batch that is trained has its progress"
    return batch.progress > 0


def _check_temperature(what: str, temperature: float) -> None:
    if not temperature > 0:
        raise UserError(f"{what}: temperature must be above 0; got {temperature}.")
