"""Which experts see which tokens, and the way of the tokens to their experts and back.

Token choice: every token takes the k experts of its largest scores (Shazeer et al., 2017; Mixtral, arXiv 2401.04088).
Expert choice: every expert takes the k tokens of its largest scores (Zhou et al., 2022; MoMa, arXiv 2407.21770), so
that all experts do equal work and a token may be seen by none.

Either way the result is a `Routes`: the places of all experts, one after another, and an index in each direction. With
both, tokens go to their places and results come back by gathers alone, forward and backward: a row is never added to
another by a scatter, and nothing has the size tokens x experts x places.

Axes: T tokens, E width, n experts, P places, q places of a token at most.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import compat
from scalejax.nn.linear import wide

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int

Scores = Literal["softmax", "sigmoid"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routes:
    """Tokens and the places of experts, by index in both directions.

    Attributes:
      tokens: int32[P], the token of each place; T where the place is empty.
      choices: int32[P], which of the choices of its token a place is; of no meaning where it is empty.
      places: int32[T, q], the places of a token; P where there are fewer.
      gates: wide[T, q], the weight of each result; 0 where there is no place.
    """

    tokens: "Int[Array, 'places']"
    choices: "Int[Array, 'places']"
    places: "Int[Array, 'tokens choices']"
    gates: "Float[Array, 'tokens choices']"

    @property
    def used(self) -> "Bool[Array, 'tokens choices']":
        """Whether a choice has a place."""
        return self.places < self.tokens.shape[0]


@dataclasses.dataclass(frozen=True)
class _Index:
    """The integers of a `Routes`, as the gathers with a derivative take them."""

    tokens: jax.Array
    choices: jax.Array
    places: jax.Array


jax.tree_util.register_dataclass(_Index)


def dispatch(x: "Float[Array, 'tokens width']", routes: Routes) -> "Float[Array, 'places width']":
    """The tokens at their places, [T, E] -> [P, E]; zeros where a place is empty."""
    return _at_places(x, _Index(routes.tokens, routes.choices, routes.places))


def combine(results: "Float[Array, 'places width']", routes: Routes) -> "Float[Array, 'tokens width']":
    """y_t = sum_j gates_tj results[places_tj], summed in float32 or wider and in the order of the choices.

    Args:
      results: float[P, E], what experts made of the tokens at their places.
      routes: Of T tokens.

    Returns:
      [T, E] in the dtype of `results`; zeros for a token without a place.
    """
    return _weighted(results, routes.gates, _Index(routes.tokens, routes.choices, routes.places))


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], zeros beyond the end."""
    if not x.shape[0]:  # of which nothing can be gathered
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    return x.at[index].get(mode="fill", fill_value=0)


def _sum_over_choices(rows: jax.Array, index: _Index, gates: jax.Array | None = None) -> jax.Array:
    """sum_j gates_tj rows[places_tj], one choice after another, so that T x q rows never exist."""
    dtype = wide(rows.dtype)
    total = jnp.zeros((index.places.shape[0], rows.shape[1]), dtype)
    for choice in range(index.places.shape[1]):
        term = _rows(rows, index.places[:, choice]).astype(dtype)
        total += term if gates is None else gates[:, choice, None] * term
    return total


@compat.custom_vjp()
def _at_places(x: jax.Array, index: _Index) -> jax.Array:
    return _rows(x, index.tokens)


def _at_places_forward(x: jax.Array, index: _Index) -> tuple[jax.Array, _Index]:
    return _at_places(x, index), index


def _at_places_backward(index: _Index, g: jax.Array) -> tuple[jax.Array, _Index]:
    return _sum_over_choices(g, index).astype(g.dtype), _no_gradient(index)


_at_places.defvjp(_at_places_forward, _at_places_backward)


@compat.custom_vjp()
def _weighted(results: jax.Array, gates: jax.Array, index: _Index) -> jax.Array:
    return _sum_over_choices(results, index, gates).astype(results.dtype)


_Saved = tuple[jax.Array, jax.Array, _Index]


def _weighted_forward(results: jax.Array, gates: jax.Array, index: _Index) -> tuple[jax.Array, _Saved]:
    return _weighted(results, gates, index), (results, gates, index)


def _weighted_backward(saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array, _Index]:
    results, gates, index = saved
    # An empty place has the token T and a choice of no meaning: its gate and its row are both filled with zeros.
    gate = gates.at[index.tokens, index.choices].get(mode="fill", fill_value=0)
    to_results = gate[:, None] * _rows(g, index.tokens).astype(gate.dtype)
    to_gates = [
        (g.astype(gates.dtype) * _rows(results, index.places[:, choice]).astype(gates.dtype)).sum(1)
        for choice in range(index.places.shape[1])
    ]
    return to_results.astype(results.dtype), jnp.stack(to_gates, 1), _no_gradient(index)


_weighted.defvjp(_weighted_forward, _weighted_backward)


def _no_gradient(index: _Index) -> _Index:
    zeros: _Index = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), index)
    return zeros


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """What tokens chose.

    Attributes:
      experts: int32[T, k], by falling score, the lower number first among equals; n for a token that is padding.
      gates: wide[T, k], sum 1; 0 for padding.
      scores: wide[T, n], softmax or sigmoid of the logits.
    """

    experts: "Int[Array, 'tokens k']"
    gates: "Float[Array, 'tokens k']"
    scores: "Float[Array, 'tokens experts']"


def choose_experts(
    logits: "Float[Array, 'tokens experts']",
    real: "Bool[Array, 'tokens']",
    *,
    k: int,
    scores: Scores = "softmax",
    bias: "Float[Array, 'experts'] | None" = None,
) -> TokenChoice:
    """Every token takes k experts, and weighs them by their scores over the sum of the chosen ones.

    Args:
      logits: float[T, n]; scores are computed in float32 or wider.
      real: bool[T], False = padding, which goes nowhere.
      k: Experts of a token.
      scores: "softmax" over all experts as in Mixtral, or "sigmoid" of each.
      bias: float[n], added to the scores for the choice alone (Wang et al., arXiv 2408.15664); None = none.

    Raises:
      ValueError: there are fewer than k experts.
    """
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"choose_experts: k must be from 1 to {experts}, the number of experts; got {k}.")
    wider = logits.astype(wide(logits.dtype))
    found = jax.nn.softmax(wider) if scores == "softmax" else jax.nn.sigmoid(wider)
    ranked = found if bias is None else found + jax.lax.stop_gradient(bias.astype(found.dtype))[None, :]
    chosen = jax.lax.top_k(jax.lax.stop_gradient(ranked), k)[1]
    picked = jnp.take_along_axis(found, chosen, axis=1)
    # The smallest normal number: sigmoids of very negative logits may all be zero.
    gates = picked / jnp.maximum(picked.sum(1, keepdims=True), jnp.finfo(picked.dtype).tiny)
    return TokenChoice(
        jnp.where(real[:, None], chosen, experts).astype(jnp.int32), jnp.where(real[:, None], gates, 0), found
    )


def count_choices(experts: "Int[Array, 'tokens k']", count: int) -> "Int[Array, 'experts']":
    """int32[n], choices of each of `count` experts."""
    return (experts.reshape(-1)[:, None] == jnp.arange(count, dtype=experts.dtype)[None, :]).sum(0, dtype=jnp.int32)


def routes_with_capacity(
    experts: "Int[Array, 'tokens k']", gates: "Float[Array, 'tokens k']", *, count: int, capacity: int
) -> Routes:
    """Routes where each of `count` experts has `capacity` places.

    An expert's places go to its tokens in their order; a choice beyond them is dropped, and the other gates of that
    token stay as they are. `experts` and `gates` are those of a `TokenChoice`.
    """
    rank = _rank_among_equals(experts, count)
    fits = (rank < capacity) & (experts < count)
    places = jnp.where(fits, experts * capacity + rank, count * capacity)
    return _routes_of_places(places, jnp.where(fits, gates, 0), count * capacity)


def routes_in_groups(
    experts: "Int[Array, 'tokens k']", gates: "Float[Array, 'tokens k']", *, count: int, block: int
) -> tuple[Routes, "Int[Array, 'experts']"]:
    """Routes without drops: the places of an expert are as many as chose it, rounded up to whole blocks.

    Args:
      experts: int32[T, k], of a `TokenChoice`.
      gates: wide[T, k], of the same.
      count: n, experts that there are.
      block: Places of a block, all of one expert.

    Returns:
      Routes with P = block * floor((T k + n (block - 1)) / block) places, and int32[n], the places of each expert; what
      is left behind the last one is empty.
    """
    size = block * ((experts.size + count * (block - 1)) // block)
    sizes = (count_choices(experts, count) + block - 1) // block * block
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    places = begins[experts] + _rank_among_equals(experts, count)
    places = jnp.where(experts < count, places, size)
    return _routes_of_places(places, gates, size), sizes


def _rank_among_equals(experts: jax.Array, count: int) -> jax.Array:
    """int32[T, k]: how many choices of the same expert come before, in the order of tokens and of their choices."""
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = count_choices(experts, count)
    begins = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    # The inverse of a permutation of integers.
    position = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype), unique_indices=True)
    return (position - begins[flat]).reshape(experts.shape)


def _routes_of_places(places: jax.Array, gates: jax.Array, size: int) -> Routes:
    tokens, k = places.shape
    flat, numbers = places.reshape(-1), jnp.arange(tokens * k, dtype=jnp.int32)
    return Routes(
        jnp.full(size, tokens, jnp.int32).at[flat].set(numbers // k, mode="drop"),
        jnp.zeros(size, jnp.int32).at[flat].set(numbers % k, mode="drop"),
        places,
        gates,
    )


def choose_tokens(scores: "Float[Array, 'tokens experts']", real: "Bool[Array, 'tokens']", *, capacity: int) -> Routes:
    """Every expert takes its best tokens, see `best_tokens`, and weighs them by their scores.

    A gradient goes through the scores of what was chosen, and not through the choice.

    Args:
      scores: float[T, n] in [0, 1], sigmoids; their dtype should be float32 or wider, or ties are many.
      real: bool[T], False = no token of this group, padding for instance, which nobody takes.
      capacity: Places of an expert, at least k for the largest b; those beyond k stay empty.

    Returns:
      Routes of n * capacity places; choice e of a token is expert e.
    """
    count, experts = scores.shape
    tokens, own = best_tokens(scores, real, capacity=capacity)
    capacity = tokens.shape[1]
    size = experts * capacity
    numbers = jnp.arange(size, dtype=jnp.int32).reshape(experts, capacity)
    places = jnp.full((count, experts), size, jnp.int32).at[tokens, own].set(numbers, mode="drop")
    return Routes(tokens.reshape(-1), own.reshape(-1), places, jnp.where(places < size, scores, 0))


def best_tokens(
    scores: "Float[Array, 'tokens experts']", real: "Bool[Array, 'tokens']", *, capacity: int
) -> "tuple[Int[Array, 'experts capacity'], Int[Array, 'experts capacity']]":
    """The k = floor(b / n) best tokens of each expert among the b real ones, at least 1 where there are any.

    Of equal scores the earlier token wins.

    Returns:
      int32[n, capacity], the tokens, T behind the k-th; and int32[n, capacity], whose they are: 0 to n - 1 by row.
    """
    count, experts = scores.shape
    capacity = min(capacity, count)
    real_ones = real.sum(dtype=jnp.int32)
    k = jnp.where(real_ones > 0, jnp.maximum(real_ones // experts, 1), 0)
    ranked = jnp.where(real[:, None], jax.lax.stop_gradient(scores), -1)
    taken = jax.lax.top_k(ranked.T, capacity)[1].astype(jnp.int32)
    tokens = jnp.where(jnp.arange(capacity, dtype=jnp.int32)[None, :] < k, taken, count)
    return tokens, jnp.broadcast_to(jnp.arange(experts, dtype=jnp.int32)[:, None], tokens.shape)


def is_best(
    scores: "Float[Array, 'tokens experts']", real: "Bool[Array, 'tokens']", *, capacity: int
) -> "Bool[Array, 'tokens experts']":
    """Whether an expert takes a token, see `best_tokens`."""
    tokens, own = best_tokens(scores, real, capacity=capacity)
    return jnp.zeros(scores.shape, bool).at[tokens, own].set(True, mode="drop")


def routes_of_some(chosen: "Bool[Array, 'tokens']", *, size: int) -> Routes:
    """Routes of the tokens that are chosen to `size` places, in their order; tokens beyond have none, gates are 1."""
    count = chosen.shape[0]
    rank = jnp.cumsum(chosen, dtype=jnp.int32) - 1
    places = jnp.where(chosen & (rank < size), rank, size)
    tokens = jnp.full(size, count, jnp.int32).at[places].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
    return Routes(tokens, jnp.zeros_like(tokens), places[:, None], (places < size).astype(jnp.float32)[:, None])


def reverse(routes: Routes) -> Routes:
    """Routes by which `dispatch` brings what is at the places of tokens, one each at most, back to them."""
    choices = jnp.zeros(routes.places.shape[:-1], jnp.int32)
    gates = (routes.tokens < routes.places.shape[-2]).astype(routes.gates.dtype)
    return Routes(routes.places[..., 0], choices, routes.tokens[..., None], gates[..., None])


def logistic_noise(
    keys: "Int[Array, 'rows words']", layer: "Int[Array, 'rows']", like: "Float[Array, 'rows positions experts']"
) -> "Float[Array, 'rows positions experts']":
    """G' - G'' of two independent draws of the standard Gumbel distribution, which is logistic (Maddison et al., 2017).

    Args:
      keys: uint32[B, w], data of a PRNG key for each row.
      layer: int32[B], folded into them, so that no two layers draw alike.
      like: Of the shape and dtype that are wanted.
    """

    def draw(data: jax.Array, layer: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(data), layer)
        return jax.random.logistic(key, like.shape[1:], like.dtype)

    return jax.vmap(draw)(keys, layer)
