"""Scores of a language model on a text, and the divergence of another model's predictions from its own."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import nn
from scalejax.errors import UserError
from scalejax.inference import loop
from scalejax.inference.generate import Engine
from scalejax.nn.pages import KvFormat

_BATCH_TOKENS = 2048
_CACHED_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Of predictions of every token but the first of a row.

    Attributes:
      tokens: How many were predicted.
      loss: Mean of -log p(token), nats.
    """

    tokens: int
    loss: float

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelComparison:
    """Two models on the same tokens.

    Attributes:
      before: Score of the first.
      after: Score of the second.
      divergence: Mean of KL(first || second) of the predicted distributions, nats.
      agreement: Share of tokens for which both find the same one most probable.
    """

    before: Score
    after: Score
    divergence: float
    agreement: float


def score(engine: Engine, rows: np.ndarray) -> Score:
    """Scores a model on int32[rows, positions]; each row is a document.

    Raises:
      UserError: its logits are not finite.
    """
    sums = _sums((engine,), rows)
    return Score(tokens=_predicted(rows), loss=float(sums["loss"][0]) / _predicted(rows))


def compare(before: Engine, after: Engine, rows: np.ndarray) -> ModelComparison:
    """Scores two models of one vocabulary.

    Raises:
      UserError: their vocabularies differ, or logits are not finite.
    """
    sizes = before.config.vocabulary, after.config.vocabulary
    if sizes[0] != sizes[1]:
        raise UserError(
            f"--against: the models have vocabularies of {sizes[0]} and {sizes[1]} tokens, so their predictions cannot "
            "be compared. Give two versions of one model."
        )
    sums, count = _sums((before, after), rows), _predicted(rows)
    first, second = (Score(tokens=count, loss=float(loss) / count) for loss in sums["loss"])
    return ModelComparison(
        before=first,
        after=second,
        divergence=float(sums["divergence"]) / count,
        agreement=float(sums["agree"]) / count,
    )


def score_cached(engine: Engine, rows: np.ndarray, kv_dtype: KvFormat, *, page: int = 64) -> Score:
    """Scores a model as it generates: tokens one by one, through a cache of pages of a format.

    Args:
      engine: The model, on one device.
      rows: int32[rows, positions]; each row is a document.
      kv_dtype: How keys and values are stored, see `nn.pages`.
      page: Places of a page.

    Raises:
      UserError: its logits are not finite.
    """
    batch, each = min(len(rows), _CACHED_ROWS), -(-rows.shape[1] // page)
    table = jnp.arange(batch * each, dtype=jnp.int32).reshape(batch, each)
    slots, last = np.arange(batch, dtype=np.int32), jnp.zeros(batch, jnp.int32)
    total = np.zeros(())
    for start in range(0, len(rows), batch):
        tokens, weights = _filled_up(rows[start : start + batch], batch)
        made = loop.make_loop(engine, slots=batch, kv_tokens=batch * each * page, page=page, kv_dtype=kv_dtype)
        state, losses = made.steps.state, []
        for at in range(rows.shape[1] - 1):
            reading = nn.Reading(jnp.full((batch, 1), at, jnp.int32), table, last)
            state = engine.programs.read(engine.params, tokens[:, at : at + 1], reading, slots, state)
            losses.append(_next_loss(state.logits, tokens[:, at + 1], weights))
        total += np.sum(jax.device_get(losses), dtype=np.float64)
    return Score(tokens=_predicted(rows), loss=float(_checked(total)) / _predicted(rows))


def _predicted(rows: np.ndarray) -> int:
    return rows.shape[0] * (rows.shape[1] - 1)


def _sums(engines: tuple[Engine, ...], rows: np.ndarray) -> dict[str, np.ndarray]:
    """Sums over all predictions, float64."""
    if rows.ndim != 2 or rows.shape[1] < 2:
        raise UserError(f"rows must be [rows, positions] with at least 2 positions; got {rows.shape}.")
    step = max(1, _BATCH_TOKENS // rows.shape[1])
    total: dict[str, np.ndarray] = {}
    for start in range(0, len(rows), step):
        tokens, weights = _filled_up(rows[start : start + step], min(step, len(rows)))
        logits = tuple(engine.logits(tokens) for engine in engines)
        for name, value in _measures(logits, tokens, weights).items():
            total[name] = total.get(name, np.float64(0)) + np.asarray(value, np.float64)
    _checked(total["loss"])
    return total


def _filled_up(part: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """With rows of weight 0, so that no second program is compiled for the last part; and the weights."""
    tokens = np.concatenate([part, np.zeros((count - len(part), part.shape[1]), np.int32)])
    return tokens, (np.arange(count) < len(part)).astype(np.float32)


def _checked(loss: np.ndarray) -> np.ndarray:
    if not np.isfinite(loss).all():
        raise UserError(
            "--text: the model's logits are not finite. In float16 activations of many models overflow: choose --dtype "
            "bfloat16 or float32."
        )
    return loss


@jax.jit
def _next_loss(logits: jax.Array, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """Logits [B, V], the tokens that came, weights of rows -> sum."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.take_along_axis(logs, tokens[:, None], axis=-1)[:, 0] * weights)


@jax.jit
def _measures(logits: tuple[jax.Array, ...], tokens: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
    """Logits [B, S, V] each, tokens int32[B, S], weights of rows -> sums."""
    logs = [jax.nn.log_softmax(each[:, :-1], axis=-1) for each in logits]
    wanted = tokens[:, 1:, None]
    losses = [-jnp.take_along_axis(each, wanted, axis=-1)[..., 0] for each in logs]
    made = {"loss": jnp.stack([jnp.sum(loss * weights[:, None]) for loss in losses])}
    if len(logs) == 2:
        apart = jnp.sum(jnp.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)
        same = jnp.argmax(logs[0], axis=-1) == jnp.argmax(logs[1], axis=-1)
        made["divergence"] = jnp.sum(apart * weights[:, None])
        made["agree"] = jnp.sum(same * weights[:, None])
    return made
