"""Reads the text of a compiled program: computations, instructions, shapes, and how often each one runs.

XLA's own cost analysis counts a loop body once. Here every computation gets the number of times that a step executes
it: trip counts come from `known_trip_count` where XLA wrote one (CPU, GPU), else from the loop itself (TPU): the
condition compares an element of the carried tuple with a constant, the body adds a constant to it.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

# Bits per element. Tokens and opaque values hold no data.
_BITS = {
    "pred": 8, "s1": 1, "u1": 1, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64, "c128": 128,
    "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3fn": 8, "f8e4m3b11fnuz": 8, "f8e4m3fnuz": 8, "f8e5m2": 8,
    "f8e5m2fnuz": 8, "f8e8m0fnu": 8, "token": 0, "opaque": 0,
}  # fmt: skip
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result.

    Attributes:
      dtype: As XLA writes it, "bf16".
      dims: Shape on one device.
      padded: Shape in memory, after tiling (TPU tiles are 8x128 or larger: a narrow array is mostly padding).
      space: Memory space; 0 is the main memory of the device, others are on the chip (1) or the host (5).
    """

    dtype: str
    dims: tuple[int, ...]
    padded: tuple[int, ...]
    space: int

    @property
    def bytes(self) -> int:
        """Bytes of the elements."""
        return -(-math.prod(self.dims) * _BITS.get(self.dtype, 32) // 8)

    @property
    def memory_bytes(self) -> int:
        """Bytes in memory, padding included."""
        return -(-math.prod(self.padded) * _BITS.get(self.dtype, 32) // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Name, unique in its computation.
      opcode: "all-gather", "fusion", ...
      arrays: Arrays of the result, tuples flattened.
      operands: Names of the operands; for a constant or a parameter the text between the parentheses.
      attributes: Everything after the operands.
      root: Whether it is the result of its computation.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, *kinds: str) -> list[str]:
        """Names of the computations in these attributes ("calls", "body", ...)."""
        found = [name for kind, name in _CALLED.findall(self.attributes) if kind in kinds]
        if "branches" in kinds and (match := _BRANCHES.search(self.attributes)):
            found += [name.strip().lstrip("%") for name in match.group(1).split(",")]
        return found

    @property
    def label(self) -> str:
        """Where it comes from in the user's program, else its name."""
        match = re.search(r'op_name="([^"]+)"', self.attributes)
        return match.group(1) if match else self.name

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(array.bytes for array in self.arrays)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A function of the program: its instructions in order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions of the computation by their names."""
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Instructions that read each instruction."""
        found: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                if operand in found:
                    found[operand].append(instruction)
        return found

    @property
    def root(self) -> Instruction:
        """The instruction whose value the computation returns."""
        return next((i for i in self.instructions if i.root), self.instructions[-1])

    def parameter(self, index: int) -> Instruction | None:
        """The parameter of this number."""
        return next((i for i in self.instructions if i.opcode == "parameter" and i.operands == (str(index),)), None)


@dataclasses.dataclass(frozen=True)
class Execution:
    """A computation and how often a step runs it on one device.

    Attributes:
      computation: Which.
      count: Times; a loop whose trip count cannot be read counts once.
      known: Whether every loop around it had a readable trip count.
      fused: Whether it is the inside of a fusion, whose values never reach memory.
    """

    computation: Computation
    count: int
    known: bool
    fused: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program: its computations, and which of them is run."""

    computations: dict[str, Computation]
    entry: str

    def executions(self) -> Iterator[Execution]:
        """Every computation that runs, once per place that calls it. All branches of a conditional are counted."""
        yield from self._walk(self.computations[self.entry], 1, known=True, fused=False)

    def _walk(self, computation: Computation, count: int, *, known: bool, fused: bool) -> Iterator[Execution]:
        yield Execution(computation, count, known, fused)
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                trips = trip_count(self, computation, instruction)
                inner = (instruction.called("body"), count * (1 if trips is None else trips), trips is not None)
            elif instruction.opcode == "fusion":
                inner = (instruction.called("calls"), count, True)
            elif instruction.opcode in ("call", "call-start", "async-start", "conditional"):
                # A custom-call's to_apply and the reducers of reduce, scatter, sort and all-reduce are not of interest.
                kinds = ("calls", "to_apply", "true_computation", "false_computation", "branches")
                inner = (instruction.called(*kinds), count, True)
            else:
                continue
            for name in inner[0]:
                yield from self._walk(
                    self.computations[name],
                    inner[1],
                    known=known and inner[2],
                    fused=fused or instruction.opcode == "fusion",
                )


def parse(text: str | None) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
      ValueError: the text holds no entry computation, or the compiler shows none.
    """
    if text is None:
        raise ValueError("hlo: this compiler does not show its programs as text.")
    computations: dict[str, Computation] = {}
    entry = None
    name, lines = None, []
    for line in text.splitlines():
        if name is None:
            match = re.match(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->\s*.*)?\{\s*$", line)
            if match and not line.startswith("HloModule"):
                name, lines = match.group(2), []
                entry = name if match.group(1) else entry
        elif line.rstrip() == "}" or line.startswith("}, execution_thread="):  # of a SparseCore
            computations[name] = Computation(name, tuple(filter(None, map(_instruction, lines))))
            name = None
        elif lines and not line.startswith(" "):  # the metadata of a kernel are JSON over several lines
            lines[-1] += line
        else:
            lines.append(line)
    if entry is None:
        raise ValueError("parse: text must be the HLO of a compiled program; it has no ENTRY computation.")
    return Module(computations, entry)


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Times that the body of a while loop runs; None if the program does not say."""
    match = re.search(r'"?known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)', loop.attributes)
    if match:
        return int(match.group(1))
    carry = _Frame(module, module.computations[loop.called("condition")[0]], None)
    test = carry.value(carry.computation.root.name)
    if not isinstance(test, _Compared) or not isinstance(test.left, _Carried):
        return None
    outside = _Frame(module, caller, None, inside_loop=False)
    inside = _Frame(module, module.computations[loop.called("body")[0]], None)
    body_root = inside.computation.root.name
    index, limit = test.left.index, test.right
    start, step = outside.element(loop.operands[0], index), inside.element(body_root, index)
    if isinstance(limit, _Carried) and inside.element(body_root, limit.index) == _Carried(limit.index, 0):
        carried = outside.element(loop.operands[0], limit.index)  # a limit that the loop carries unchanged
        limit = carried + limit.offset if isinstance(carried, int) else None
    if (
        not isinstance(step, _Carried)
        or step.index != index
        or not isinstance(start, int)
        or not isinstance(limit, int)
    ):
        return None
    distance = limit - start - test.left.offset
    if step.offset > 0 and test.direction in ("LT", "LE", "NE"):
        return max(0, -(-(distance + (test.direction == "LE")) // step.offset))
    if step.offset < 0 and test.direction in ("GT", "GE", "NE"):
        return max(0, -(-(-distance + (test.direction == "GE")) // -step.offset))
    return None


@dataclasses.dataclass(frozen=True)
class _Carried:
    """Element `index` of the carried tuple plus `offset`."""

    index: int
    offset: int


@dataclasses.dataclass(frozen=True)
class _Compared:
    left: "_Value"
    right: "_Value"
    direction: str


_Value = int | _Carried | _Compared | None


class _Frame:
    """Integer arithmetic in one call of a computation; None for whatever is not that. Reads only what is asked for."""

    def __init__(
        self,
        module: Module,
        computation: Computation,
        call: "tuple[_Frame, Instruction] | None",
        *,
        inside_loop: bool = True,
    ) -> None:
        self.module, self.computation, self.call = module, computation, call
        self.inside_loop = inside_loop
        self.values: dict[tuple[str, int | None], _Value] = {}

    def value(self, name: str) -> _Value:
        """An instruction that is no tuple."""
        return self._cached(name, None)

    def element(self, name: str, index: int) -> _Value:
        """One element of an instruction that is a tuple."""
        return self._cached(name, index)

    def _cached(self, name: str, index: int | None) -> _Value:
        if (name, index) not in self.values:
            self.values[name, index] = None  # a cycle cannot occur; a deep chain is read once
            instruction = self.computation.by_name.get(name)
            self.values[name, index] = None if instruction is None else self._evaluate(instruction, index)
        return self.values[name, index]

    def _evaluate(self, instruction: Instruction, index: int | None) -> _Value:
        operands = instruction.operands
        match instruction.opcode:
            case "constant":
                return int(operands[0]) if re.fullmatch(r"-?\d+", operands[0]) else None
            case "parameter":
                if self.call is not None:
                    frame, caller = self.call
                    return frame._cached(caller.operands[int(operands[0])], index)
                return _Carried(index, 0) if self.inside_loop and index is not None else None
            case "copy" | "convert" | "bitcast" | "reshape" | "optimization-barrier" | "copy-done" | "copy-start":
                return self._cached(operands[0], index)
            case "tuple":
                return None if index is None else self.value(operands[index])
            case "get-tuple-element":
                found = re.search(r"\bindex=(\d+)", instruction.attributes)
                return self.element(operands[0], int(found.group(1))) if found and index is None else None
            case "add" | "subtract":
                return _sum(self.value(operands[0]), self.value(operands[1]), subtract=instruction.opcode == "subtract")
            case "compare":
                found = re.search(r"\bdirection=(\w+)", instruction.attributes)
                return _compare(self.value(operands[0]), self.value(operands[1]), found.group(1)) if found else None
            case "fusion" | "call":
                inner = self.module.computations[instruction.called("calls", "to_apply")[0]]
                return _Frame(self.module, inner, (self, instruction))._cached(inner.root.name, index)
            case _:
                return None


def _sum(left: _Value, right: _Value, *, subtract: bool) -> _Value:
    sign = -1 if subtract else 1
    if isinstance(left, int) and isinstance(right, _Carried) and not subtract:
        left, right = right, left
    if not isinstance(right, int):
        return None
    if isinstance(left, int):
        return left + sign * right
    return _Carried(left.index, left.offset + sign * right) if isinstance(left, _Carried) else None


def _compare(left: _Value, right: _Value, direction: str) -> _Compared:
    if isinstance(left, int):
        mirrored = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}
        return _Compared(right, left, mirrored.get(direction, direction))
    return _Compared(left, right, direction)


def _instruction(line: str) -> Instruction | None:
    match = re.match(r"\s+(ROOT\s+)?%?([\w.\-]+) = ", line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    if opcode is None:
        return None
    opened = end + opcode.end() - 1
    closed = _closing(rest, opened)
    inside = re.sub(r"/\*.*?\*/", "", rest[opened + 1 : closed])
    if opcode.group(1) in ("constant", "parameter"):
        operands: tuple[str, ...] = (inside.strip(),)
    else:
        # An operand may stand with or without its shape before it.
        operands = tuple(part.split()[-1].lstrip("%") for part in _split(inside) if part.strip())
    return Instruction(
        match.group(2), opcode.group(1), _arrays(rest[:end]), operands, rest[closed + 1 :], bool(match.group(1))
    )


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`."""
    depth = 0
    for index in range(start, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    return len(text) - 1


def _split(text: str) -> list[str]:
    """Cuts at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        if char in "({[":
            depth += 1
        elif char in ")}]":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]


def _arrays(text: str) -> tuple[Array, ...]:
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        if dtype not in _BITS:
            continue
        shape = tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d)
        space = re.search(r"S\((\d+)\)", layout)
        found.append(Array(dtype, shape, _padded(shape, layout), int(space.group(1)) if space else 0))
    return tuple(found)


def _padded(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    match = re.match(r"([\d,]*):(?:[A-Z]\w*\([^)]*\))*?T\(([\d,]+)\)", layout)
    if match is None or not shape:
        return shape
    minor_to_major = [int(d) for d in match.group(1).split(",") if d]
    padded = list(shape)
    tile = [int(t) for t in match.group(2).split(",")]
    for axis, size in zip(minor_to_major, reversed(tile), strict=False):
        padded[axis] = -(-padded[axis] // size) * size
    return tuple(padded)
