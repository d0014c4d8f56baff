"""Sharding of activations: logical axis -> mesh axes, for the mesh at hand.

batch    rows                      sequence   positions, inside attention
decoded  rows of one token each, which `context` cuts too where it cuts the keys of all rows
keys     positions of keys, where they are others than those of queries
stream   positions, between blocks: also over `tensor`, which shards norms and residuals ("sequence parallelism",
         Korthikanti et al., 2022)
heads, kv_heads, hidden, vocabulary   features, over `tensor`; kv_pairs: keys and values of a head side by side
pages    of a cache: those of each device that has rows or positions of its own
"""

import math

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalejax.parallel.mesh import BATCH_AXES
from scalejax.parallel.rules import LogicalAxes, Rules

ACTIVATIONS = Rules(
    axes=(
        ("batch", BATCH_AXES),
        ("decoded", (*BATCH_AXES, "context")),
        ("sequence", ("context",)),
        ("keys", ("context",)),
        ("stream", ("context", "tensor")),
        ("heads", ("tensor",)),
        ("kv_heads", ("tensor",)),
        ("kv_pairs", ("tensor",)),
        ("hidden", ("tensor",)),
        ("vocabulary", ("tensor",)),
        ("pages", (*BATCH_AXES, "context")),
    )
)


def constrain(x: jax.Array, axes: LogicalAxes, rules: Rules = ACTIVATIONS) -> jax.Array:
    """x, laid out by the names of its axes over the automatic axes of the ambient mesh; x itself where there is none.

    A dimension that does not divide is left to the compiler. Rows of one position each are "decoded".
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    free = {a for a, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    if any(name in ("sequence", "stream") and size == 1 for name, size in zip(axes, x.shape, strict=True)):
        axes = tuple({"batch": "decoded", "sequence": None, "stream": None}.get(name or "", name) for name in axes)
    entries: list[tuple[str, ...] | None] = []
    for name, size in zip(axes, x.shape, strict=True):
        wanted = tuple(axis for axis in rules.mesh_axes(name) if axis in free)
        divides = size % math.prod(mesh.shape[axis] for axis in wanted) == 0
        entries.append(wanted if wanted and divides else None)
    return jax.lax.with_sharding_constraint(x, P(*entries)) if any(entries) else x
