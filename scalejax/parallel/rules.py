"""Logical axis of a parameter -> mesh axes.

Models name the axes of their parameters ("input", "hidden", ...) and know no mesh; a rules table says which mesh axes
shard which name. A recipe picks one of the tables below or writes its own.
"""

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel.mesh import AXES

LogicalAxes = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class ParameterPlacement:
    """How one parameter lies on a mesh, and why.

    Attributes:
      name: Path of the parameter.
      shape: Its shape.
      logical_axes: Its axes by name.
      spec: Its sharding.
      reason: Why a dimension that a rule names is whole on every device; "" if there is none.
      apart: Data axes along which devices hold different parts for good: neither gathered nor summed over.
    """

    name: str
    shape: tuple[int, ...]
    logical_axes: LogicalAxes
    spec: P
    reason: str
    apart: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """A table from logical axis names to mesh axes; what is not named is replicated, experts aside.

    These lie on `expert`, unless a table names them: tokens travel to them, and they stay (Lepikhin et al., GShard,
    arXiv 2006.16668).

    Attributes:
      axes: ((logical axis, mesh axes), ...). A mesh axis shards one dimension of a parameter: the first, from the
        left, whose rule names it and whose size divides.
    """

    axes: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, mesh_axes in self.axes:
            if names.count(name) > 1:
                raise UserError(f"Rules: logical axis {name!r} is named twice; give it one entry.")
            for axis in mesh_axes:
                if axis not in AXES:
                    raise UserError(f"Rules: {name!r} names the mesh axis {axis!r}; mesh axes are {', '.join(AXES)}.")

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """Mesh axes that shard a logical axis, where they divide it."""
        return {"experts": ("expert",), **dict(self.axes)}.get(logical, ()) if logical is not None else ()

    def spec(self, logical_axes: LogicalAxes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh) -> P:
        """Sharding of one array; a dimension that does not divide is replicated (see `describe`)."""
        return self._place("", logical_axes, shape, mesh).spec

    def describe(
        self, params: Mapping[str, tuple[LogicalAxes, tuple[int, ...]]], mesh: Mesh | AbstractMesh
    ) -> tuple[ParameterPlacement, ...]:
        """One line per parameter, {path: (logical axes, shape)}, with the reason where a rule could not be followed."""
        return tuple(self._place(name, axes, shape, mesh) for name, (axes, shape) in params.items())

    def _place(
        self, name: str, logical_axes: LogicalAxes, shape: tuple[int, ...], mesh: Mesh | AbstractMesh
    ) -> ParameterPlacement:
        if len(logical_axes) != len(shape):
            raise ValueError(f"Rules: {name or 'an array'} of shape {shape} has logical axes {logical_axes}.")
        taken: set[str] = set()
        entries: list[tuple[str, ...] | str | None] = []
        reasons = []
        for logical, size in zip(logical_axes, shape, strict=True):
            wanted = tuple(axis for axis in self.mesh_axes(logical) if mesh.shape.get(axis, 1) > 1)
            free = tuple(axis for axis in wanted if axis not in taken)
            count = math.prod(mesh.shape[axis] for axis in free)
            if wanted and not free:
                reasons.append(f"{logical}: {'+'.join(wanted)} shards an earlier dimension")
            elif size % count:
                reasons.append(f"{logical}: {size} does not divide by {'+'.join(free)}={count}")
                free = ()
            taken.update(free)
            entries.append(None if not free else free[0] if len(free) == 1 else free)
        while entries and entries[-1] is None:
            entries.pop()
        return ParameterPlacement(name, shape, logical_axes, P(*entries), "; ".join(reasons))


_WEIGHT_AXES = ("input", "hidden", "output", "embed", "vectors", "mixed", "rank")

REPLICATED = Rules()
"""Every parameter whole on every device: data parallelism."""

FSDP = Rules(axes=tuple((name, ("fsdp",)) for name in _WEIGHT_AXES))
"""Every weight sharded over `fsdp` along its first dimension that divides."""

LLM = Rules(
    axes=(
        ("layers", ("stage",)),
        ("embed", ("fsdp",)),
        ("heads", ("tensor",)),
        ("kv_heads", ("tensor",)),
        ("hidden", ("tensor",)),
        ("vocabulary", ("tensor",)),
    )
)
"""Language models: heads, hidden features of MLPs and the vocabulary over `tensor` (Shoeybi et al., 2019), the other
dimension of each matrix over `fsdp`, layers over `stage`."""
