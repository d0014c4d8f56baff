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


Row = np.ndarray | jax.Array
"""A value for each row of a batch, [B]; NumPy's on the host."""

GREEDY = TokenSampling()
"""Always the most probable token."""


def check_samples(samples: int, sampling: TokenSampling) -> None:
    """Refuses several samples of a prompt that would all be the same."""
    if samples > 1 and sampling.temperature == 0:
        raise UserError(
            f"samples must be 1 where the temperature is 0: all {samples} would be the same. Set a temperature."
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowSampling:
    """How the tokens of each row of a batch are chosen.

    Attributes:
      temperature: float32[B].
      top_p: float32[B].
      top_k: int32[B], 0 = all.
      seed: uint32[B].
      digest: uint32[B], of the prompts.
      sample: int32[B], numbers of the samples.
    """

    temperature: Row
    top_p: Row
    top_k: Row
    seed: Row
    digest: Row
    sample: Row

    @classmethod
    def greedy(cls, rows: int) -> "RowSampling":
        """On the host, for `put` to change."""
        return cls(
            np.zeros(rows, np.float32), np.ones(rows, np.float32), np.zeros(rows, np.int32),
            np.zeros(rows, np.uint32), np.zeros(rows, np.uint32), np.zeros(rows, np.int32),
        )  # fmt: skip

    def put(self, row: int, sampling: TokenSampling, digest: int, sample: int) -> None:
        """Sets a row."""
        given = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed, digest, sample)
        for field, value in zip(dataclasses.fields(self), given, strict=True):
            getattr(self, field.name)[row] = value

    def keys(self) -> jax.Array:
        """One key a row."""

        def one(seed: jax.Array, digest: jax.Array, number: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), digest), number)

        return jax.vmap(one)(jnp.asarray(self.seed), jnp.asarray(self.digest), jnp.asarray(self.sample))


def digest(prompt: Sequence[int]) -> int:
    """A number of 32 bits for a prompt."""
    # Little-endian on every machine, so that a prompt draws the same tokens on all of them.
    return zlib.crc32(np.asarray(prompt, "<i4").tobytes())


def choose(logits: jax.Array, rows: RowSampling, keys: jax.Array, positions: jax.Array) -> jax.Array:
    """The next token of every row.

    Args:
      logits: float[B, V].
      rows: How.
      keys: Of `rows`, [B].
      positions: int32[B], how many tokens of each row were generated before.

    Returns:
      int32[B].
    """
    temperature = jnp.asarray(rows.temperature)[:, None]
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def drawn() -> jax.Array:
        # Less the largest, so that nothing overflows at any temperature.
        scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)
        top_p, top_k = jnp.asarray(rows.top_p), jnp.asarray(rows.top_k)
        cut = jnp.any((top_p < 1) | (top_k > 0))
        scaled = jax.lax.cond(cut, lambda: nucleus(scaled, top_p, top_k), lambda: scaled)

        def draw(key: jax.Array, position: jax.Array, row: jax.Array) -> jax.Array:
            return jax.random.categorical(jax.random.fold_in(key, position), row)

        token = jax.vmap(draw)(keys, positions, scaled).astype(jnp.int32)
        return jnp.where(temperature[:, 0] > 0, token, best)

    return jax.lax.cond(jnp.any(temperature > 0), drawn, lambda: best)


def nucleus(logits: jax.Array, top_p: jax.Array, top_k: jax.Array) -> jax.Array:
    """Logits [B, V] with -inf outside of the tokens that may be drawn.

    They are the top_k most probable, and of these the smallest set whose probabilities, among them, add up to top_p
    (Holtzman et al., 2020). Tokens enter by probability, those of equal probability by their number; the first always
    does.

    Args:
      logits: float[B, V].
      top_p: float32[B]; 1 = all.
      top_k: int32[B]; 0 = all.
    """
    order = jnp.argsort(-logits, axis=-1, stable=True)
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
    among = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probabilities = jax.nn.softmax(jnp.where(among, jnp.take_along_axis(logits, order, axis=-1), -jnp.inf))
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = among & ((before < top_p[:, None]) | (top_p[:, None] == 1))
    inside = inside.at[:, 0].set(True)
    rows = jnp.arange(logits.shape[0])[:, None]
    kept = jnp.zeros(logits.shape, bool).at[rows, order].set(inside)
    return jnp.where(kept, logits, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Likelihoods:
    """Log probabilities of tokens, before temperatures.

    Attributes:
      chosen: float32[...], of a token.
      ids: int32[..., TOP], the most probable.
      values: float32[..., TOP], theirs.
    """

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array

    @classmethod
    def of(cls, logits: jax.Array, tokens: jax.Array) -> "Likelihoods":
        """Of logits [..., V] and tokens [...]."""
        logs = jax.nn.log_softmax(logits, axis=-1)
        values, ids = jax.lax.top_k(logs, min(TOP, logs.shape[-1]))
        chosen = jnp.take_along_axis(logs, tokens[..., None], axis=-1)[..., 0]
        return cls(chosen.astype(jnp.float32), ids.astype(jnp.int32), values.astype(jnp.float32))


TOP = 20
"""Of so many tokens are log probabilities told, at most."""
