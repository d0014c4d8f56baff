"""Cross-entropy of a linear head without the logits of all positions.

With a vocabulary V and N tokens, logits and their gradient take 8 N V bytes in float32: at V = 128,256 and 8,192 tokens
8 GB. Here the logits of a slice of positions exist at one time. Gradients are made in the forward pass, where the
logits are at hand, so that nothing is computed twice: the head costs three matrix products, as it would without slices.

    loss_i = logsumexp_v(x_i . w_v) - x_i . w_target(i);    d loss_i / d logit_iv = softmax_iv - [v = target(i)]
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalejax.nn.linear import wide
from scalejax.parallel.mesh import BATCH_AXES


def linear_cross_entropy(
    x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array, *, positions: int = 512
) -> jax.Array:
    """sum_bs weights_bs * cross-entropy(x_bs @ weight, targets_bs).

    Args:
      x: float[B, S, E]; its dtype is that of the products' operands, results are added up in float32 or wider.
      weight: float[E, V].
      targets: int32[B, S] in [0, V).
      weights: float[B, S]; no gradient flows to them.
      positions: Positions of each row whose logits exist at one time.

    Returns:
      float32[] (float64 where x is), differentiable once in x and weight.
    """
    if x.ndim != 3 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        raise ValueError(f"linear_cross_entropy: x must be [B, S, E] and weight [E, V]; got {x.shape}, {weight.shape}.")
    if targets.shape != x.shape[:2] or weights.shape != x.shape[:2]:
        raise ValueError(
            f"linear_cross_entropy: targets and weights must be [B, S] = {x.shape[:2]}; got {targets.shape} and "
            f"{weights.shape}."
        )
    if positions < 1:
        raise ValueError(f"linear_cross_entropy: positions must be at least 1; got {positions}.")
    positions = min(positions, x.shape[1])
    over = _automatic_batch_axes()
    if not over:
        return _sum(positions, x, weight, targets, weights)

    # Each device adds up the gradient of `weight` over its own slices. Left to the compiler it is summed over devices
    # after every slice.
    def local(*args: jax.Array) -> jax.Array:
        return jax.lax.psum(_sum(positions, *args), over)

    rows = P(over)
    return jax.shard_map(local, in_specs=(rows, P(), rows, rows), out_specs=P(), axis_names=set(over), check_vma=False)(
        x, weight, targets, weights
    )


def _automatic_batch_axes() -> tuple[str, ...]:
    """The axes of the mesh in force that shard rows and are left to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return ()
    automatic = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    return tuple(axis for axis in BATCH_AXES if axis in automatic and mesh.shape[axis] > 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(positions: int, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    def part(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, targets, weights = part
        logits, lse, target = _logits(x, weight, targets)
        del logits
        return total + ((lse - target) * weights).sum(), None

    dtype = wide(x.dtype)
    return jax.lax.scan(part, jnp.zeros((), dtype), _cut(positions, x, targets, weights.astype(dtype)))[0]


def _forward(positions: int, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array):
    dtype = wide(x.dtype)

    def part(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]):
        total, d_weight = carry
        x, targets, weights = part
        logits, lse, target = _logits(x, weight, targets)
        loss = ((lse - target) * weights).sum()
        hit = targets[..., None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None, :]
        d_logits = (jnp.exp(logits - lse[..., None]) - hit.astype(dtype)) * weights[..., None]  # B s V
        d_logits = d_logits.astype(x.dtype)
        d_x = jnp.einsum("bsv,ev->bse", d_logits, weight.astype(x.dtype), preferred_element_type=dtype)
        d_weight += jnp.einsum("bse,bsv->ev", x, d_logits, preferred_element_type=dtype)
        return (total + loss, d_weight), d_x.astype(x.dtype)

    zero = (jnp.zeros((), dtype), jnp.zeros(weight.shape, dtype))
    (total, d_weight), d_x = jax.lax.scan(part, zero, _cut(positions, x, targets, weights.astype(dtype)))
    d_x = jnp.moveaxis(d_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]  # n B s E -> B S E
    return total, (d_x, d_weight.astype(weight.dtype), targets, weights)


def _backward(positions: int, saved: tuple[jax.Array, ...], g: jax.Array):
    del positions
    d_x, d_weight, targets, weights = saved
    del targets
    return d_x * g.astype(d_x.dtype), d_weight * g.astype(d_weight.dtype), None, jnp.zeros_like(weights)


_sum.defvjp(_forward, _backward)


def _logits(x: jax.Array, weight: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits wide[B, s, V], their log-sum-exp and the logit of the target, wide[B, s]."""
    logits = jnp.einsum("bse,ev->bsv", x, weight.astype(x.dtype), preferred_element_type=wide(x.dtype))
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return logits, jax.nn.logsumexp(logits, axis=-1), target


def _cut(positions: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, S, ...] -> [parts, B, positions, ...], filled up with zeros (of weight 0)."""

    def cut(x: jax.Array) -> jax.Array:
        parts = -(-x.shape[1] // positions)
        x = jnp.pad(x, ((0, 0), (0, parts * positions - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], parts, positions, *x.shape[2:]), 1, 0)

    return tuple(map(cut, arrays))
