"""Bytes that one device moves through its main memory, and the FLOPs it executes, read from the compiled program.

XLA's cost analysis counts each loop body once; here each counts as often as it runs. Rules for bytes: an instruction
reads its operands and writes its result, a fusion likewise but nothing in between; a gather, a slice or a dynamic slice
reads only what it returns, and their counterparts that write in place touch only what they write; memory on the chip
(VMEM) is free. Arrays count with the padding of their tiles, which is what the memory sees.
"""

import dataclasses
import math
import re

from scalejax.plan.compiled import hlo

# These name or regroup values and move nothing; the -done half of a pair was counted at its start.
_FREE = frozenset(
    {
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
        "while", "conditional", "call", "opt-barrier", "optimization-barrier", "async-start", "async-update",
        "async-done", "call-start", "call-update", "call-done", "copy-done", "all-gather-done", "all-reduce-done",
        "reduce-scatter-done", "collective-permute-done", "send-done", "recv", "recv-done", "add-dependency", "domain",
        "get-dimension-size",
    }
)  # fmt: skip
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_WRITES = frozenset({"dynamic-update-slice", "scatter"})


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Work of one device in one step.

    Attributes:
      hbm_bytes: Bytes read from and written to main memory.
      matmul_flops: FLOPs of the products and convolutions that the compiler kept, recomputation and work that is
        repeated on several devices included; kernels written by hand count nothing here.
      unbounded_loops: Names of the loops that run as often as the data say; each counts once.
    """

    hbm_bytes: int
    matmul_flops: int
    unbounded_loops: tuple[str, ...]


def of_module(module: hlo.Module) -> Traffic:
    """Adds up the traffic of a compiled program."""
    moved, flops, unbounded = 0, 0, {}
    for execution in module.executions():
        computation = execution.computation
        for instruction in computation.instructions:
            if instruction.opcode == "while" and hlo.trip_count(module, computation, instruction) is None:
                unbounded[instruction.label] = None
            elif instruction.opcode == "dot":
                flops += execution.count * _dot_flops(computation, instruction)
            elif instruction.opcode == "convolution":
                flops += execution.count * _convolution_flops(computation, instruction)
            if not execution.fused:
                moved += execution.count * _bytes(module, computation, instruction)
    return Traffic(moved, flops, tuple(unbounded))


def _memory(arrays: tuple[hlo.Array, ...]) -> int:
    return sum(array.memory_bytes for array in arrays if array.space == 0)


def _bytes(module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction) -> int:
    opcode = instruction.opcode
    if opcode in _FREE:
        return 0
    if opcode == "fusion":
        return _fusion_bytes(module, computation, instruction)
    if opcode == "custom-call":
        stated = re.search(r'"bytes_accessed":"?(\d+)', instruction.attributes)
        if stated:  # a kernel that declares what it moves
            return int(stated.group(1))
    operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
    if opcode in _SLICES:
        return 2 * _memory(instruction.arrays) + sum(_memory(o.arrays) for o in operands[1:])
    if opcode in _WRITES:
        return _write_bytes(opcode, operands)
    if opcode in ("copy-start", "broadcast", "iota"):
        # copy-start returns (destination, source, context): both ends stand in its result.
        return _memory(instruction.arrays)
    return _memory(instruction.arrays) + sum(_memory(o.arrays) for o in operands)


def _write_bytes(opcode: str, operands: list[hlo.Instruction]) -> int:
    """In place: the update is read and written; a scatter also reads the rows that it adds to, and its indices."""
    if opcode == "dynamic-update-slice":
        return 2 * _memory(operands[1].arrays)
    inputs = (len(operands) - 1) // 2
    updates = sum(_memory(o.arrays) for o in operands[inputs + 1 :])
    return 3 * updates + _memory(operands[inputs].arrays)


def _fusion_bytes(module: hlo.Module, computation: hlo.Computation, fusion: hlo.Instruction) -> int:
    inner = module.computations[fusion.called("calls")[0]]
    moved = 0
    for index, name in enumerate(fusion.operands):
        operand, parameter = computation.by_name.get(name), inner.parameter(index)
        if operand is None or parameter is None:
            continue
        whole = _memory(operand.arrays)
        moved += whole and min(whole, _read_bytes(module, inner, parameter))
    # Results on the chip are free; otherwise what the root writes, in place where it updates a parameter.
    written = _written_bytes(module, inner, inner.root)
    return moved + min(_memory(fusion.arrays), written)


def _read_bytes(module: hlo.Module, computation: hlo.Computation, value: hlo.Instruction) -> int:
    """Bytes of a value that its users inside a fusion look at."""
    whole = sum(array.memory_bytes for array in value.arrays)
    read = 0
    for user in computation.users[value.name]:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            read += sum(array.memory_bytes for array in user.arrays)
        elif user.opcode in _WRITES and user.operands[0] == value.name:
            read += sum(a.memory_bytes for a in computation.by_name[user.operands[-1]].arrays)
        elif user.opcode in ("bitcast", "reshape"):
            read += _read_bytes(module, computation, user)
        elif user.opcode == "fusion":
            inner = module.computations[user.called("calls")[0]]
            for index, name in enumerate(user.operands):
                parameter = inner.parameter(index)
                if name == value.name and parameter is not None:
                    read += _read_bytes(module, inner, parameter)
        else:
            return whole
    return min(whole, read)


def _written_bytes(module: hlo.Module, computation: hlo.Computation, value: hlo.Instruction) -> int:
    if value.opcode == "tuple":
        found = (computation.by_name[name] for name in value.operands if name in computation.by_name)
        return sum(_written_bytes(module, computation, part) for part in found)
    if value.opcode == "parameter":
        return 0  # handed through
    if value.opcode in ("bitcast", "reshape") and value.operands[0] in computation.by_name:
        return _written_bytes(module, computation, computation.by_name[value.operands[0]])
    if value.opcode in _WRITES:
        return sum(a.memory_bytes for a in computation.by_name[value.operands[-1]].arrays)
    if value.opcode == "fusion":
        inner = module.computations[value.called("calls")[0]]
        return _written_bytes(module, inner, inner.root)
    return sum(array.memory_bytes for array in value.arrays)


def _dot_flops(computation: hlo.Computation, dot: hlo.Instruction) -> int:
    left = computation.by_name.get(dot.operands[0])
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    if left is None or match is None:
        return 0
    contracted = math.prod(left.arrays[0].dims[int(d)] for d in match.group(1).split(",") if d)
    return 2 * math.prod(dot.arrays[0].dims) * contracted


def _convolution_flops(computation: hlo.Computation, convolution: hlo.Instruction) -> int:
    """Counts only window positions that meet data: a TPU writes a batched product as a convolution full of holes."""
    left, right = (computation.by_name.get(name) for name in convolution.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.attributes)
    if left is None or right is None or labels is None:
        return 0
    shapes = left.arrays[0].dims, right.arrays[0].dims, convolution.arrays[0].dims
    flops = 2 * shapes[1][labels.group(2).index("i")]
    flops *= shapes[2][labels.group(3).index("b")] * shapes[2][labels.group(3).index("f")]
    window = dict(
        re.findall(r"(\w+)=([\dx_\-]+)", (re.search(r"window=\{([^}]*)\}", convolution.attributes) or [""])[0])
    )
    for axis in range(len(labels.group(1)) - 2):
        sizes = [shape[label.index(str(axis))] for shape, label in zip(shapes, labels.groups(), strict=True)]
        flops *= _window_positions(sizes, window, axis)
    return flops


def _window_positions(sizes: list[int], window: dict[str, str], axis: int) -> int:
    """Pairs (output position, window position) along one axis that read an element and not padding or a hole."""

    def stated(name: str, default: str) -> str:
        parts = window.get(name, "").split("x")
        return parts[axis] if len(parts) > axis and parts[axis] else default

    size, kernel, out = sizes
    stride, low = int(stated("stride", "1")), int(stated("pad", "0_0").split("_")[0])
    spread, dilation = int(stated("lhs_dilate", "1")), int(stated("rhs_dilate", "1"))
    if stride == spread == dilation == 1 and low == 0 and out + kernel - 1 <= size:
        return kernel * out
    pairs = 0
    for tap in range(kernel):
        # Output o reads position o*stride + tap*dilation - low of the spread-out input; data sits at multiples of
        # `spread` below size*spread.
        offset, span = tap * dilation - low, (size - 1) * spread
        if stride % spread == 0:
            if offset % spread == 0:
                first = max(0, -(offset // stride)) if stride else 0
                last = min(out - 1, (span - offset) // stride)
                pairs += max(0, last - first + 1)
        else:
            pairs += sum(0 <= o * stride + offset <= span and (o * stride + offset) % spread == 0 for o in range(out))
    return pairs
