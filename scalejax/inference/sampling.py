"""The next token from logits: greedy, or drawn with a temperature from the smallest set of probability top_p.

A draw depends on the seed, the prompt, the number of the sample and the position in the text that is generated, and on
nothing else: not on the row of a batch, nor on the other rows.
"""

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenSampling:
    """How tokens are chosen.

    Attributes:
      temperature: Logits are divided by it; 0 = the most probable token, always.
      top_p: Tokens are drawn from the smallest set, most probable first, whose probabilities add up to at least this.
      top_k: Tokens are drawn from so many of the most probable; 0 = from all.
      seed: Seeds the draws, in [0, 2**32).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be 0 (greedy) or above; got {self.temperature}. 0.8 is usual.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1; got {self.top_p}. 0.95 is usual, 1 cuts nothing.")
        if self.temperature == 0 and self.top_p < 1:
            raise UserError(
                f"top_p {self.top_p} changes nothing where the temperature is 0: the most probable token is always in. "
                "Set a temperature (1 is as the model says), or leave top_p out."
            )
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0; got {self.top_k}. 40 is usual, 0 cuts nothing.")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be at least 0 and less than 2**32; got {self.seed}.")


GREEDY = TokenSampling()
"""Always the most probable token."""


def check_samples(samples: int, sampling: TokenSampling) -> None:
    """Refuses several samples of a prompt that would all be the same."""
    if samples > 1 and sampling.temperature == 0:
        raise UserError(
            f"samples must be 1 where the temperature is 0: all {samples} would be the same. Set a temperature."
        )


def keys(sampling: TokenSampling, prompts: jax.Array, samples: jax.Array) -> jax.Array:
    """One key a row, for prompts of these digests, uint32[B], and samples of these numbers, int32[B]."""

    def one(prompt: jax.Array, number: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed), prompt), number)

    return jax.vmap(one)(prompts, samples)


def digest(prompt: Sequence[int]) -> int:
    """A number of 32 bits for a prompt."""
    # Little-endian on every machine, so that a prompt draws the same tokens on all of them.
    return zlib.crc32(np.asarray(prompt, "<i4").tobytes())


def choose(logits: jax.Array, row_keys: jax.Array, position: jax.Array, sampling: TokenSampling) -> jax.Array:
    """The next token of every row.

    Args:
      logits: float[B, V].
      row_keys: Of `keys`, [B].
      position: int32[], how many tokens were generated before.
      sampling: How.

    Returns:
      int32[B].
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Less the largest, so that nothing overflows at any temperature.
    scaled = nucleus((logits - logits.max(-1, keepdims=True)) / sampling.temperature, sampling.top_p)

    def draw(key: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, position), row)

    return jax.vmap(draw)(row_keys, scaled).astype(jnp.int32)


def nucleus(logits: jax.Array, top_p: float) -> jax.Array:
    """Logits [B, V] with -inf outside of the smallest set whose probabilities add up to top_p (Holtzman et al., 2020).

    Tokens enter by probability, those of equal probability by their number; the first always does.
    """
    if top_p == 1:
        return logits
    order = jnp.argsort(-logits, axis=-1, stable=True)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1))
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = before < top_p
    inside = inside.at[:, 0].set(True)
    rows = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(inside)
    return jnp.where(kept, logits, -jnp.inf)
