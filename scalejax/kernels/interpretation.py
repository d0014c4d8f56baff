"""Running a kernel for a TPU where there is none."""

from jax.experimental.pallas import tpu as pltpu

Interpret = bool | pltpu.InterpretParams
"""Whether it is interpreted, and how; Pallas takes long to import, so interfaces name this for type checkers alone."""
