"""Which units of a cache hold which tokens: the host's side of `nn.pages`.

A sequence holds units in the order of its tokens; all but the last are full. Units are counted by who holds them. A
full unit can be found again by its tokens and those before it: the key of a unit is a hash of the key of the one before
it and of its own tokens, and begins with the model and the format of the cache; tokens are compared on a hit. So
sequences that begin alike share what was read of it. The last unit of a sequence that ended is found likewise, by one
sequence that begins with all of its tokens, which then goes on in it. What nobody holds is kept until its unit is
needed, the least recently used first.

With a window a sequence lets go of units that no later token sees; `Held.first` counts them. They can be found until
they are needed, as others can.

Where `context` cuts sequences over N devices, a unit has a page of each. The c first tokens of a unit fill the pages as
if they were handed out in turn, beginning with the device `rotation` of the sequence, so that fills are within one of
each other whenever a sequence goes on. Which of the tokens that are read together go where is free beside that:
ascending and then descending devices, so that all have the same work under a causal mask.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from scalejax.parallel.context_inference import zigzag_devices


@dataclasses.dataclass
class _Unit:
    """What is known of one.

    Attributes:
      holders: How many sequences hold it.
      key: By which it is found; None = by none.
      tokens: Those that are found by it.
      rotation: Of the sequence that began it, see the module.
    """

    holders: int = 0
    key: bytes | None = None
    tokens: tuple[int, ...] = ()
    rotation: int = 0


@dataclasses.dataclass
class Held:
    """The units of a sequence.

    Attributes:
      units: In the order of its tokens, from the unit `first` on.
      count: Tokens in them and those before.
      keys: Of the full units, from the first of all on.
      rotation: The device that has the first token of a unit, see the module.
      first: Units that it had and let go of.
    """

    units: list[int] = dataclasses.field(default_factory=list)
    count: int = 0
    keys: list[bytes] = dataclasses.field(default_factory=list)
    rotation: int = 0
    first: int = 0

    def unit(self, number: int) -> int:
        """The unit of this number in the sequence."""
        return self.units[number - self.first]


class OutOfUnits(Exception):
    """All units are held."""


class Pool:
    """The units of one group of devices that share them."""

    def __init__(self, units: int, size: int, identity: str = "", window: int | None = None) -> None:
        """Starts with none in use.

        Args:
          units: Their number.
          size: Tokens of one.
          identity: Of the model and the format of the cache.
          window: Tokens that a token sees, itself the last; None = all before it.
        """
        self.size, self._window = size, window
        self._units = [_Unit() for _ in range(units)]
        self._free = list(range(units))[::-1]
        self._root = hashlib.blake2b(identity.encode(), digest_size=16).digest()
        self._full: dict[bytes, int] = {}
        self._open: dict[bytes, list[int]] = {}
        self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()

    @property
    def usable(self) -> int:
        """Units that no sequence holds."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Units that sequences hold."""
        return len(self._units) - self.usable

    def find(self, tokens: Sequence[int], rotation: int = 0) -> Held:
        """Takes the units that have the first tokens of a sequence already, all but at least one of these.

        Args:
          tokens: Of the sequence.
          rotation: Of it; that of what is found where its last unit is not full.
        """
        keys: list[bytes] = []
        units: list[Any] = []  # of which some may be None
        before = self._root
        for end in range(self.size, len(tokens), self.size):
            part = tuple(tokens[end - self.size : end])
            before = _key(before, part)
            unit = self._full.get(before)
            if unit is not None and self._units[unit].tokens != part:
                unit = None
            if unit is None and self._window is None:
                break
            keys.append(before)
            units.append(unit)
        # With a window only the last of them are seen: the others may be gone.
        while True:
            count, opened = self._begun(tokens, keys[len(units) - 1] if units else self._root, len(units))
            first = self._unseen(count)
            if None not in units[first:]:
                break
            units.pop()
        held = Held(units[first:], count, keys[: len(units)], rotation, first)
        for unit in held.units:
            self._take(unit)
        if opened is not None:
            held.rotation = self._units[opened].rotation
            self._take(opened)
            self._forget(opened)
            held.units.append(opened)
        return held

    def _begun(self, tokens: Sequence[int], before: bytes, full: int) -> tuple[int, int | None]:
        """How many first tokens of a sequence `full` units and one that is not full have, and the latter."""
        rest = tuple(tokens[full * self.size : -1])
        opened = [(self._units[unit].tokens, unit) for unit in self._open.get(before, ())]
        begun = [(part, unit) for part, unit in opened if rest[: len(part)] == part]
        if not begun:
            return full * self.size, None
        part, unit = max(begun, key=lambda one: len(one[0]))
        return full * self.size + len(part), unit

    def grow(self, held: Held, count: int) -> None:
        """Gives a sequence units for so many tokens in all.

        Raises:
          OutOfUnits: there are not so many; it has those that it had.
        """
        more = -(-count // self.size) - held.first - len(held.units)
        if more > self.usable:
            raise OutOfUnits
        held.units += [self._new() for _ in range(more)]

    def wrote(self, held: Held, tokens: Sequence[int], count: int) -> None:
        """Says that the first `count` tokens of a sequence are in its units: full ones can be found from now on."""
        held.count = count
        for number in range(len(held.keys), count // self.size):
            part = tuple(tokens[number * self.size : (number + 1) * self.size])
            key = _key(held.keys[-1] if held.keys else self._root, part)
            held.keys.append(key)
            if key not in self._full:  # else two sequences read the same at one time
                unit = held.unit(number)
                self._full[key] = unit
                self._units[unit].key, self._units[unit].tokens = key, part
        # A sequence lets go of what its next token, and so every later one, does not see.
        while held.first < self._unseen(count):
            self._let_go(held.units.pop(0))
            held.first += 1

    def _unseen(self, count: int) -> int:
        """Units whose tokens the one behind the first `count`, and all later ones, do not see."""
        return 0 if self._window is None else max(0, count + 1 - self._window) // self.size

    def share(self, held: Held) -> tuple[Held, tuple[int, int] | None]:
        """The units of a sequence for another one that goes on from the same tokens.

        Returns:
          What the other holds, and (unit, its copy) of a unit that is not full, which has to be copied now.

        Raises:
          OutOfUnits: there is none for the copy.
        """
        full = len(held.keys)
        own = held.units[: full - held.first]
        opened = held.count > full * self.size
        copy = self._new() if opened and self.usable else None
        if opened and copy is None:
            raise OutOfUnits
        for unit in own:
            self._take(unit)
        if copy is None:
            return Held([*own], held.count, [*held.keys], held.rotation, held.first), None
        other = Held([*own, copy], held.count, [*held.keys], held.rotation, held.first)
        return other, (held.unit(full), copy)

    def release(self, held: Held, tokens: Sequence[int]) -> None:
        """Gives back the units of a sequence of these tokens; what it read can be found until its units are needed."""
        full = len(held.keys)
        # The end of a sequence goes first when units are needed: the beginnings are of use to more others.
        for number in range(held.first + len(held.units) - 1, held.first - 1, -1):
            unit = held.unit(number)
            state = self._units[unit]
            if number == full and held.count > full * self.size:
                before = held.keys[-1] if held.keys else self._root
                state.key, state.tokens = before, tuple(tokens[full * self.size : held.count])
                state.rotation = held.rotation
                self._open.setdefault(before, []).append(unit)
            self._let_go(unit)
        held.units, held.keys, held.count, held.first = [], [], 0, 0

    def discard(self, held: Held) -> None:
        """Gives back the units of a sequence whose content is of no use to anybody."""
        for unit in held.units:
            if self._units[unit].key is not None:
                self._forget(unit)
            self._let_go(unit)
        held.units, held.keys, held.count, held.first = [], [], 0, 0

    def _let_go(self, unit: int) -> None:
        state = self._units[unit]
        state.holders -= 1
        if state.holders == 0:
            if state.key is None:
                self._free.append(unit)
            else:
                self._idle[unit] = None

    def _take(self, unit: int) -> None:
        self._idle.pop(unit, None)
        self._units[unit].holders += 1

    def _new(self) -> int:
        if self._free:
            unit = self._free.pop()
        else:
            unit, _ = self._idle.popitem(last=False)
            self._forget(unit)
        self._units[unit].holders = 1
        return unit

    def _forget(self, unit: int) -> None:
        """Lets a unit be found no longer."""
        state = self._units[unit]
        assert state.key is not None
        if self._full.get(state.key) == unit and len(state.tokens) == self.size:
            del self._full[state.key]
        else:
            others = self._open[state.key]
            others.remove(unit)
            if not others:
                del self._open[state.key]
        state.key, state.tokens = None, ()


def _key(before: bytes, tokens: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), key=before, digest_size=16).digest()


@dataclasses.dataclass(frozen=True)
class Places:
    """How the tokens of a unit lie on the devices along `context`.

    Attributes:
      page: Places of each device in a unit.
      ranks: N, the devices.
    """

    page: int
    ranks: int

    def fills(self, count: int, rotation: int) -> np.ndarray:
        """int64[N], tokens that each device has of the first `count` of a unit."""
        turn = (np.arange(self.ranks) - rotation) % self.ranks
        return (count - turn + self.ranks - 1) // self.ranks

    def next(self, begin: int, count: int, rotation: int) -> np.ndarray:
        """int32[count], the places in their units of the tokens `begin` and on; device d has d * page and on."""
        unit = self.page * self.ranks
        found = []
        while count:
            first = begin % unit
            last = min(first + count, unit)
            had = self.fills(first, rotation)
            devices = zigzag_devices((self.fills(last, rotation) - had).tolist())
            found.append(devices * self.page + had[devices] + _rank_among_equals(devices, self.ranks))
            begin, count = begin + last - first, count - (last - first)
        return np.concatenate(found or [np.zeros(0)]).astype(np.int32)

    def columns(self, places: np.ndarray, width: int) -> np.ndarray:
        """int64[count], the columns of the tokens of a row of `width`, of which each device has those of its tokens."""
        devices = places // self.page
        return devices * (width // self.ranks) + _rank_among_equals(devices, self.ranks)

    def width(self, places: np.ndarray) -> int:
        """Columns that a row of these tokens needs."""
        return self.ranks * int(np.bincount(places // self.page, minlength=1).max())


def _rank_among_equals(devices: np.ndarray, ranks: int) -> np.ndarray:
    """How many before each are equal to it."""
    rank = np.zeros(len(devices), np.int64)
    for device in range(ranks):
        own = devices == device
        rank[own] = np.arange(own.sum())
    return rank
