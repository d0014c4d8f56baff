"""Registers and stack of the kernels in a program that was compiled for NVIDIA's GPUs, read from its machine code.

XLA hands out a compiled program in its own wrapping: records of Riegeli, compressed by Snappy, around protocol buffers
that hold the ELF files of CUDA's assembler. A kernel that spills registers has a stack.
"""

import re
import struct
from collections.abc import Iterator

_SIGNATURE = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"
_BLOCK, _HEADER = 1 << 16, 24  # of a Riegeli file: every so many bytes a header interrupts what it holds
_REGISTERS, _STACK = 0x2F, 0x12  # of .nv.info: EIATTR_REGCOUNT and EIATTR_MIN_STACK_SIZE


def resources(compiled) -> dict[str, tuple[int, int]]:
    """Kernel -> (registers of a thread, bytes of its stack).

    Raises:
      ValueError: the program holds no machine code where it is looked for.
    """
    wrapped = compiled.runtime_executable().serialize()
    blocks = (wrapped[at : at + _BLOCK] for at in range(wrapped.index(_SIGNATURE), len(wrapped), _BLOCK))
    plain = b"".join(block[_HEADER:] for block in blocks)
    for match in re.finditer(rb"s", plain):
        try:
            found = _decompressed(plain, match.end())
        except (IndexError, ValueError):
            continue
        if b"GpuExecutableProto" in found[:64]:
            return dict(_of_elf(found))
    raise ValueError("no machine code was found in the compiled program: its wrapping has changed")


def _number(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
        if shift > 28:
            raise ValueError("not a number")


def _decompressed(data: bytes, at: int) -> bytes:
    """The values of a chunk, behind the sizes of its records."""
    sizes, at = _number(data, at)
    at += sizes
    size, at = _number(data, at)
    again, at = _number(data, at)
    if size != again or size < 1000:
        raise ValueError("not a chunk")
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        length = tag >> 2
        if tag & 3 == 0:
            extra = max(0, length - 59)
            length = int.from_bytes(data[at : at + extra], "little") if extra else length
            out += data[at + extra : at + extra + length + 1]
            at += extra + length + 1
            continue
        width = (0, 1, 2, 4)[tag & 3]
        offset = int.from_bytes(data[at : at + width], "little") | ((tag >> 5) << 8 if width == 1 else 0)
        length = (length & 7) + 4 if width == 1 else length + 1
        at += width
        if not 0 < offset <= len(out):
            raise ValueError("not compressed by Snappy")
        for _ in range(length):
            out.append(out[-offset])
    return bytes(out)


def _of_elf(program: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    for match in re.finditer(rb"\x7fELF\x02\x01", program):
        elf = program[match.start() :]
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        size, count, strings = struct.unpack_from("<HHH", elf, 0x3A)
        sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + number * size) for number in range(count)]
        contents = [elf[section[4] : section[4] + section[5]] for section in sections]
        names = [_text(contents[strings], section[0]) for section in sections]
        symbols = next(number for number, section in enumerate(sections) if section[1] == 2)
        held: dict[tuple[int, int], int] = {}
        info, at = contents[names.index(".nv.info")], 0
        while at + 4 <= len(info):
            form, attribute, length = struct.unpack_from("<BBH", info, at)
            at += 4
            if form == 4:
                if attribute in (_REGISTERS, _STACK):
                    symbol, value = struct.unpack_from("<II", info, at)
                    held[attribute, symbol] = value
                at += length
        for (attribute, symbol), value in held.items():
            if attribute == _REGISTERS:
                (name,) = struct.unpack_from("<I", contents[symbols], symbol * sections[symbols][9])
                kernel = _text(contents[sections[symbols][6]], name)
                yield kernel, (value, held.get((_STACK, symbol), 0))


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
