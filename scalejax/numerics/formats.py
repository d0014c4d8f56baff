"""Formats of blocks, as data: the family of block data representations, and the OCP formats beside it.

Along one axis, k1 values share a scale of d1 bits; inside, k2 values share a second scale of d2 bits; each number
keeps an element. Kinds of scales:

    scale        "exponent"  2^E in d1 bits, biased; E8M0 for d1 = 8        MX, MSFP, OCP
                 "float32"   largest magnitude / largest element            INT and FP8 with a scale in software
                 "e4m3"      E4M3 times one float32 for the whole tensor    NVFP4
    sub_scale    "none"
                 "exponent"  2^-tau, tau in d2 bits: a microexponent        MX9, MX6, MX4
                 "integer"   0 to 2^d2 - 1 parts of the float32 scale       VSQ

Two different things are called MX. `bdr_mx9`, `bdr_mx6`, `bdr_mx4` are those of the ISCA paper (blocks of 16, pairs
share a bit), `mxfp8_e4m3` ... `mxint8` those of the Open Compute Project (blocks of 32, elements on their own).

    bits per element = element.bits + d1 / k1 + d2 / k2

Source: Rouhani et al., "With Shared Microexponents, A Little Shifting Goes a Long Way", ISCA 2023;
OCP Microscaling Formats (MX) v1.0. The sizes of INT, FP8 and VSQ are chosen here; `dataclasses.replace(format, k1=...)`
gives others.
"""

import dataclasses
import difflib
import math
from typing import Literal, get_args

from scalejax.errors import UserError
from scalejax.numerics import elements
from scalejax.numerics.elements import Element

Scale = Literal["exponent", "float32", "e4m3"]
SubScale = Literal["none", "exponent", "integer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """A format of blocks; see above.

    Attributes:
      name: by which `find` knows it, or any other.
      element: of each number.
      k1: values that share a scale.
      scale: its kind.
      d1: its bits.
      k2: values that share a second scale; k1 where there is none.
      sub_scale: the kind of the second scale.
      d2: its bits; 0 where there is none.
    """

    name: str
    element: Element
    k1: int
    scale: Scale = "exponent"
    d1: int = 8
    k2: int
    sub_scale: SubScale = "none"
    d2: int = 0

    def __post_init__(self) -> None:
        def refuse(what: str) -> None:
            raise UserError(f"BlockFormat {self.name}: {what}")

        if self.k1 < 1 or self.k2 < 1 or self.k1 % self.k2:
            refuse(f"k1 must be a multiple of k2, both positive; got k1={self.k1}, k2={self.k2}.")
        if self.element.bits < 2 or self.element.bits > 16:
            refuse(f"elements must have 2 to 16 bits; got {self.element.name} with {self.element.bits}.")
        if self.element.encoding == "unsigned" or self.element.max_code >> (self.element.bits - 1):
            refuse(
                f"elements must have room for a sign above max_code; got {self.element.name}, {self.element.encoding}, "
                f"of {self.element.bits} bits with max_code={self.element.max_code}."
            )
        for field, choices in (("scale", Scale), ("sub_scale", SubScale)):
            if getattr(self, field) not in get_args(choices):
                refuse(f"{field} must be one of {', '.join(get_args(choices))}; got {getattr(self, field)!r}.")
        widths = {"exponent": range(2, 9), "float32": (32,), "e4m3": (8,)}[self.scale]
        if self.d1 not in widths:
            refuse(f"a scale of kind {self.scale} has {' or '.join(map(str, widths))} bits; got d1={self.d1}.")
        if (self.sub_scale == "none") != (self.d2 == 0) or (self.sub_scale == "none" and self.k2 != self.k1):
            refuse(
                f"without a second scale k2 = k1 and d2 = 0, with one d2 is positive; got k1={self.k1}, k2={self.k2}, "
                f"d2={self.d2}, sub_scale={self.sub_scale!r}."
            )
        if self.d2 not in range(9):
            refuse(f"d2 must be at most 8; got {self.d2}.")
        if self.sub_scale == "exponent" and self.scale != "exponent":
            refuse(f"microexponents refine a scale of kind 'exponent'; got {self.scale!r}.")
        if self.sub_scale == "integer" and self.scale != "float32":
            refuse(f"integer scales refine a scale of kind 'float32'; got {self.scale!r}.")
        if self.scale == "e4m3" and self.element.max_count > 15:
            refuse(
                "a scale of kind 'e4m3' is found for elements of at most 4 significant bits; got "
                f"{self.element.name}. Take a scale of kind 'float32'."
            )
        if self.scale == "exponent":
            lowest = 1 - (1 << (self.d1 - 1)) - self.max_microexponent + self.element.step_exponent
            if lowest < -149:
                refuse(
                    f"its smallest step would be 2^{lowest}, and float32 ends at 2^-149. Take fewer magnitude bits or "
                    "a smaller d2."
                )

    @property
    def max_microexponent(self) -> int:
        """The paper's beta = 2^d2 - 1 for microexponents; 0 without."""
        return (1 << self.d2) - 1 if self.sub_scale == "exponent" else 0

    @property
    def bits_per_element(self) -> float:
        """Bits of storage an element, with scales; the float32 of a whole tensor is left out."""
        return self.element.bits + self.d1 / self.k1 + self.d2 / self.k2


def bdr(
    name: str | None = None,
    *,
    k1: int = 16,
    k2: int = 2,
    d1: int = 8,
    d2: int = 1,
    m: int,
    scale: Literal["exponent", "float32"] = "exponent",
) -> BlockFormat:
    """A member of the paper's family: sign and m magnitude bits under one or two levels of scales.

    Args:
      name: by default the values.
      k1: values a scale.
      k2: values a second scale; ignored without (d2 = 0).
      d1: bits of a scale of kind "exponent"; float32 has 32.
      d2: bits of the second scale: microexponents below "exponent", integers below "float32"; 0 for none.
      m: magnitude bits.
      scale: kind of the scale.
    """
    if m < 1:
        raise UserError(f"bdr: m must be at least 1 magnitude bit beside the sign; got {m}.")
    exponent = scale == "exponent"
    if not exponent:
        d1 = 32
    if d2 == 0:
        k2 = k1
    kind = "none" if d2 == 0 else "exponent" if exponent else "integer"
    return BlockFormat(
        name=name or f"bdr(k1={k1}, k2={k2}, d1={d1}, d2={d2}, m={m})",
        # In steps of 1 under a scale in software, as integer hardware has them.
        element=elements.signed_magnitude(m) if exponent else elements.integer(m + 1),
        k1=k1,
        scale=scale,
        d1=d1,
        k2=k2,
        sub_scale=kind,
        d2=d2,
    )


def _ocp(name: str, element: Element, *, k1: int = 32, scale: Scale = "exponent") -> BlockFormat:
    return BlockFormat(name=name, element=element, k1=k1, k2=k1, scale=scale)


def _fp8(name: str, element: Element) -> BlockFormat:
    return BlockFormat(name=name, element=element, k1=1024, k2=1024, scale="float32", d1=32)


FORMATS: dict[str, BlockFormat] = {
    format.name: format
    for format in (
        bdr("bdr_mx9", m=7),
        bdr("bdr_mx6", m=4),
        bdr("bdr_mx4", m=2),
        bdr("msfp16", m=7, d2=0),
        bdr("msfp12", m=3, d2=0),
        bdr("int8", m=7, k1=1024, d2=0, scale="float32"),
        bdr("int4", m=3, k1=1024, d2=0, scale="float32"),
        bdr("int2", m=1, k1=1024, d2=0, scale="float32"),
        bdr("vsq8", m=7, k1=1024, k2=16, d2=8, scale="float32"),
        bdr("vsq6", m=5, k1=1024, k2=16, d2=6, scale="float32"),
        bdr("vsq4", m=3, k1=1024, k2=16, d2=4, scale="float32"),
        _fp8("fp8_e4m3", elements.E4M3),
        _fp8("fp8_e5m2", elements.E5M2),
        _ocp("mxfp8_e4m3", elements.E4M3),
        _ocp("mxfp8_e5m2", elements.E5M2),
        _ocp("mxfp6_e2m3", elements.E2M3),
        _ocp("mxfp6_e3m2", elements.E3M2),
        _ocp("mxfp4_e2m1", elements.E2M1),
        _ocp("mxint8", elements.INT8),
        _ocp("nvfp4", elements.E2M1, k1=16, scale="e4m3"),
    )
}


def find(format: str | BlockFormat) -> BlockFormat:
    """The format of a name; a BlockFormat is itself.

    A colon and a number behind the name of a format with float32 scales are another size of its blocks: "int4:128".

    Raises:
      UserError: no such name; the nearest ones are listed. Or its blocks cannot have that size.
    """
    if isinstance(format, BlockFormat):
        return format
    if not isinstance(format, str):
        raise UserError(f"format: must be a BlockFormat or the name of one; got {format!r}.")
    if format in FORMATS:
        return FORMATS[format]
    name, colon, size = format.partition(":")
    if colon and name in FORMATS:
        return _resized(FORMATS[name], size)
    # Both kinds of MX where someone asks for one by half its name, as "mx6".
    wanted = format.lower().replace("-", "_")
    near = [name for name in FORMATS if wanted and wanted in name]
    near += [name for name in difflib.get_close_matches(wanted, FORMATS, n=4, cutoff=0.5) if name not in near]
    listed = f"the nearest are {', '.join(near)}" if near else f"there are {', '.join(FORMATS)}"
    raise UserError(f"format: there is no {format!r}; {listed}.")


def _resized(format: BlockFormat, size: str) -> BlockFormat:
    if format.scale != "float32":
        raise UserError(f"format: blocks of {format.name} have {format.k1} values, always; got {format.name}:{size}.")
    # Codes and second scales of a block fill whole bytes.
    step = math.lcm(8, 1 if format.sub_scale == "none" else format.k2 * 8 // math.gcd(format.d2, 8))
    if not size.isdecimal() or int(size) < 1 or int(size) % step:
        raise UserError(
            f"format: blocks of {format.name} can have any multiple of {step} values; got {format.name}:{size}."
        )
    k1 = int(size)
    k2 = format.k2 if format.sub_scale != "none" else k1
    return dataclasses.replace(format, name=f"{format.name}:{k1}", k1=k1, k2=k2)
