"""Runs an operation on arrays under a mesh: on each device's own part, with every mesh axis manual.

Compilers cannot partition a custom kernel, and the TPU compiler refuses one in a program where any mesh axis is left
to the partitioner. So an operation is wrapped in a shard_map over all axes that are still automatic: at the top level
under jit these are all axes; inside a shard_map over some axes, the others.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from scalejax import compat
from scalejax.parallel.rules import LogicalAxes, Rules

if TYPE_CHECKING:
    from jaxtyping import PyTree

Result = TypeVar("Result")
Tree = TypeVar("Tree")


def shard_kernel(
    op: Callable[..., Result],
    *,
    in_axes: tuple[LogicalAxes, ...],
    out_axes: LogicalAxes | tuple[LogicalAxes, ...],
    rules: Rules,
    mesh: Mesh | None = None,
) -> Callable[..., Result]:
    """`op`, run on shards.

    `op` must work on any part of a sharded axis by itself (batch, heads, independent rows), or exchange over its mesh
    axes what it wants of other parts: nothing is summed over devices here. An axis is sharded where a rule names it,
    every argument's size along it divides, and no axis of the same array has taken the mesh axis; otherwise each device
    computes all of it.

    Args:
      op: Arrays in, array or tuple of arrays out; no mesh.
      in_axes: Per argument, a logical name or None per dimension.
      out_axes: Likewise for the result, or per result.
      rules: Logical axis -> mesh axes.
      mesh: The mesh, where none is set (jax.set_mesh) and no shard_map surrounds the call.

    Returns:
      A function of the same arguments, differentiable like `op`.

    Raises:
      ValueError: on call: no mesh, or arguments that do not fit `in_axes`.
    """

    def sharded(*args: jax.Array) -> Result:
        context = jax.sharding.get_abstract_mesh()
        if context.empty and mesh is None:
            raise ValueError("shard_kernel: no mesh: pass mesh=, or call under jax.set_mesh or inside a shard_map.")
        used = mesh if context.empty else context
        assert used is not None
        free = tuple(a for a, kind in zip(used.axis_names, used.axis_types, strict=True) if kind != AxisType.Manual)
        if not free:
            return op(*args)
        several = bool(out_axes) and isinstance(out_axes[0], tuple)
        results: Any = out_axes if several else (out_axes,)
        assigned = _assign(args, in_axes, results, rules, {axis: used.shape[axis] for axis in free})
        out_specs = tuple(_spec(axes, assigned) for axes in results)
        run = _Run(
            op=op,
            mesh=used if context.empty else None,
            free=free,
            sizes=tuple(used.shape[axis] for axis in free),
            in_specs=tuple(_spec(axes, assigned) for axes in in_axes),
            out_specs=out_specs if several else out_specs[0],
        )
        # A surrounding shard_map may track over which of its axes a value varies: make all arguments vary alike.
        varying = frozenset().union(*(jax.typeof(arg).manual_axis_type.varying for arg in args))
        return _run(run, varying, *(_vary(arg, varying) for arg in args))

    return sharded


@dataclasses.dataclass(frozen=True)
class _Run:
    """One wrapped call: everything static."""

    op: Callable[..., Any]
    mesh: Mesh | AbstractMesh | None
    free: tuple[str, ...]
    sizes: tuple[int, ...]
    in_specs: tuple[P, ...]
    out_specs: P | tuple[P, ...]

    def shard_map(
        self, function: Callable[..., Result], in_specs: "PyTree[P]", out_specs: "PyTree[P]"
    ) -> Callable[..., Result]:
        # Unchecked, so that kernels need not say over which axes their results vary.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.free),
            check_vma=False,
        )


# The derivative is written out because jax 0.10 to 0.12 cannot differentiate a shard_map inside another one: residuals
# of the inner one are given specs that name axes of the outer.
@compat.custom_vjp(0, 1)
def _run(run: _Run, varying: frozenset[str], *args: jax.Array) -> "PyTree[jax.Array]":
    return _vary(run.shard_map(run.op, run.in_specs, run.out_specs)(*args), varying)


def _run_forward(
    run: _Run, varying: frozenset[str], *args: jax.Array
) -> tuple["PyTree[jax.Array]", tuple["_Static", list[jax.Array]]]:
    structure: list[Any] = []

    def local(*args: jax.Array) -> tuple["PyTree[jax.Array]", list[jax.Array]]:
        out, pull = jax.vjp(run.op, *map(_untracked, args))
        leaves, tree = jax.tree.flatten(pull)
        structure.append(tree)
        return out, [leaf[None] for leaf in leaves]  # the part of each device, stacked

    out, residuals = run.shard_map(local, run.in_specs, (run.out_specs, P(run.free)))(*args)
    return _vary(out, varying), (_Static(structure[-1]), residuals)


def _run_backward(
    run: _Run, varying: frozenset[str], saved: tuple["_Static", list[jax.Array]], cotangents: "PyTree[jax.Array]"
) -> tuple[jax.Array | None, ...]:
    tree, residuals = saved[0].value, saved[1]
    single = isinstance(run.out_specs, P)

    def local(residuals: list[jax.Array], cotangents: "PyTree[jax.Array]") -> tuple[jax.Array | None, ...]:
        pull = jax.tree.unflatten(tree, [leaf[0] for leaf in residuals])
        # A result that is whole along a mesh axis has one cotangent, which every device along the axis holds.
        cotangents = jax.tree.map(_untracked, cotangents)
        outs, specs = ((cotangents,), (run.out_specs,)) if single else (cotangents, run.out_specs)
        outs = tuple(
            ct / math.prod(run.sizes[run.free.index(a)] for a in _unnamed(run, s))
            for ct, s in zip(outs, specs, strict=True)
        )
        grads = pull(outs[0] if single else outs)
        return tuple(
            None if g.dtype == jax.dtypes.float0 else jax.lax.psum(g, _unnamed(run, s)) if _unnamed(run, s) else g
            for g, s in zip(grads, run.in_specs, strict=True)
        )

    grads = run.shard_map(local, (P(run.free), run.out_specs), run.in_specs)(residuals, cotangents)
    return tuple(None if g is None else _vary(g, varying) for g in grads)


_run.defvjp(_run_forward, _run_backward)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Static:
    value: Any


def _unnamed(run: _Run, spec: P) -> tuple[str, ...]:
    named = {axis for entry in spec if entry is not None for axis in ((entry,) if isinstance(entry, str) else entry)}
    return tuple(axis for axis in run.free if axis not in named)


def _untracked(array: jax.Array) -> jax.Array:
    """The same array without the varying axes of the surrounding shard_map, which are not tracked in the inner one.

    What an operation returns there has none, but what enters keeps them: the two do not mix in a derivative.
    """
    return jax.lax.squeeze(jax.lax.expand_dims(array, (0,)), (0,))


def _vary(tree: Tree, varying: frozenset[str]) -> Tree:
    def cast(array: jax.Array) -> jax.Array:
        missing = tuple(varying - jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, tree)


def _assign(
    args: tuple[jax.Array, ...],
    in_axes: tuple[LogicalAxes, ...],
    out_axes: tuple[LogicalAxes, ...],
    rules: Rules,
    free: dict[str, int],
) -> dict[str, tuple[str, ...]]:
    """Mesh axes of each logical axis, the same for every argument and result."""
    if len(args) != len(in_axes):
        raise ValueError(f"shard_kernel: in_axes describes {len(in_axes)} arguments; got {len(args)}.")
    sizes: dict[str, int] = {}
    for number, (array, axes) in enumerate(zip(args, in_axes, strict=True)):
        if array.ndim != len(axes):
            raise ValueError(f"shard_kernel: argument {number} has shape {array.shape}, but axes {axes}.")
        for name, size in zip(axes, array.shape, strict=True):
            if name is not None and sizes.setdefault(name, size) != size:
                raise ValueError(f"shard_kernel: axis {name!r} has sizes {sizes[name]} and {size}.")
    assigned: dict[str, tuple[str, ...]] = {}
    for name, size in sizes.items():
        beside = {other for array in (*in_axes, *out_axes) if name in array for other in array if other is not None}
        taken = {axis for other in beside for axis in assigned.get(other, ())}
        axes = tuple(axis for axis in rules.mesh_axes(name) if axis in free and axis not in taken)
        if axes and size % math.prod(free[axis] for axis in axes) == 0:
            assigned[name] = axes
    return assigned


def _spec(axes: LogicalAxes, assigned: dict[str, tuple[str, ...]]) -> P:
    return P(*(assigned.get(name) if name is not None else None for name in axes))
