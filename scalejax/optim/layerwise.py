"""LAMB and LANS: Adam whose step on every tensor is as long as the norm of that tensor says.

With g the gradient of a tensor x, t the steps so far, this one included, and d = sqrt(v / (1 - b2^t)) + eps:

    m <- b1 m + (1 - b1) g                          v <- b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / d + weight_decay x       c = g / d + weight_decay x
    LAMB   x <- x - learning_rate phi(r) r
    LANS   x <- x - learning_rate (b1 phi(r) r + (1 - b1) phi(c) c)

phi(u) = |x| / |u|, or 1 where either norm is 0. Both parts of LANS are those of x before the step.

A tensor is that of one layer. Scanned layers lie in one array, and whoever calls `update` says which arrays those are,
by an extra argument of optax: `update(grads, state, params, stacked={path: leading axes})`, as a run does for its model
(`train.state.ModelShape.stacked`); without it an array is one tensor. Norms are of whole tensors: call `update` under
jit on arrays of any sharding, not on the shards inside a shard_map.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from scalejax.errors import UserError, check_at_least, check_one_of
from scalejax.optim.masks import NORMS_AND_BIASES, check_paths, matrices, path_of
from scalejax.optim.schedules import Constant, Schedule, check_schedule

Normalization = Literal["none", "block"]
Bounded = Literal["ratio", "norm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrustBounds:
    """Bounds of phi.

    Attributes:
      lower: Least value, 0 or more.
      upper: Greatest value.
      of: What lies between them: the "ratio" phi, also where it is 1 because a norm is 0, or the "norm" |x| that is
        divided, which is how LAMB was published.
    """

    lower: float = 0.0
    upper: float = 10.0
    of: Bounded = "ratio"

    def __post_init__(self) -> None:
        check_at_least("TrustBounds: lower", self.lower, 0.0)
        if not (self.upper >= self.lower and self.upper > 0):
            raise UserError(
                f"TrustBounds: upper must be above 0 and at least lower ({self.lower:g}); got {self.upper:g}."
            )
        check_one_of("TrustBounds: of", self.of, get_args(Bounded))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lamb:
    """LAMB (You et al., ICLR 2020, arXiv 1904.00962), as `optax.lamb`.

    Attributes:
      learning_rate: By step; a tensor changes by this share of its norm.
      weight_decay: Of what has two dimensions or more in a layer and is none of `undecayed`.
      undecayed: Regular expression that names paths whole: norms and biases.
      trust: Bounds of phi; None = none.
    """

    learning_rate: Schedule = Constant(value=1e-3)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 1e-2
    undecayed: str = NORMS_AND_BIASES
    trust: TrustBounds | None = None

    def __post_init__(self) -> None:
        _check(self)

    def build(self, steps: int) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(b1=self.b1, b2=self.b2, eps=self.eps),
            _trusted(self),
            optax.scale_by_learning_rate(self.learning_rate.build(steps)),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lans:
    """LANS (Zheng et al., 2020, arXiv 2006.13484): LAMB with Nesterov's momentum and, if wanted, normalised gradients.

    CLAN (Zhong et al., 2021, arXiv 2105.07829) is LANS on gradients that were compressed on their way.

    Attributes:
      learning_rate: By step; a tensor changes by at most this share of its norm.
      weight_decay: As of `Lamb`.
      undecayed: As of `Lamb`.
      normalization: Of the gradient g of a "block", a tensor, by |g| + eps before anything else, the second moment
        included, as LANS was published. "none", the default, is what the published runs of BERT with compressed
        gradients did (`normalize_grad=False` in their scripts): phi bounds the step of every tensor anyway.
      trust: As of `Lamb`.
    """

    learning_rate: Schedule = Constant(value=1e-3)
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 1e-2
    undecayed: str = NORMS_AND_BIASES
    normalization: Normalization = "none"
    trust: TrustBounds | None = None

    def __post_init__(self) -> None:
        _check(self)
        check_one_of("Lans: normalization", self.normalization, get_args(Normalization))

    def build(self, steps: int) -> optax.GradientTransformation:
        return optax.chain(_direction(self), optax.scale_by_learning_rate(self.learning_rate.build(steps)))


def _check(config: Lamb | Lans) -> None:
    name = type(config).__name__
    check_schedule(f"{name}: learning_rate", config.learning_rate)
    for field in ("b1", "b2"):
        if not 0 <= getattr(config, field) < 1:
            raise UserError(f"{name}: {field} must lie in [0, 1); got {getattr(config, field)}.")
    if not config.eps > 0:
        raise UserError(f"{name}: eps must be above 0, or a gradient of 0 is divided by 0; got {config.eps}.")
    check_at_least(f"{name}: weight_decay", config.weight_decay, 0.0)
    check_paths(f"{name}: undecayed", config.undecayed)


def _trusted(config: Lamb) -> optax.GradientTransformationExtraArgs:
    """What LAMB does to the step of Adam."""

    def update(
        updates: Any, state: Any, params: Any = None, *, stacked: Mapping[str, int] | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        del extra
        leading, decayed = _layout(config, params, stacked)

        def along(x: jax.Array, u: jax.Array, leading: int, decayed: bool) -> jax.Array:
            r = u + config.weight_decay * x if decayed else u
            return r * _phi(x, r, leading, config.trust)

        return jax.tree.map(along, params, updates, leading, decayed), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def _direction(config: Lans) -> optax.GradientTransformationExtraArgs:
    """b1 phi(r) r + (1 - b1) phi(c) c."""
    b1, b2, eps = config.b1, config.b2, config.eps

    def init(params: Any) -> optax.ScaleByAdamState:
        zeros = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), *zeros)

    def update(
        grads: Any,
        state: optax.ScaleByAdamState,
        params: Any = None,
        *,
        stacked: Mapping[str, int] | None = None,
        **extra: Any,
    ) -> tuple[Any, optax.ScaleByAdamState]:
        del extra
        leading, decayed = _layout(config, params, stacked)
        if config.normalization == "block":
            # 0 stays 0, since eps is not.
            grads = jax.tree.map(lambda g, leading: g / (_norm(g, leading) + eps).astype(g.dtype), grads, leading)
        count = jnp.asarray(optax.safe_increment(state.count))
        mu = jax.tree.map(lambda g, m: b1 * m + (1 - b1) * g, grads, state.mu)
        nu = jax.tree.map(lambda g, v: b2 * v + (1 - b2) * g * g, grads, state.nu)
        seen1, seen2 = _seen(b1, count), _seen(b2, count)

        def along(x: jax.Array, g: jax.Array, m: jax.Array, v: jax.Array, leading: int, decayed: bool) -> jax.Array:
            d = jnp.sqrt(v / seen2.astype(v.dtype)) + eps
            decay = config.weight_decay * x if decayed else 0.0
            r, c = m / seen1.astype(m.dtype) / d + decay, g / d + decay
            first, second = (_phi(x, u, leading, config.trust) for u in (r, c))
            return b1 * first * r + (1 - b1) * second * c

        steps = jax.tree.map(along, params, grads, mu, nu, leading, decayed)
        return steps, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)  # pyright: ignore[reportArgumentType]


def _layout(config: Lamb | Lans, params: Any, stacked: Mapping[str, int] | None) -> tuple[Any, Any]:
    """Leading axes of each parameter along which tensors lie beside each other, and whether it is decayed."""
    if params is None:
        raise UserError(
            f"{type(config).__name__}: update must get the parameters, whose norms it goes by: update(grads, state, "
            "params); got None."
        )
    known = stacked or {}
    leading = jax.tree_util.tree_map_with_path(lambda path, _: known.get(path_of(path), 0), params)
    return leading, matrices(params, config.undecayed, known)


def _phi(x: jax.Array, u: jax.Array, leading: int, trust: TrustBounds | None) -> jax.Array:
    """Of every tensor of x, [its leading axes, 1, ...], in the dtype of u."""
    length, step = _norm(x, leading), _norm(u, leading)
    if trust is not None and trust.of == "norm":
        length = jnp.clip(length, trust.lower, trust.upper)
    nothing = (length == 0) | (step == 0)
    ratio = jnp.where(nothing, 1.0, length / jnp.where(nothing, 1.0, step))
    if trust is not None and trust.of == "ratio":
        ratio = jnp.clip(ratio, trust.lower, trust.upper)
    return ratio.astype(u.dtype)


def _norm(x: jax.Array, leading: int) -> jax.Array:
    """|x| of every tensor of x, [its leading axes, 1, ...], in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum(jnp.square(wide), axis=tuple(range(leading, x.ndim)), keepdims=True))


def _seen(b: float, count: jax.Array) -> jax.Array:
    """1 - b^count: the share of the gradients among what a moment is the mean of, the rest being its zero at first."""
    widest = jax.dtypes.canonicalize_dtype(jnp.float64)
    # The difference itself has an error of 1e-5 at the first steps in float32.
    return -jnp.expm1(count.astype(widest) * math.log(b)) if b else jnp.ones((), widest)
