"""Machines for the planner of embedding tables, by name, from the chip table.

    topology("v5p:4x4x4")        topology("v6e:8x16,slices=2")        topology("h100:16x8")      16 hosts of 8

Rates are data-sheet peaks; `Topology.with_constants` puts measured ones in their place.

TPU: on a torus any chip reaches any other by the links between chips, so both rates are those of an exchange over the
whole slice: limited by the links of a chip and, for an axis of k chips, by its middle, which half of all bytes cross:
8/k links' worth per chip if the axis closes to a ring, else 4/k. A host is a TPU host, or with several slices a slice,
and the network joins slices. A row of a table is fetched as whole lanes of 128 32-bit numbers.

GPU: a host is an NVLink domain; each GPU has its share of the network. HBM is read in bursts of 64 bytes.
"""

import dataclasses
import math
import re

from scalejax import chips
from scalejax.chips import Chip
from scalejax.errors import UserError
from scalejax.parallel.planner import HostTopology
from scalejax.plan import topology as tpus

_TPU_ROW_BYTES = 512
_GPU_BURST_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Gpus:
    """Hosts with GPUs of one kind.

    Attributes:
      chip: Each of them.
      hosts: How many.
      in_host: GPUs of a host.
    """

    chip: Chip
    hosts: int
    in_host: int

    @property
    def name(self) -> str:
        """As it is written."""
        return f"{self.chip.name}:{self.hosts}x{self.in_host}"

    @property
    def devices(self) -> int:
        """GPUs of all hosts."""
        return self.hosts * self.in_host


def find_gpus(name: str) -> Gpus | None:
    """The GPUs of a name; None = it names none.

    Raises:
      UserError: there would be none.
    """
    gpu = re.fullmatch(r"\s*([A-Za-z0-9-]+):(\d+)x(\d+)\s*", name)
    if gpu is None or gpu.group(1).lower() not in chips.GPUS:
        return None
    found = Gpus(chips.GPUS[gpu.group(1).lower()], int(gpu.group(2)), int(gpu.group(3)))
    if not found.devices:
        raise UserError(f"topology: hosts and GPUs of a host must be at least 1; got {name!r}. Try h100:2x8.")
    return found


def parse_tpus(name: str) -> tpus.Topology:
    """The TPUs of a name.

    Raises:
      UserError: it names none; the message says how GPUs are named, too.
    """
    try:
        return tpus.parse(name)
    except UserError as error:
        raise UserError(f"{error} GPUs: {', '.join(f'{known}:2x8' for known in chips.GPUS)} (hosts x GPUs).") from None


def topology(name: str, *, reserved_bytes: int = 0) -> HostTopology:
    """The machine of a name.

    Args:
      name: A TPU topology as `scalejax plan` takes it, or GPU:HOSTSxGPUS.
      reserved_bytes: Memory of a device that tables must leave to the rest of the program.
    Raises:
      UserError: no such machine, or nothing left for tables.
    """
    gpus = find_gpus(name)
    if gpus is not None:
        chip = gpus.chip
        return HostTopology(
            devices=gpus.devices,
            devices_per_host=gpus.in_host,
            memory_bytes=_left(chip.usable_hbm_bytes, reserved_bytes, name),
            memory_bandwidth=chip.hbm_bytes_per_s,
            intra_host_bandwidth=chip.link_bytes_per_s,
            inter_host_bandwidth=chip.dcn_bytes_per_s,
            row_granule_bytes=_GPU_BURST_BYTES,
            name=gpus.name,
            source="data-sheet peaks",
        )
    found = parse_tpus(name)
    chip, shape = found.chip, found.shape
    in_slice = found.devices // found.slices
    links = _exchange_bytes_per_s(chip, shape) / chip.devices_per_chip
    in_block = math.prod(min(axis, block) for axis, block in zip(shape, chip.host_block, strict=True))
    return HostTopology(
        devices=found.devices,
        devices_per_host=in_slice if found.slices > 1 else in_block * chip.devices_per_chip,
        memory_bytes=_left(chip.usable_hbm_bytes // chip.devices_per_chip, reserved_bytes, name),
        memory_bandwidth=chip.hbm_bytes_per_s / chip.devices_per_chip,
        intra_host_bandwidth=links,
        inter_host_bandwidth=chip.dcn_bytes_per_s / chip.devices_per_chip if found.slices > 1 else links,
        row_granule_bytes=_TPU_ROW_BYTES,
        name=found.name,
        source="data-sheet peaks",
    )


def _exchange_bytes_per_s(chip: Chip, shape: tuple[int, ...]) -> float:
    """Bytes/s that a chip sends when all send evenly to all others of the slice."""
    rings = [2 if chip.wraps(shape, axis) else 1 for axis in range(len(shape))]
    ends = sum(ring for ring, size in zip(rings, shape, strict=True) if size > 1)
    middle = min(4 * ring / size for ring, size in zip(rings, shape, strict=True))
    return chip.link_bytes_per_s * (min(ends, middle) if ends else 1)


def _left(usable: int, reserved: int, name: str) -> int:
    if not 0 <= reserved < usable:
        raise UserError(
            f"topology: reserved_bytes must lie in [0, {usable:,}), the memory of a device of {name}; got {reserved:,}."
        )
    return usable - reserved
