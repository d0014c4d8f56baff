"""Auxiliary routers, which say of a token alone what a choice among all tokens would say (MoMa, arXiv 2407.21770).

Experts, or a layer, take their best tokens of a batch; a model that generates does not have the later ones. A second
router learns from each token by itself whether it is taken:

    taken_j  where  sigmoid(silu(x W_1) W_2)_j > 1/2
"""

import dataclasses

import jax

from scalejax import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuxiliaryRouter:
    """It is trained by the binary cross-entropy of what is taken; nothing of it reaches the rest of the model.

    How many experts take a token is open with it, so places are those of n experts a token, which a CPU computes all.

    Attributes:
      hidden: Columns of W_1; None = half the width of the model.
    """

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None and (not isinstance(self.hidden, int) or self.hidden < 1):
            raise ValueError(f"AuxiliaryRouter: hidden must be at least 1, or None; got {self.hidden!r}.")

    def columns(self, dim: int) -> int:
        """Columns of W_1 in a model of this width."""
        return self.hidden or max(1, dim // 2)


def guess(x: jax.Array, first: jax.Array, second: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """What the sigmoid is taken of: above 0 = taken.

    Args:
      x: float[..., E]; it gets no gradient.
      first: W_1, [E, hidden].
      second: W_2, [hidden, n].
      dtype: Of the first product; the second is computed in float32 or wider.

    Returns:
      wide[..., n].
    """
    wide = nn.wide(dtype)
    hidden = jax.nn.silu(nn.project(jax.lax.stop_gradient(x), first.astype(dtype)))
    return nn.project(hidden.astype(wide), second.astype(wide))


def compare(guessed: jax.Array, real: jax.Array, asked: jax.Array) -> dict[str, jax.Array]:
    """How guesses differ from what was taken, by row.

    Args:
      guessed: wide[B, S, n], see `guess`.
      real: bool[B, S], False = padding.
      asked: wide[B, S, n], 1 where a token was taken, otherwise 0.

    Returns:
      [B] each: "auxiliary", the binary cross-entropies, mean over n; "guessed", how many were said to be taken, and
      "hits", how many of these were.
    """
    asked, tokens = jax.lax.stop_gradient(asked), real.astype(asked.dtype)[..., None]
    said = (guessed > 0).astype(asked.dtype)
    return {
        "auxiliary": (tokens * (jax.nn.softplus(guessed) - asked * guessed)).sum((1, 2)) / asked.shape[2],
        "guessed": (tokens * said).sum((1, 2)),
        "hits": (tokens * said * asked).sum((1, 2)),
    }
