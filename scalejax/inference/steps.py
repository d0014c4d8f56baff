"""What a loop does on devices: its operations on the parameters and the state, which several processes do in step.

Arguments and results are NumPy arrays and the names of methods, so that an operation can be told to another process.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import jax
import numpy as np

from scalejax import nn
from scalejax.inference.programs import DecodingState, Programs, Slots, TokenBlock
from scalejax.inference.sampling import Likelihoods, RowSampling
from scalejax.parallel.context_choice import Passed
from scalejax.train.state import Params

if TYPE_CHECKING:
    from jaxtyping import Int32

Result = TypeVar("Result")


class Others(Protocol):
    """The other processes of an engine, as the process with the loop sees them."""

    def announce(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Has them do what this process does next."""
        ...

    def hold(self) -> None:
        """Called where an operation failed, perhaps because one of them is gone."""
        ...


class Steps:
    """The operations on a cache.

    Attributes:
      programs: Those of the model.
      params: Its parameters.
      state: Of the cache and the slots.
      others: Processes that do the same; None = there are none.
    """

    def __init__(self, programs: Programs, params: Params, *, slots: int, pages: nn.PageShape) -> None:
        self.programs, self.params = programs, params
        self.state: DecodingState = programs.empty(slots, pages)
        self.others: Others | None = None

    def calibrate(self, tokens: "Int32[np.ndarray, 'one length']") -> None:
        """Sets the scales of float8; every process calls it by itself, before the first step."""
        self.state = self.programs.calibrated(self.params, self.state, tokens)

    def read(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        table: np.ndarray,
        last: np.ndarray,
        first: np.ndarray,
        places: np.ndarray,
        slots: np.ndarray,
        passed: Passed,
    ) -> None:
        """Reads a piece, see `Programs.read` and `nn.Reading`."""
        arguments = (tokens, positions, table, last, first, places, slots, passed)
        given: dict[str, Any] = {"positions": positions, "table": table, "last": last, "first": first}
        if self.programs.ranks > 1:
            given |= {"places": places, "passed": passed}
        reading = nn.Reading(**given)

        def act() -> None:
            self.state = self.programs.read(self.params, tokens, reading, slots, self.state)

        self._together("read", arguments, act)

    def decode(self, limit: np.int32, told: np.bool_, *slots: np.ndarray) -> TokenBlock:
        """Generates a block, see `Programs.decode`.

        Args:
          limit: Tokens at most.
          told: Whether likelihoods are asked for.
          slots: Leaves of a `Slots`.
        """

        def act() -> TokenBlock:
            rows: Any = jax.tree.unflatten(_SLOTS, slots)
            self.state, block = self.programs.decode(self.params, self.state, rows, limit, told)
            if not told:
                block = dataclasses.replace(block, likelihoods=None)
            return jax.tree.map(np.asarray, block)

        return self._together("decode", (limit, told, *slots), act)

    def fork(self, slots: np.ndarray, source: np.ndarray, target: np.ndarray) -> None:
        """See `Programs.fork`."""

        def act() -> None:
            self.state = self.programs.fork(self.state, slots, source, target)

        self._together("fork", (slots, source, target), act)

    def likelihoods(self, tokens: np.ndarray) -> Likelihoods:
        """See `Programs.likelihoods`."""

        def act() -> Likelihoods:
            return jax.tree.map(np.asarray, self.programs.likelihoods(self.params, tokens))

        return self._together("likelihoods", (tokens,), act)

    def _together(self, name: str, arguments: tuple[Any, ...], act: Callable[[], Result]) -> Result:
        if self.others is None:
            return act()
        self.others.announce(name, arguments)
        try:
            return act()
        except Exception:
            self.others.hold()
            raise


OPERATIONS = ("read", "decode", "fork", "likelihoods")
"""Of `Steps`, that are announced."""

_ROW = np.zeros(0, np.int32)
_SLOTS = jax.tree.structure(Slots(RowSampling.greedy(0), _ROW, _ROW, _ROW, _ROW, _ROW, _ROW))
