"""Clipping by the global norm, and loss scaling for float16, over gradients that may be sharded.

Both need one number of all gradients of all devices: a norm, or whether every element is finite. Under jit a reduction
over a sharded array *is* a reduction over devices, so what follows is written for one device and holds for all: the
compiler adds an all-reduce of one number. A check of each device's own shard would not do: devices would disagree on
whether to take the step.
"""

import dataclasses
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp

from scalejax.errors import UserError

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

Tree = TypeVar("Tree")


def global_norm(grads: object) -> "Float[Array, '']":
    """The Euclidean norm of all elements of a pytree, in float32 or wider."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(_wide(g))) for g in jax.tree.leaves(grads)))


def clip_by_global_norm(grads: Tree, limit: float) -> tuple[Tree, "Float[Array, '']"]:
    """Shrinks gradients to a global norm of at most `limit`.

    Args:
      grads: Pytree of arrays, in any sharding.
      limit: Largest norm.

    Returns:
      The gradients, in their dtypes, and the norm before clipping.

    Raises:
      UserError: limit is not positive.
    """
    if not limit > 0:
        raise UserError(f"clip_by_global_norm: limit must be positive; got {limit}. Leave clipping out for no limit.")
    norm = global_norm(grads)
    shrink = jnp.minimum(1.0, limit / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))
    return jax.tree.map(lambda g: (_wide(g) * shrink).astype(g.dtype), grads), norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the factor on a float16 loss moves (Micikevicius et al. 2018, section 3.2).

    Attributes:
      initial: First factor.
      growth: What it is multiplied by after `interval` steps without an overflow.
      backoff: What it is multiplied by when a gradient overflows; that step is skipped.
      interval: Steps without an overflow before it grows.
      smallest: It never falls below this.
    """

    initial: float = 2.0**15
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    smallest: float = 1.0

    def __post_init__(self) -> None:
        if not (self.growth > 1 and 0 < self.backoff < 1 and self.interval >= 1 and 0 < self.smallest <= self.initial):
            raise UserError(
                "LossScaling: needs growth > 1, 0 < backoff < 1, interval >= 1 and 0 < smallest <= initial; "
                f"got {self}."
            )

    def init(self) -> "LossScale":
        """The state of a fresh run."""
        return LossScale(
            scale=jnp.asarray(self.initial, jnp.float32),
            clean_steps=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """State of `LossScaling`.

    Attributes:
      scale: float32[], what the loss is multiplied by before its gradients are taken.
      clean_steps: int32[], steps since the last overflow or growth.
      skipped: int32[], steps that were skipped so far.
    """

    scale: jax.Array
    clean_steps: jax.Array
    skipped: jax.Array

    def unscale(self, grads: Tree) -> tuple[Tree, jax.Array]:
        """Gradients of the loss itself, and bool[]: whether all of them, on all devices, are finite."""
        finite = all_finite(grads)
        return jax.tree.map(lambda g: (_wide(g) / self.scale).astype(g.dtype), grads), finite

    def update(self, finite: jax.Array, config: LossScaling) -> "LossScale":
        """The state after a step."""
        clean = jnp.where(finite, self.clean_steps + 1, 0)
        grows = clean >= config.interval
        scale = jnp.where(grows, self.scale * config.growth, self.scale)
        # Growth must not reach what a float32 cannot hold.
        scale = jnp.where(jnp.isfinite(scale), scale, self.scale)
        return LossScale(
            scale=jnp.where(finite, scale, jnp.maximum(self.scale * config.backoff, config.smallest)),
            clean_steps=jnp.where(grows, 0, clean),
            skipped=self.skipped + jnp.where(finite, 0, 1),
        )


def all_finite(tree: object) -> "Bool[Array, '']":
    """bool[]: no element of a pytree is inf or NaN."""
    checks = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]
    return jnp.stack(checks).all() if checks else jnp.ones((), bool)


def take_step_if(finite: jax.Array, new: Tree, old: Tree) -> Tree:
    """`new` where a step counts, `old` where it is skipped; pytrees of equal structure."""
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
