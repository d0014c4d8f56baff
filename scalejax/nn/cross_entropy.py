"""Cross-entropy of a linear head without the logits of all positions.

With a vocabulary V and N tokens, logits and their gradient take 8 N V bytes in float32: at V = 128,256 and 8,192 tokens
8 GB. Here the logits of a slice of positions exist at one time. Gradients are made in the forward pass, where the
logits are at hand, so that nothing is computed twice: the head costs three matrix products, as it would without slices.

    loss_i = logsumexp_v(x_i . w_v) - x_i . w_target(i);    d loss_i / d logit_iv = softmax_iv - [v = target(i)]
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from scalejax import compat
from scalejax.nn.linear import wide
from scalejax.numerics import quantize
from scalejax.numerics.quantized import products
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.numerics.quantized.weights import FormattedWeight
from scalejax.parallel.mesh import BATCH_AXES

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


def linear_cross_entropy(
    x: "Float[Array, 'batch positions embed']",
    weight: jax.Array,
    targets: "Int[Array, 'batch positions']",
    weights: "Float[Array, 'batch positions']",
    *,
    positions: int = 512,
) -> "Float[Array, '']":
    """sum_bs weights_bs * cross-entropy(x_bs @ weight, targets_bs).

    Args:
      x: float[B, S, E]; its dtype is that of the products' operands, results are added up in float32 or wider.
      weight: float[E, V]; one with a number format is multiplied in it, in slices as small as stated here.
      targets: int32[B, S] in [0, V).
      weights: float[B, S]; no gradient flows to them.
      positions: Positions of each row whose logits exist at one time, of those that a device has.

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
    over, spec = _automatic_axes(x.shape[1])
    head = _Head()
    if isinstance(weight, FormattedWeight):
        head, weight = _Head(rule=weight.rule, path=weight.path, quantizer=weight.quantizer), weight.array
    return _sum(_Cut(positions=positions, over=over, spec=spec, head=head), x, weight, targets, weights)


_Matrix = jax.Array | products.Operand
_Parts = tuple[jax.Array, jax.Array | None, jax.Array | None]
"""Sum over tokens, gradient of x, gradient of the matrix."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Head:
    """The three products of the head, in the dtype of x, or in the number formats of a rule.

    Attributes:
      rule: The formats; None = none.
      path: Of the head, for messages.
      quantizer: What makes the codes of blocks.
    """

    rule: QuantizationRule | None = None
    path: str = "head"
    quantizer: products.BlockQuantizer = quantize.quantize

    def forward(self, weight: jax.Array, dtype: DTypeLike) -> _Matrix:
        """The matrix as `logits` takes it, the same for all slices."""
        return weight if self.rule is None else self._weight(weight, dtype, axis=0)

    def backward(self, weight: jax.Array, dtype: DTypeLike, forward: _Matrix) -> _Matrix:
        """The matrix as `d_x` takes it; `forward` is what `forward` gave."""
        straight = self.rule is None or self.rule.bwd_qtype is None
        return forward if straight else self._weight(weight, dtype, axis=1)

    def logits(self, x: jax.Array, weight: _Matrix) -> jax.Array:
        """[B, s, E], [E, V] -> wide[B, s, V]."""
        if not isinstance(weight, products.Operand):
            return jnp.einsum("bse,ev->bsv", x, weight.astype(x.dtype), preferred_element_type=wide(x.dtype))
        assert self.rule is not None
        activations = self._operand(x, self.rule.act_qtype, 2)
        return products.multiply(activations, weight, (((2,), (0,)), ((), ())), dtype=wide(x.dtype))

    def d_x(self, d_logits: jax.Array, weight: _Matrix) -> jax.Array:
        """[B, s, V], [E, V] -> wide[B, s, E]."""
        dtype = wide(d_logits.dtype)
        if not isinstance(weight, products.Operand):
            weight = weight.astype(d_logits.dtype)
            return jnp.einsum("bsv,ev->bse", d_logits, weight, preferred_element_type=dtype)
        assert self.rule is not None
        gradients = self._operand(d_logits, self.rule.bwd_qtype, 2)
        return products.multiply(gradients, weight, (((2,), (1,)), ((), ())), dtype=dtype)

    def d_weight(self, x: jax.Array, d_logits: jax.Array) -> jax.Array:
        """[B, s, E], [B, s, V] -> wide[E, V]."""
        dtype = wide(x.dtype)
        if self.rule is None:
            return jnp.einsum("bse,bsv->ev", x, d_logits, preferred_element_type=dtype)
        straight = self.rule.bwd_qtype is None
        activations = self._operand(x, self.rule.act_qtype, *((2,) if straight else (0, 1)))
        gradients = self._operand(d_logits, self.rule.bwd_qtype, 0, 1)
        return products.multiply(activations, gradients, (((0, 1), (0, 1)), ((), ())), dtype=dtype)

    def _weight(self, weight: jax.Array, dtype: DTypeLike, axis: int) -> products.Operand:
        assert self.rule is not None
        return self._operand(weight.astype(dtype), self.rule.weight_qtype, axis).decoded()

    def _operand(self, x: jax.Array, format: str | None, *axes: int) -> products.Operand:
        assert self.rule is not None
        return products.operand(x, format, self.rule, axes=axes, where=self.path, quantizer=self.quantizer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """How tokens are cut.

    Attributes:
      positions: Of a slice, at most.
      over: Axes of the mesh over which devices take parts of the tokens by themselves.
      spec: Rows and positions over these axes.
      head: The products.
    """

    positions: int
    over: tuple[str, ...]
    spec: P
    head: _Head

    def run(self, function: Callable[..., _Parts], *args: jax.Array) -> _Parts:
        """function(x, weight, targets, weights) -> (sum over tokens, gradient of x, of weight), of all devices.

        Each device slices the positions that it has, and adds up the gradient of `weight` over its own slices. Left to
        the compiler that is summed over devices after every slice, and positions that lie on several devices would be
        put together for each.
        """
        if not self.over:
            return function(*args)

        def local(*args: jax.Array) -> _Parts:
            total, d_x, d_weight = function(*args)
            total, d_weight = jax.lax.psum((total, d_weight), self.over)
            return total, d_x, d_weight

        return jax.shard_map(
            local,
            in_specs=(self.spec, P(), self.spec, self.spec),
            out_specs=(P(), self.spec, P()),
            axis_names=set(self.over),
            check_vma=False,
        )(*args)


def _automatic_axes(positions: int) -> tuple[tuple[str, ...], P]:
    """The axes of the mesh in force that cut rows and positions and are left to the compiler: all of them, by use."""
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {
        a
        for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Auto and mesh.shape[a] > 1
    }
    rows = tuple(axis for axis in BATCH_AXES if axis in automatic)
    along = tuple(axis for axis in ("context",) if axis in automatic and positions % mesh.shape[axis] == 0)
    return rows + along, P(rows, along)


# The derivative is that of the sum over devices, with no shard_map in it: jax 0.10 to 0.12 cannot differentiate one
# that stands in another, as this one does where a surrounding shard_map has made rows manual.
@compat.custom_vjp(0)
def _sum(cut: _Cut, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    return cut.run(functools.partial(_value, cut), x, weight, targets, weights)[0]


def _forward(cut: _Cut, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array):
    total, d_x, d_weight = cut.run(functools.partial(_gradients, cut), x, weight, targets, weights)
    return total, (d_x, d_weight, weights)


def _backward(cut: _Cut, saved: tuple[jax.Array, ...], g: jax.Array):
    del cut
    d_x, d_weight, weights = saved
    return d_x * g.astype(d_x.dtype), d_weight * g.astype(d_weight.dtype), None, jnp.zeros_like(weights)


_sum.defvjp(_forward, _backward)


def _value(
    cut: _Cut, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, None, None]:
    forward = cut.head.forward(weight, x.dtype)

    def part(total: jax.Array, part: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x, targets, weights = part
        logits, lse, target = _logits(cut.head, x, forward, targets)
        del logits
        return total + ((lse - target) * weights).sum(), None

    dtype = wide(x.dtype)
    total, _ = jax.lax.scan(part, jnp.zeros((), dtype), _slices(cut.positions, x, targets, weights.astype(dtype)))
    return total, None, None


def _gradients(
    cut: _Cut, x: jax.Array, weight: jax.Array, targets: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    dtype = wide(x.dtype)
    forward = cut.head.forward(weight, x.dtype)
    backward = cut.head.backward(weight, x.dtype, forward)

    def part(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, ...]):
        total, d_weight = carry
        x, targets, weights = part
        logits, lse, target = _logits(cut.head, x, forward, targets)
        loss = ((lse - target) * weights).sum()
        hit = targets[..., None] == jnp.arange(logits.shape[-1], dtype=targets.dtype)[None, None, :]
        d_logits = (jnp.exp(logits - lse[..., None]) - hit.astype(dtype)) * weights[..., None]  # B s V
        d_logits = d_logits.astype(x.dtype)
        d_x = cut.head.d_x(d_logits, backward)
        d_weight += cut.head.d_weight(x, d_logits)
        return (total + loss, d_weight), d_x.astype(x.dtype)

    zero = (jnp.zeros((), dtype), jnp.zeros(weight.shape, dtype))
    (total, d_weight), d_x = jax.lax.scan(part, zero, _slices(cut.positions, x, targets, weights.astype(dtype)))
    d_x = jnp.moveaxis(d_x, 0, 1).reshape(x.shape[0], -1, x.shape[2])[:, : x.shape[1]]  # n B s E -> B S E
    return total, d_x, d_weight.astype(weight.dtype)


def _logits(head: _Head, x: jax.Array, weight: _Matrix, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits wide[B, s, V], their log-sum-exp and the logit of the target, wide[B, s]."""
    logits = head.logits(x, weight)
    target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return logits, jax.nn.logsumexp(logits, axis=-1), target


def _slices(positions: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[B, S, ...] -> [parts, B, positions or S, ...], filled up with zeros (of weight 0)."""
    positions = min(positions, arrays[0].shape[1])

    def cut(x: jax.Array) -> jax.Array:
        parts = -(-x.shape[1] // positions)
        x = jnp.pad(x, ((0, 0), (0, parts * positions - x.shape[1]), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(x.shape[0], parts, positions, *x.shape[2:]), 1, 0)

    return tuple(map(cut, arrays))
