"""The report of a plan: its costs and reasons, as tables for people and JSON for programs."""

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

from scalejax.parallel.embedding.plan.sharding_plan import Kind
from scalejax.parallel.planner.estimators import Seconds
from scalejax.parallel.planner.topology import HostTopology
from scalejax.parallel.towers import Partition
from scalejax.units import duration, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableReport:
    """One table.

    Attributes:
      table: Name.
      kind: As in `TablePlan`, like columns and ranks.
      columns: Number of column slices.
      ranks: Devices that hold a piece; None = all.
      bytes: Rows, optimizer state and id map on all devices.
      piece_bytes: Rows and optimizer state of one piece.
      piece_s: Seconds of a step for the owner of a piece.
      work_s: Seconds of all devices together.
      why: Why this kind.
    """

    table: str
    kind: Kind
    columns: int
    ranks: tuple[int, ...] | None
    bytes: int
    piece_bytes: int
    piece_s: float
    work_s: float
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """One device.

    Attributes:
      device: Its number in the group.
      seconds: Of a step.
      table_bytes: Rows, optimizer state and parts of id maps that it holds.
      padding_bytes: Unused: stacks are as long on every device as on the fullest.
      buffer_bytes: Exchanges and gradients, as on the fullest device.
    """

    device: int
    seconds: Seconds
    table_bytes: int
    padding_bytes: int
    buffer_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Bytes of tables, padding and buffers on the device."""
        return self.table_bytes + self.padding_bytes + self.buffer_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostReport:
    """One index of the mesh axis `replica`.

    Attributes:
      host: The index.
      towers: Numbers of the towers that lie there.
      devices: Its devices.
    """

    host: int
    towers: tuple[int, ...]
    devices: tuple[DeviceReport, ...]

    @property
    def max_s(self) -> float:
        """Seconds of a step of its busiest device."""
        return max(device.seconds.total for device in self.devices)

    @property
    def mean_s(self) -> float:
        """Seconds of a step of one of its devices on average."""
        return sum(device.seconds.total for device in self.devices) / len(self.devices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One proposal that the planner tried.

    Attributes:
      proposal: What it was.
      partitioner: Who placed the pieces.
      max_s: Seconds of the busiest device; None = it did not fit.
      reason: Why it did not fit.
    """

    proposal: str
    partitioner: str
    max_s: float | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a plan costs on a machine.

    Attributes:
      topology: The machine.
      batch_size: Examples of the global batch.
      tables: In the order in which they were given.
      devices: All devices.
      towers: Features of each tower, in the order of the hosts that they lie on; () = the plan has none.
      attempts: What was tried, in this order; empty for a plan that was only evaluated.
      lower_bound_s: No plan under the same constraints has a busiest device below this; None = not known.
      planner_s: Seconds that planning took; None = not planned here. Not part of `to_json`, which is deterministic.
    """

    topology: HostTopology
    batch_size: int
    tables: tuple[TableReport, ...]
    devices: tuple[DeviceReport, ...]
    towers: tuple[tuple[str, ...], ...] = ()
    attempts: tuple[Attempt, ...] = ()
    lower_bound_s: float | None = None
    planner_s: float | None = None

    @property
    def hosts(self) -> tuple[HostReport, ...]:
        """Indices of the mesh axis `replica`."""
        size, count = self.topology.group_size, self.topology.groups
        indices = Partition(towers=self.towers).on_hosts(count).indices if self.towers else ()
        return tuple(
            HostReport(
                host=host,
                towers=tuple(t for t, at in enumerate(indices) if at == host),
                devices=self.devices[host * size : (host + 1) * size],
            )
            for host in range(count)
        )

    @property
    def max_s(self) -> float:
        """Seconds of the busiest device: what planning makes small."""
        return max(device.seconds.total for device in self.devices)

    @property
    def mean_s(self) -> float:
        """Seconds of a device on average."""
        return sum(device.seconds.total for device in self.devices) / len(self.devices)

    @property
    def balance(self) -> float:
        """max_s / mean_s; 1 = all devices equally busy."""
        return self.max_s / self.mean_s if self.mean_s else 1.0

    @property
    def memory_bytes(self) -> int:
        """Memory of the fullest device."""
        return max(device.memory_bytes for device in self.devices)

    @property
    def fits(self) -> bool:
        """Whether every device has this memory."""
        return self.memory_bytes <= self.topology.memory_bytes

    def to_json(self) -> dict[str, object]:
        """Plain values, equal for equal input."""
        return {
            "topology": dataclasses.asdict(self.topology),
            "batch_size": self.batch_size,
            "max_s": self.max_s,
            "mean_s": self.mean_s,
            "balance": self.balance,
            "lower_bound_s": self.lower_bound_s,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "tables": [dataclasses.asdict(table) for table in self.tables],
            "devices": [
                dataclasses.asdict(device) | {"total_s": device.seconds.total, "memory_bytes": device.memory_bytes}
                for device in self.devices
            ],
            "towers": self.towers,
            "hosts": [
                {"host": host.host, "towers": host.towers, "max_s": host.max_s, "mean_s": host.mean_s}
                for host in self.hosts
            ],
            "attempts": [dataclasses.asdict(attempt) for attempt in self.attempts],
        }

    def render(self, console: "Console", most_rows: int = 40) -> None:
        """Prints it; of more than `most_rows` tables or devices the ones with most work, and says how many more."""
        from rich.markup import escape

        machine = self.topology
        console.print(
            f"[bold]{escape(machine.name)}[/bold]: {machine.devices} devices in {machine.hosts} hosts, "
            f"{self.batch_size:,} examples a step ({escape(machine.source)})"
        )
        kinds = Counter(table.kind for table in self.tables)
        console.print(
            f"{len(self.tables)} tables: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}"
        )
        console.print(self._tables(most_rows))
        console.print(self._devices(most_rows))
        if self.topology.groups > 1:
            console.print(self._hosts(most_rows))
        if self.attempts:
            console.print(self._attempts(most_rows))
        verdict = "[green]fits[/green]" if self.fits else "[red]does not fit[/red]"
        console.print(f"{verdict}: {size(self.memory_bytes)} of {size(machine.memory_bytes)} a device")
        bound = "" if self.lower_bound_s is None else f"; no plan can be below {duration(self.lower_bound_s)}"
        took = "" if self.planner_s is None else f"; planned in {duration(self.planner_s)}"
        console.print(
            f"busiest device {duration(self.max_s)} a step, mean {duration(self.mean_s)}, balance {self.balance:.3f}"
            f"{bound}{took}"
        )

    def _tables(self, most_rows: int) -> "Table":
        from rich.markup import escape

        names = ("table", "kind", "devices", "bytes", "a piece", "time of a piece", "time of all", "why")
        table = _new("Tables", names, left=("table", "kind", "devices", "why"))
        shown = sorted(self.tables, key=lambda line: -line.work_s)[:most_rows]
        for line in shown:
            table.add_row(
                escape(line.table),
                line.kind if line.columns == 1 else f"{line.kind} x{line.columns}",
                "all" if line.ranks is None else ranges(line.ranks),
                size(line.bytes),
                size(line.piece_bytes),
                duration(line.piece_s),
                duration(line.work_s),
                line.why,
            )
        _say_more(table, len(self.tables) - len(shown), len(names))
        return table

    def _devices(self, most_rows: int) -> "Table":
        names = ("device", "total", "lookup", "its exchange", "update", "its exchange", "tables", "padding", "buffers")
        table = _new("Devices", names)
        shown = sorted(self.devices, key=lambda line: (-line.seconds.total, line.device))[:most_rows]
        for line in shown:
            parts = line.seconds
            times = (
                parts.total,
                parts.forward_compute,
                parts.forward_comm,
                parts.backward_compute,
                parts.backward_comm,
            )
            held = (line.table_bytes, line.padding_bytes, line.buffer_bytes)
            table.add_row(str(line.device), *map(duration, times), *map(size, held))
        _say_more(table, len(self.devices) - len(shown), len(names))
        return table

    def _hosts(self, most_rows: int) -> "Table":
        from rich.markup import escape

        names = ("host", "towers", "busiest device", "mean", "tables", "features")
        table = _new("Hosts (indices of replica)", names, left=("towers", "features"))
        shown = sorted(self.hosts, key=lambda line: (-line.mean_s, line.host))[:most_rows]
        for line in shown:
            features = "; ".join(", ".join(self.towers[t]) for t in line.towers)
            held = size(sum(device.table_bytes for device in line.devices))
            times = map(duration, (line.max_s, line.mean_s))
            table.add_row(str(line.host), ranges(line.towers), *times, held, escape(features))
        _say_more(table, len(self.hosts) - len(shown), len(names))
        return table

    def _attempts(self, most_rows: int) -> "Table":
        """Of each kind of proposal and partitioner the best try: a proposer makes many, and most differ little."""
        names = ("proposal", "partitioner", "tries", "best: busiest device")
        table = _new("Proposals, best first", names, left=("proposal", "partitioner"))
        ranked = sorted(self.attempts, key=lambda a: float("inf") if a.max_s is None else a.max_s)
        seen = [(attempt.proposal, attempt.partitioner) for attempt in ranked]
        tries = Counter(seen)
        best = [a for i, a in enumerate(ranked) if (a.proposal, a.partitioner) not in seen[:i]]
        for attempt in best[:most_rows]:
            found = attempt.reason if attempt.max_s is None else duration(attempt.max_s)
            count = tries[attempt.proposal, attempt.partitioner]
            table.add_row(attempt.proposal, attempt.partitioner, str(count), found)
        _say_more(table, len(best) - most_rows, len(names))
        return table


def ranges(ranks: tuple[int, ...]) -> str:
    """(3, 4, 5, 9) -> "3-5, 9"."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _new(title: str, names: tuple[str, ...], left: tuple[str, ...] = ()) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def _say_more(table: "Table", more: int, columns: int) -> None:
    if more > 0:
        table.add_row(f"and {more} more", *[""] * (columns - 1))
