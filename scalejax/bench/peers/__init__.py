"""The same work written with other libraries. Nothing here is imported unless a peer is asked for."""

import importlib
from types import ModuleType

from scalejax.errors import UserError


def load(module: str) -> ModuleType:
    """Imports `scalejax.bench.peers.<module>`, which imports the peer's library.

    Raises:
      UserError: the library is not installed.
    """
    try:
        return importlib.import_module(f"scalejax.bench.peers.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "scalejax":
            raise
        raise UserError(
            f"--against: this peer needs {error.name}, which is not installed. "
            "Run benchmarks/peers.sh in this environment, or leave --against out to time scalejax alone."
        ) from error
