"""Computing on the distinct rows of deduplicated features, and handing the results out to the examples.

A function that treats rows one by one (pooling, an MLP, attention over the ids of a row) gives equal results for equal
rows, so it can run on the U distinct rows of B examples and be expanded afterwards ("deduplicated compute", O7 of RecD,
arXiv 2211.05239). What looks across rows (batch norm, in-batch negatives) or draws noise per example must not.
"""

from collections.abc import Callable
from typing import TypeVar

import jax

T = TypeVar("T")


def over_distinct_rows(function: Callable[..., T], inverse: jax.Array, *rows: object) -> T:
    """function(rows of every example), computed once per distinct row.

    Equal to the bit where the function's sums do not depend on the number of rows; XLA on CPUs orders the terms of a
    reduction (a norm, a softmax) by the shape, which the last bits show, matrix products excepted.

    Its gradient adds the gradients of the examples of a row up, then passes through the function once per row.

    Args:
      function: Arrays over U rows (their first axis) -> arrays over U rows; row u of the results depends on row u of
        the arguments alone.
      inverse: int32[B] in [0, U), the row of each example, as `DedupKeyedJagged.inverse` has it; out of range is not
        checked on the device.
      rows: Arguments of the function, pytrees of arrays [U, ...].

    Returns:
      The results over B examples: leaf[inverse].

    Raises:
      ValueError: arguments or results do not all have the same number of rows.
    """
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(rows)}
    found = function(*rows)
    if len(counts | {leaf.shape[:1] for leaf in jax.tree.leaves(found)}) != 1:
        shapes = [leaf.shape for leaf in (*jax.tree.leaves(rows), *jax.tree.leaves(found))]
        raise ValueError(
            f"over_distinct_rows: arguments and results must have the distinct rows as their first axis; got {shapes}."
        )
    return jax.tree.map(lambda leaf: leaf[inverse], found)
