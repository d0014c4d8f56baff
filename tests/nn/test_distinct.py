"""Attention over distinct rows, then handed out, against attention over the rows of all examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.nn.distinct import over_distinct_rows

LENGTH, WIDTH, TABLE = 6, 16, 50


class Block(nnx.Module):
    """A transformer block over the ids of a row, and their mean."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.table = nnx.Param(jax.random.normal(rngs.params(), (TABLE, WIDTH)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[...][ids]  # R L D
        x = x + self.attention(self.norm(x))
        x = x + self.down(jax.nn.gelu(self.up(x)))
        return x.mean(axis=1)


def batch(examples: int, distinct: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int32[B, L] ids of all examples, and the distinct rows and the inverse that deduplication finds."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, TABLE, (distinct, LENGTH)).astype(np.int32)[rng.integers(0, distinct, examples)]
    found = deduplicate(KeyedJagged.from_dense({"a": rows}), [("a",)])
    return rows, found.distinct[0].values.reshape(-1, LENGTH), found.inverse[0]


CHUNK = 32


def by_chunks(function, ids: jax.Array) -> jax.Array:
    """The function over 32 rows at a time, the last ones filled up with row 0."""
    filled = jnp.pad(ids, ((0, -len(ids) % CHUNK), (0, 0)), mode="edge")
    return jax.lax.map(function, filled.reshape(-1, CHUNK, LENGTH)).reshape(-1, WIDTH)[: len(ids)]


@pytest.mark.slow
@pytest.mark.parametrize(("examples", "distinct"), [(128, 9), (128, 1), (1, 1), (40, 4000)])
def test_a_transformer_over_distinct_rows_gives_the_bits_of_one_over_all_rows(examples: int, distinct: int) -> None:
    # XLA's CPU compiler adds the terms of a norm, a softmax or a mean up in an order that depends on the number of
    # rows. Taken by equal numbers of rows, nothing of it is left.
    block = Block()
    rows, few, inverse = batch(examples, distinct)
    assert len(few) == len(np.unique(rows, axis=0))
    plain = nnx.jit(lambda block, rows: by_chunks(block, rows))(block, rows)
    dedup = nnx.jit(lambda block, few: over_distinct_rows(lambda r: by_chunks(block, r), inverse, few))(block, few)
    np.testing.assert_array_equal(dedup, plain)


def test_a_transformer_over_all_rows_at_once_differs_by_the_order_of_sums_alone() -> None:
    block = Block()
    rows, few, inverse = batch(128, 9)
    plain = nnx.jit(lambda block, rows: block(rows))(block, rows)
    dedup = nnx.jit(lambda block, few: over_distinct_rows(block, inverse, few))(block, few)
    np.testing.assert_allclose(dedup, plain, rtol=0, atol=2e-6)  # sums of 16 terms of size 1 in float32


def test_matrix_products_and_what_treats_numbers_one_by_one_give_equal_bits_at_once() -> None:
    rng = np.random.default_rng(0)
    few = rng.normal(size=(9, LENGTH, WIDTH)).astype(np.float32)
    inverse = rng.integers(0, 9, 128)
    weight = jnp.asarray(rng.normal(size=(WIDTH, 4 * WIDTH)).astype(np.float32))

    def scores(x: jax.Array) -> jax.Array:
        return jnp.einsum("blm,bmd->bld", jnp.einsum("bld,bmd->blm", x, x), jax.nn.gelu(x @ weight))

    dedup = jax.jit(lambda x: over_distinct_rows(scores, inverse, x))(few)
    np.testing.assert_array_equal(dedup, jax.jit(scores)(few[inverse]))


def test_gradients_of_a_row_are_the_sum_of_those_of_its_examples() -> None:
    rng = np.random.default_rng(1)
    inverse = rng.integers(0, 9, 64)
    # Whole numbers, which add up without rounding in any order.
    few, weight = rng.integers(-8, 8, (9, 5)), rng.integers(-8, 8, (5, 3))
    given = rng.integers(-8, 8, (64, 3))

    def loss(few: jax.Array, weight: jax.Array) -> jax.Array:
        return (given * over_distinct_rows(lambda x: x @ weight, jnp.asarray(inverse), few)).sum()

    found = jax.grad(loss, argnums=(0, 1))(jnp.asarray(few, jnp.float32), jnp.asarray(weight, jnp.float32))
    sums = np.zeros((9, 3), np.int64)
    np.add.at(sums, inverse, given)
    np.testing.assert_array_equal(found[0], sums @ weight.T)
    np.testing.assert_array_equal(found[1], few[inverse].T @ given)


def test_what_is_no_function_of_rows_is_refused() -> None:
    inverse = jnp.zeros(3, jnp.int32)
    with pytest.raises(ValueError, match="distinct rows as their first axis"):
        over_distinct_rows(lambda x: x.sum(axis=0), inverse, jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="distinct rows as their first axis"):
        over_distinct_rows(lambda x, y: x, inverse, jnp.ones((2, 4)), jnp.ones((3, 4)))
    found = over_distinct_rows(lambda x: {"sum": x["a"].sum(axis=1)}, inverse, {"a": jnp.ones((2, 4))})
    assert found["sum"].tolist() == [4, 4, 4]
