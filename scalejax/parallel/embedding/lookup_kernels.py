"""Which implementation of `kernels.embedding_bag` looks the rows of a stack up.

    xla          gathers of XLA, which has every case
    pallas_gpu   Triton kernels: rows of a bag are added up where they are read, and only their sums written
    pallas_tpu   row copies by DMA; bags are added up by XLA

None is the kernel on GPUs, where it takes the dtype of the tables, and XLA elsewhere. Gradients are summed by row and
rows updated by XLA under every name. Rows are equal to the bit by all of them. Sums of bags are those of XLA on a CPU
with "pallas_gpu" too, which adds rows in their order; XLA adds in another order on GPUs and TPUs.
"""

from collections.abc import Iterable
from typing import Literal, cast

from jax.sharding import Mesh

from scalejax.errors import UserError, check_one_of
from scalejax.kernels import gpu_choices
from scalejax.kernels.embedding_bag import blocks
from scalejax.parallel.embedding.plan.stacks import Stack

Implementation = Literal["xla", "pallas_gpu", "pallas_tpu"]

_PLATFORMS = {"pallas_gpu": "gpu", "pallas_tpu": "tpu"}


def platform_of(mesh: Mesh) -> str:
    """ "cpu", "gpu" or "tpu"."""
    found = mesh.devices.flat[0].platform
    return "gpu" if found in ("cuda", "rocm") else found


def choose(implementation: Implementation | None, stack: Stack, mesh: Mesh) -> Implementation:
    """What was named, or the one for these tables on these devices."""
    if implementation is not None:
        return implementation
    if platform_of(mesh) != "gpu" or stack.dtype.name not in blocks.GPU_TABLES:
        return "xla"
    return cast(Implementation, gpu_choices.order("embedding_bag", "embedding_bag")[0])


def check(implementation: Implementation | None, stacks: Iterable[Stack], mesh: Mesh) -> None:
    """Refuses a name that the devices or the tables do not suit.

    Raises:
      UserError: naming what was said, and what the devices have or a table is.
    """
    check_one_of("tables.implementation", implementation, (None, "xla", "pallas_gpu", "pallas_tpu"))
    if implementation in (None, "xla"):
        return
    wanted, platform = _PLATFORMS[implementation], platform_of(mesh)
    if platform != wanted:
        raise UserError(
            f"tables.implementation={implementation!r} is for devices of the platform {wanted!r}; these are of "
            f"{platform!r}. Leave it out, or use --set tables.implementation=xla, which every platform has."
        )
    for stack in stacks:
        name = stack.members[0].config.name
        if implementation == "pallas_gpu" and stack.dtype.name not in blocks.GPU_TABLES:
            raise UserError(
                f"tables.implementation='pallas_gpu' takes tables of {', '.join(blocks.GPU_TABLES)}; {name!r} is of "
                f"{stack.dtype.name}. Use --set tables.implementation=xla, or --set tables.dtype=float32."
            )
        if implementation == "pallas_tpu" and (stack.dtype.name != "float32" or stack.dim % 128):
            raise UserError(
                "tables.implementation='pallas_tpu' takes tables of float32 whose width on a device is a multiple of "
                f"128; {name!r} has rows of {stack.dim} in {stack.dtype.name} there. Use --set "
                "tables.implementation=xla."
            )
