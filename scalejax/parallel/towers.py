"""Towers: a partition of the categorical features, of which each part is looked up and interacts by itself first.

Paper: L. Luo et al., "Disaggregated Multi-Tower: Topology-aware Modeling Technique for Efficient Large-Scale
Recommendation", MLSys 2024 (arXiv 2403.00877). `plan.towers` finds partitions; `models.recsys.towers` are models.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from scalejax import json_reading
from scalejax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partition:
    """Which features each tower has.

    Attributes:
      towers: Names of features, tower after tower.
    """

    towers: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        if not all(isinstance(names, tuple | list) for names in (self.towers, *self.towers)):
            raise UserError(
                "Partition: towers must be tuples of names, such as (('a', 'b'), ('c',)) with the commas; got "
                f"{self.towers!r}."
            )
        names = [name for tower in self.towers for name in tower]
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise UserError(f"Partition: towers must hold names of features; got {wrong[0]!r}.")
        twice = sorted({name for name in names if names.count(name) > 1})
        empty = [str(t) for t, tower in enumerate(self.towers) if not tower]
        said = [] if self.towers else ["there is no tower"]
        said += [f"tower {', '.join(empty)} is empty"] if empty else []
        said += [f"{', '.join(twice)} appear twice"] if twice else []
        if said:
            raise UserError(
                f"Partition: every feature must be in one tower, and every tower must have one; {'; '.join(said)}."
            )

    def check(self, features: Sequence[str], field: str = "model.towers") -> None:
        """Raises UserError unless these are the features; `field` is the field or the option that gave the towers."""
        names = {name for tower in self.towers for name in tower}
        missing = [name for name in features if name not in names]
        unknown = sorted(names.difference(features))
        said = [f"{', '.join(missing)} are in none"] if missing else []
        said += [f"{', '.join(unknown)} are not in the data"] if unknown else []
        if said:
            how = f"Give {field} a file that" if field.startswith("--") else f"Set {field}, by hand or to a file that"
            raise UserError(
                f"Partition: the towers must have the {len(features)} categorical features of the data between them; "
                f"{'; '.join(said)}. {how} `scalejax towers RUN --save` wrote for this data."
            )

    def on_hosts(self, hosts: int) -> "HostTowers":
        """Puts as many towers on each host, in order.

        Raises:
          UserError: there are fewer towers than hosts, or their number does not divide.
        """
        count = len(self.towers)
        if count % hosts:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise UserError(
                "Partition: each index of the mesh axis replica, a host or several, has as many towers as each other; "
                f"got {count} towers and replica={hosts}. Take replica={' or '.join(map(str, fitting))} (--set "
                "placement.mesh.replica=N; shard, eval: --mesh replica=N,...), another partition, or, where all towers "
                "may be on every device, --set tables.exchange.route=two_level."
            )
        return HostTowers(towers=self.towers, hosts=hosts)

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Partition":
        """Reads what `save` wrote.

        Raises:
          UserError: it cannot be read, or holds something else.
        """
        try:
            found = json_reading.read_sealed(path)
        except (OSError, ValueError) as error:
            raise UserError(
                f"Partition: cannot read {path} as JSON ({error}). Give a file that `scalejax towers --save` wrote."
            ) from error
        return cls.from_json(found, str(path))

    @classmethod
    def from_json(cls, found: object, where: str) -> "Partition":
        """The partition of a JSON object as `save` writes it; `where` it is from, for messages."""
        towers = found.get("towers") if isinstance(found, dict) else None
        if not isinstance(towers, list) or not all(
            isinstance(tower, list) and all(isinstance(name, str) for name in tower) for tower in towers
        ):
            raise UserError(
                f'Partition: {where} must be {{"towers": [[name, ...], ...]}}, as `scalejax towers --save` writes it.'
            )
        return cls(towers=tuple(map(tuple, towers)))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes it as JSON, with its digest."""
        content = json_reading.sealed({"towers": self.towers})
        pathlib.Path(path).write_text(json.dumps(content, indent=2) + "\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTowers:
    """Towers on hosts, as many on each, in order: of 4 towers on 2 hosts, 0 and 1 are on the first.

    Attributes:
      towers: As in `Partition`.
      hosts: Indices of the mesh axis `replica`.
    """

    towers: tuple[tuple[str, ...], ...]
    hosts: int

    @property
    def each(self) -> int:
        """Towers of a host."""
        return len(self.towers) // self.hosts

    @property
    def indices(self) -> tuple[int, ...]:
        """The host of every tower."""
        return tuple(t // self.each for t in range(len(self.towers)))

    @property
    def room(self) -> int:
        """Features of the largest tower."""
        return max(map(len, self.towers))

    @property
    def present(self) -> np.ndarray:
        """bool[towers, room], whether a tower has as many features."""
        return np.arange(self.room) < np.array([[len(tower)] for tower in self.towers])

    @functools.cached_property
    def places(self) -> dict[str, tuple[int, int, int]]:
        """Host of each feature, which of its towers, and place in that."""
        return {
            name: (t // self.each, t % self.each, place)
            for t, tower in enumerate(self.towers)
            for place, name in enumerate(tower)
        }
