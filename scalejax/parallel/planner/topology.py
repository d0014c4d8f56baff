"""The machine as a planner sees it: devices in hosts, what a device holds, and how fast bytes move.

Rates are bytes a second of one device. They begin as data-sheet peaks (`scalejax.plan.planner_machines` builds
topologies from the chip table); `Constants`, measured on the machine itself, replace any of them:

    topology = topology.with_constants(Constants.load("h200.json"))
"""

import dataclasses
import json
import pathlib

from scalejax import json_reading
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constants:
    """Measured rates. What is None keeps the value that the topology has.

    Attributes:
      device: Device they were measured on.
      date: When, YYYY-MM-DD.
      memory_bandwidth: Bytes/s that gathers and updates of rows reach.
      row_granule_bytes: Smallest piece of memory that is fetched: shorter rows cost as much.
      occurrence_s: Seconds that an id costs besides the bytes it moves.
      intra_host_bandwidth: Bytes/s that a device sends to the others of its host in an exchange.
      inter_host_bandwidth: Bytes/s that a device sends to other hosts.
    """

    device: str
    date: str
    memory_bandwidth: float | None = None
    row_granule_bytes: int | None = None
    occurrence_s: float | None = None
    intra_host_bandwidth: float | None = None
    inter_host_bandwidth: float | None = None

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Constants":
        """Reads what `save` wrote.

        Raises:
          UserError: the file cannot be read, is no JSON object, lacks device or date, or has a field of another name
            or type.
        """
        try:
            found = json_reading.read(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"Constants: cannot read {path} as JSON ({error}). Give a file that save() wrote."
            ) from error
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(found, dict) or set(found) - known or not {"device", "date"} <= set(found):
            given = sorted(found) if isinstance(found, dict) else type(found).__name__
            raise UserError(
                f"Constants: {path} must hold an object with device, date and any of {', '.join(sorted(known))}; "
                f"got {given}. Correct the names."
            )
        for name, value in found.items():
            wanted = str if name in ("device", "date") else (int, float, type(None))
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise UserError(f"Constants: {name} in {path} has the wrong type; got {value!r}. Give a number.")
        return cls(**found)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes them as a JSON object."""
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTopology:
    """Hosts of equally many equal devices. Device d is number d mod devices_per_host of host d div devices_per_host.

    A "host" is a group of devices with fast links between them: an NVLink domain, a TPU host, or a whole TPU slice
    where several slices are joined by a slower network.

    Attributes:
      devices: Number of devices over which tables are sharded.
      devices_per_host: Divides `devices`.
      memory_bytes: Memory of a device that tables, their optimizer states and exchanges may take: what the dense part
        of the model needs is no longer in it.
      memory_bandwidth: Bytes/s.
      intra_host_bandwidth: Bytes/s from a device to the others of its host, one direction.
      inter_host_bandwidth: Bytes/s from a device to other hosts, one direction.
      row_granule_bytes: Smallest piece of memory that is fetched.
      occurrence_s: Seconds that an id costs besides the bytes it moves.
      devices_per_group: Devices that share an index of the mesh axis `replica`, which is what the kinds that stay in
        one host stay in (`embedding.plan`); divides `devices`. None = those of a host.
      name: For reports.
      source: Where the rates come from, for reports.
    """

    devices: int
    devices_per_host: int
    memory_bytes: int
    memory_bandwidth: float
    intra_host_bandwidth: float
    inter_host_bandwidth: float
    row_granule_bytes: int = 64
    occurrence_s: float = 0.0
    devices_per_group: int | None = None
    name: str = "devices"
    source: str = "rates as given"

    def __post_init__(self) -> None:
        if self.devices < 1 or self.devices_per_host < 1 or self.devices % self.devices_per_host:
            raise UserError(
                "Topology: devices must be a positive multiple of devices_per_host; got "
                f"{self.devices} and {self.devices_per_host}. Give hosts of equal size."
            )
        if self.group_size < 1 or self.devices % self.group_size:
            raise UserError(
                f"Topology: devices_per_group must divide the {self.devices} devices; got {self.devices_per_group}. "
                "Give the devices that share an index of the mesh axis replica."
            )
        for field in ("memory_bytes", "memory_bandwidth", "intra_host_bandwidth", "inter_host_bandwidth"):
            if not getattr(self, field) > 0:
                raise UserError(
                    f"Topology: {field} must be positive; got {getattr(self, field)}. Give bytes or bytes/s."
                )
        if self.row_granule_bytes < 1 or not self.occurrence_s >= 0:
            raise UserError(
                "Topology: row_granule_bytes must be at least 1 and occurrence_s at least 0; got "
                f"{self.row_granule_bytes} and {self.occurrence_s}. Leave them out to go by bytes alone."
            )

    @property
    def hosts(self) -> int:
        """The number of hosts that the devices belong to."""
        return self.devices // self.devices_per_host

    @property
    def group_size(self) -> int:
        """Devices within which a table stays whose kind is bound to one host."""
        return self.devices_per_group or self.devices_per_host

    @property
    def groups(self) -> int:
        """Number of such groups."""
        return self.devices // self.group_size

    @property
    def exchange_s_per_byte(self) -> float:
        """Seconds for each byte that a device sends in an all_to_all, spread evenly over all devices.

        Of a byte, 1/N stays, (H - 1)/N goes to the host's other devices, (N - H)/N to other hosts; the two networks
        are taken one after the other.
        """
        n, h = self.devices, self.devices_per_host
        return (h - 1) / n / self.intra_host_bandwidth + (n - h) / n / self.inter_host_bandwidth

    @property
    def within_s_per_byte(self) -> float:
        """As `exchange_s_per_byte`, of an all_to_all over the devices of a group."""
        size, h = self.group_size, min(self.devices_per_host, self.group_size)
        return (h - 1) / size / self.intra_host_bandwidth + (size - h) / size / self.inter_host_bandwidth

    @property
    def between_s_per_byte(self) -> float:
        """As `exchange_s_per_byte`, of an all_to_all over the devices of one place in their groups."""
        near = max(1, self.devices_per_host // self.group_size)  # groups of a host
        inside, across = near - 1, self.groups - near
        return inside / self.groups / self.intra_host_bandwidth + across / self.groups / self.inter_host_bandwidth

    @property
    def gather_s_per_byte(self) -> float:
        """Seconds for each byte of the result of an all_gather over all devices.

        In two levels: the devices of a host fetch 1/H each of what other hosts have, (N - H)/N of all, and then hand
        each other the (H - 1)/H that each of them lacks.
        """
        n, h = self.devices, self.devices_per_host
        return (h - 1) / h / self.intra_host_bandwidth + (n - h) / (n * h) / self.inter_host_bandwidth

    def fetched_bytes(self, row_bytes: int) -> int:
        """Bytes of memory traffic for one row: whole granules."""
        return -(-row_bytes // self.row_granule_bytes) * self.row_granule_bytes

    def with_constants(self, constants: Constants) -> "HostTopology":
        """The same machine with measured rates in place of those it has."""
        found = dataclasses.asdict(constants)
        device, date = found.pop("device"), found.pop("date")
        measured = {name: value for name, value in found.items() if value is not None}
        left = sorted(set(found) - set(measured))
        rest = f"; {', '.join(left)}: {self.source}" if left else ""
        return dataclasses.replace(self, **measured, source=f"measured on {device}, {date}{rest}")
