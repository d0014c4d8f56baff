"""Slices of TPUs that are not here: their names, their devices, and meshes over them.

A topology is written `CHIP:AxB[xC]`, with `,slices=N` for several slices joined by the data-center network:

    v5e:4x4      v5p:2x2x1      v6e:16x16      tpu7x:4x4x4      v5p:4x8x8,slices=2

The shape counts chips. libtpu, the TPU compiler, turns a name into devices that can be compiled for but not run on.
"""

import dataclasses
import difflib
import glob
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scalejax import chips
from scalejax.chips import Chip
from scalejax.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

    from scalejax.parallel.mesh import MeshShape

_ALIASES = {"7x": "tpu7x", "v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e", "v5litepod": "v5e", "v5lite": "v5e"}
# libtpu asks its environment who and where it is; none of this need be true when it only compiles.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # else it queries a metadata server
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else one process of the machine at a time
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of one kind of chip.

    Attributes:
      chip: What each chip can do.
      shape: Chips along each axis of a slice.
      slices: Number of slices.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def name(self) -> str:
        """The topology as it is written."""
        text = f"{self.chip.name}:{'x'.join(map(str, self.shape))}"
        return text if self.slices == 1 else f"{text},slices={self.slices}"

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Devices that jax shows for them."""
        return self.chips * self.chip.devices_per_chip


def parse(text: str) -> Topology:
    """Reads a topology.

    Raises:
      UserError: the form, the chip or the shape is wrong; the message names valid ones that are near.
    """
    match = re.fullmatch(r"\s*([A-Za-z0-9]+):(\d+(?:x\d+)*)(?:,slices=(\d+))?\s*", text)
    if match is None:
        raise UserError(
            f"topology: must look like v5e:4x4, v5p:2x2x1 or v5p:4x8x8,slices=2 (chip, chips along each axis); "
            f"got {text!r}. {_guess(text)}"
        )
    name, dims, slices = match.group(1).lower(), match.group(2), int(match.group(3) or 1)
    name = _ALIASES.get(name, name)
    if name not in chips.TPUS:
        near = difflib.get_close_matches(name, chips.TPUS, n=2, cutoff=0.3) or sorted(chips.TPUS)
        raise UserError(
            f"topology: chip must be one of {', '.join(sorted(chips.TPUS))}; got {name!r} in {text!r}. "
            f"Try {' or '.join(f'{n}:{chips.TPUS[n].shapes[1]}' for n in near)}."
        )
    chip, shape = chips.TPUS[name], tuple(int(d) for d in dims.split("x"))
    if len(shape) != chip.link_axes or min(shape) < 1 or math.prod(shape) > chip.pod_chips or slices < 1:
        raise UserError(
            f"topology: {chip.name} is a {chip.link_axes}D torus of at most {chip.pod_chips} chips, so its shape has "
            f"{chip.link_axes} positive sizes, and slices is at least 1; got {text!r}. {_nearest(chip, shape)}"
        )
    return Topology(chip, shape, slices)


def default_mesh(topology: Topology) -> "MeshShape":
    """All devices of a slice on `fsdp`, slices on `replica`."""
    from scalejax.parallel.mesh import MeshShape

    return MeshShape(replica=topology.slices, fsdp=topology.devices // topology.slices)


def abstract_devices(topology: Topology) -> list[Any]:
    """Devices of a topology: good for compiling, not for running.

    Raises:
      UserError: libtpu is missing or is not the one that this jax works with, or libtpu does not know the topology.
    """
    check_libtpu()
    _quiet_libtpu()
    from jax.experimental import topologies

    options: dict[str, int | list[int]] = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if math.prod(topology.shape) == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]  # the default host block has four chips
    name = f"{topology.chip.name}:{'x'.join(map(str, topology.shape))}"
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:  # libtpu reports a bad topology as a plain runtime error
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"topology: libtpu does not know {topology.name!r} ({reason}). {_nearest(topology.chip, topology.shape)}"
        ) from error
    return list(found)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceLayout:
    """Where the devices of a mesh lie: as much of a `Mesh` as collectives are timed by.

    Attributes:
      devices: NumPy array of devices, one axis per name.
      axis_names: Mesh axes.
    """

    devices: "np.ndarray"
    axis_names: tuple[str, ...]

    @property
    def shape(self) -> dict[str, int]:
        """The number of devices along each mesh axis."""
        return dict(zip(self.axis_names, self.devices.shape, strict=True))

    @property
    def size(self) -> int:
        """The number of all devices."""
        return self.devices.size


def stand_in_devices(topology: Topology) -> list[types.SimpleNamespace]:
    """Devices that have a place and nothing else: good for arithmetic, without libtpu."""
    coordinates = itertools.product(*(range(size) for size in reversed(topology.shape)))
    places = [tuple(reversed(c)) + (0,) * (3 - len(topology.shape)) for c in coordinates]
    places = [(c, core) for c in places for core in range(topology.chip.devices_per_chip)]
    return [
        types.SimpleNamespace(
            id=index * len(places) + number,
            platform="tpu",
            device_kind=topology.chip.device_kind,
            process_index=0,
            coords=coords,
            core_on_chip=core,
            slice_index=index,
        )
        for index in range(topology.slices)
        for number, (coords, core) in enumerate(places)
    ]


def lay_out(topology: Topology, shape: "MeshShape | None" = None) -> tuple[DeviceLayout, list[str]]:
    """What `make_mesh` gives, on stand-ins: needs no libtpu.

    Raises:
      UserError: as `make_mesh`.
    """
    from scalejax.parallel.mesh import AXES

    grid, warnings = _arrange(topology, shape, stand_in_devices(topology))
    return DeviceLayout(grid, AXES), warnings


def make_mesh(topology: Topology, shape: "MeshShape | None" = None) -> "tuple[Mesh, list[str]]":
    """A mesh over a topology, all axes Auto, and warnings about how it lies on the torus.

    Slices are the outer part of `replica`, so that only that axis crosses the data-center network.

    Raises:
      UserError: the sizes do not multiply to the devices, or `replica` does not hold the slices.
    """
    from jax.sharding import AxisType, Mesh

    from scalejax.parallel.mesh import AXES

    grid, warnings = _arrange(topology, shape, abstract_devices(topology))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES)), warnings


def _arrange(topology: Topology, shape: "MeshShape | None", devices: Sequence[Any]) -> "tuple[np.ndarray, list[str]]":
    """Devices in the shape of the mesh, and warnings."""
    import numpy as np
    from jax.experimental import mesh_utils

    from scalejax.parallel.mesh import AXES

    try:
        sizes = (shape or default_mesh(topology)).resolve(topology.devices)
    except UserError as error:
        stated = ", ".join(f"{axis}={getattr(shape, axis)}" for axis in AXES if getattr(shape, axis) != 1)
        raise UserError(
            f"mesh: the sizes must multiply to the {topology.devices} devices of {topology.name} "
            f"({topology.chips} chips); got {stated or 'all sizes 1'}. Try fsdp={topology.devices}."
        ) from error
    if sizes[0] % topology.slices:
        raise UserError(
            f"mesh: replica must be a multiple of the {topology.slices} slices, the only axis that may cross the "
            f"network between them; got replica={sizes[0]}. Try replica={topology.slices}."
        )
    inner = (sizes[0] // topology.slices, *sizes[1:])
    warnings: list[str] = []
    blocks = []
    for index in range(topology.slices):
        block = [d for d in devices if topology.slices == 1 or getattr(d, "slice_index", 0) == index]
        try:
            blocks.append(mesh_utils.create_device_mesh(inner, block))
        except (NotImplementedError, ValueError):
            # A logical axis that is no product of whole physical axes: neighbours in the mesh are then not always
            # neighbours on the torus.
            blocks.append(mesh_utils.create_device_mesh(inner, block, allow_split_physical_axes=True))
            if not warnings:
                stated = ", ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True) if s > 1)
                warnings.append(
                    f"mesh {stated} splits a physical axis of {topology.name}: some neighbours in the mesh are more "
                    "than one link apart, so collectives are slower than predicted. Sizes that are products of whole "
                    f"axes ({'x'.join(map(str, topology.shape))}) avoid this."
                )
    return np.concatenate(blocks, axis=0), warnings


def _quiet_libtpu() -> None:
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return  # a machine with TPUs: libtpu must find out the truth about it
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_libtpu() -> None:
    """Raises UserError where no program can be compiled for TPUs: says what to install."""
    if "TPU_LIBRARY_PATH" in os.environ:
        return  # the user chose a library by hand
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "plan: needs libtpu, the TPU compiler, which is not installed. "
            "Install it with: pip install 'scalejax[plan]' (about 215 MB; no TPU is needed)."
        )
    try:
        version = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return  # put there by hand or by a nightly package of another name
    wanted = libtpu_wanted()
    if wanted is not None and not version.startswith(wanted.rstrip("*")):
        raise UserError(
            f"plan: jax {importlib.metadata.version('jax')} works with libtpu {wanted}; got libtpu {version}. Other "
            f"pairs fail on larger programs. Install the right one: pip install 'libtpu=={wanted}'."
        )


def libtpu_wanted() -> str | None:
    """The libtpu that the installed jax pins, such as "0.0.42.*"; None if it pins none."""
    for line in importlib.metadata.requires("jax") or ():
        match = re.match(r"libtpu\s*\(?==\s*([\d.]+\*?)", line)
        if match:
            return match.group(1)
    return None


def _nearest(chip: Chip, shape: tuple[int, ...]) -> str:
    size = math.prod(shape)
    near = sorted(chip.shapes, key=lambda s: abs(math.log(math.prod(map(int, s.split("x"))) / max(size, 1))))[:3]
    return f"Near and valid: {', '.join(f'{chip.name}:{s}' for s in near)}."


def _guess(text: str) -> str:
    """Turns the accelerator names of the cloud, v6e-8, into topologies."""
    match = re.fullmatch(r"\s*([A-Za-z0-9]+)-(\d+)\s*", text)
    if match is None:
        return "Try v5e:4x4."
    name = _ALIASES.get(match.group(1).lower(), match.group(1).lower())
    if name not in chips.TPUS:
        return "Try v5e:4x4."
    count = int(match.group(2)) // (2 if name == "v5p" else 1)  # v5p names count TensorCores, two a chip
    return _nearest(chips.TPUS[name], (count,))
