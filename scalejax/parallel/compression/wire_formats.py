"""Names of the block formats in which arrays travel between devices; `parallel.compression.codec` makes bytes of them.

They are formats of `scalejax.numerics.formats`; behind a colon is the size of blocks. NVFP4 is none of them: its blocks
share a float32 with the whole array. Nothing here imports jax: plans and command lines read these names.
"""

from typing import Literal, get_args

from scalejax.errors import UserError

WireFormat = Literal[
    "bdr_mx9", "bdr_mx6", "bdr_mx4", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8",
    "fp8_e4m3", "fp8_e5m2", "int8:128", "int4:128", "int4:2048",
]  # fmt: skip
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)


def check_formats(owner: str, **formats: str | None) -> None:
    """Refuses names of formats in which nothing travels.

    Args:
      owner: Name of what has these fields, for the message.
      **formats: Field -> value.

    Raises:
      UserError: names the field.
    """
    for field, format in formats.items():
        if format is not None and format not in WIRE_FORMATS:
            raise UserError(f"{owner}: {field} must be one of {', '.join(WIRE_FORMATS)}, or None; got {format!r}.")
