"""Collectives that a program states itself, before any compiler has touched it.

What a shard_map asks for stands in the lowered program (StableHLO) in one form on every platform: the place to assert
that two ways to say the same thing move equal bytes. Collectives that the partitioner will add for shardings under jit
are not there yet; `explain_sharding` shows those.
"""

import math
import re
from typing import TYPE_CHECKING, cast

from scalejax.plan.compiled.collectives import Collective, Groups, Kind, axes_of, minimum_bytes, positions_along

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Lowered
    from jaxlib.mlir import ir

_KINDS: dict[str, Kind] = {
    "stablehlo.all_gather": "all-gather",
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.reduce_scatter": "reduce-scatter",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.collective_broadcast": "collective-broadcast",
}


def stated_collectives(lowered: "Lowered", mesh: "Mesh") -> list[Collective]:
    """Lists the collectives that a program states itself, loop bodies multiplied by their trip counts.

    Args:
      lowered: What `jitted.lower(...)` or `traced.lower()` returned.
      mesh: The mesh that its shard_maps run on.
    """
    module = lowered.compiler_ir("stablehlo")
    assert module is not None
    functions = {}
    for operation in module.body.operations:
        if operation.operation.name == "func.func":
            functions[operation.attributes["sym_name"].value] = operation
    found: list[Collective] = []
    _walk(functions["main"], functions, 1, True, mesh, found)
    return found


def _walk(
    operation: "ir.OpView",
    functions: "dict[str, ir.OpView]",
    times: int,
    known: bool,
    mesh: "Mesh",
    found: list[Collective],
) -> None:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                name = inner.operation.name
                if name == "stablehlo.while":
                    trips = _trip_count(inner)
                    body = (times * (1 if trips is None else trips), known and trips is not None)
                    _walk(inner, functions, *body, mesh, found)
                elif name == "func.call":
                    callee = str(inner.attributes["callee"]).lstrip("@").strip('"')
                    _walk(functions[callee], functions, times, known, mesh, found)
                else:
                    kind = _kind(inner)
                    if kind is not None:
                        found.append(_collective(kind, inner, times, known, mesh))
                    _walk(inner, functions, times, known, mesh, found)


def _kind(operation: "ir.OpView") -> Kind | None:
    name = operation.operation.name
    if name == "stablehlo.custom_call" and '"ragged_all_to_all"' in str(operation.attributes["call_target_name"]):
        return "ragged-all-to-all"
    return _KINDS.get(name)


def _collective(kind: Kind, operation: "ir.OpView", times: int, known: bool, mesh: "Mesh") -> Collective:
    operands = list(operation.operands)
    payload = sum(_bytes(value.type) for value in (operands[:1] if kind == "ragged-all-to-all" else operands))
    groups = _groups(operation, mesh)
    axes = axes_of(groups, mesh)
    if kind == "collective-permute":
        size = math.prod(mesh.shape[a] for a in axes)
    else:
        size = max(len(group) for group in groups)
    if kind == "all-gather":
        payload *= size
    least = minimum_bytes(kind, payload, size) if axes else 0
    return Collective(
        kind=kind,
        axes=axes,
        group_size=size,
        bytes=payload * times,
        count=times,
        minimum_bytes=least * times,
        trip_count_known=known,
        groups=groups,
    )


def _groups(operation: "ir.OpView", mesh: "Mesh") -> Groups:
    attributes = operation.attributes
    if "source_target_pairs" in attributes:
        text = str(attributes["source_target_pairs"])
    elif "replica_groups" in attributes:
        text = str(attributes["replica_groups"])
    else:  # a custom call keeps them in its configuration
        text = str(attributes["backend_config"]).partition("replica_groups = ")[2].partition(" : ")[0]
    if "replica_group_mesh_axes" in text:
        return positions_along(tuple(re.findall(r'axis_ref<name = "([^"]+)"', text)), mesh)
    rows = re.findall(r"\[([\d,\s\-]+)\]", text)
    if not rows:
        rows = re.findall(r"dense<(\d+)>", text)
    return tuple(tuple(int(d) for d in row.split(",")) for row in rows)


def _bytes(kind: "ir.Type") -> int:
    """Bytes of a `tensor<4x8xbf16>`."""
    match = re.match(r"tensor<((?:\d+x)*)(.+)>$", str(kind))
    if match is None:
        return 0
    element = match.group(2)
    width = int(cast(re.Match[str], re.search(r"\d+", element)).group(0))
    bits = 8 if element == "i1" else width * (2 if element.startswith("complex") else 1)
    return -(-math.prod(int(d) for d in match.group(1).split("x") if d) * bits // 8)


def _trip_count(loop: "ir.OpView") -> int | None:
    """Trip count of the loops that jax makes of scans: a counter below a constant, plus one each time."""
    condition, body = (region.blocks[0] for region in loop.regions)
    compared = _owner(_beneath(list(condition.operations)[-1].operands[0]))
    if (
        compared is None
        or compared.name != "stablehlo.compare"
        or "LT" not in str(compared.attributes["comparison_direction"])
    ):
        return None
    counter, limit = _beneath(compared.operands[0]), _constant(compared.operands[1])
    if _owner(counter) is not None:
        return None
    index = _argument_number(counter, condition)
    step = _owner(_beneath(list(body.operations)[-1].operands[index]))
    start = _constant(loop.operands[index])
    if step is None or step.name != "stablehlo.add" or limit is None or start is None:
        return None
    before = _beneath(step.operands[0])
    if _owner(before) is not None or _argument_number(before, body) != index:
        return None
    by = _constant(step.operands[1])
    return None if not by or by < 1 else max(0, -(-(limit - start) // by))


def _beneath(value: "ir.Value[ir.Type]") -> "ir.Value[ir.Type]":
    """The value without constraints on its sharding, of which a partly automatic shard_map puts one on every value."""
    owner = _owner(value)
    while owner is not None and owner.name == "sdy.sharding_constraint":
        value = owner.operands[0]
        owner = _owner(value)
    return value


def _owner(value: "ir.Value[ir.Type]") -> "ir.Operation | None":
    """The operation that made a value; None for an argument of a block."""
    return getattr(value.owner, "operation", None)


def _argument_number(value: "ir.Value[ir.Type]", block: "ir.Block") -> int:
    return next((i for i, argument in enumerate(block.arguments) if argument == value), -1)


def _constant(value: "ir.Value[ir.Type]") -> int | None:
    made = _owner(_beneath(value))
    if made is None or made.name != "stablehlo.constant":
        return None
    match = re.match(r"dense<(-?\d+)>", str(made.attributes["value"]))
    return int(match.group(1)) if match else None
