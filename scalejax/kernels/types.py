"""Types of arguments, and of what Pallas hands to the body of a kernel, whose own are not public."""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

AnyArray = np.ndarray | jax.Array
"""NumPy in, NumPy out, on the host; of JAX possibly traced."""

Number = jax.Array | int
"""Of a row, block or step: known while tracing, or int32[]."""


Kernel = Callable[..., None]
"""A body; it takes the references of operands, results and scratch memory in this order."""

Shapes = jax.ShapeDtypeStruct | list[jax.ShapeDtypeStruct]
"""Of the result or results of a kernel."""


class _At(Protocol):
    def __getitem__(self, index: object, /) -> Any: ...  # a part of a reference, for copies and masked loads


class Ref(Protocol):
    """Memory that a kernel reads as `ref[index]` and writes as `ref[index] = value`; arithmetic wants it read first."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    @property
    def at(self) -> _At: ...

    def __getitem__(self, index: object, /) -> jax.Array: ...

    def __setitem__(self, index: object, value: jax.Array, /) -> None: ...


class Copy(Protocol):
    """A copy between memories that is on its way once it is started."""

    def start(self) -> None: ...

    def wait(self) -> None: ...


class RemoteCopy(Protocol):
    """A copy to another device, which waits for its arrival with the same copy of its own."""

    def start(self) -> None: ...

    def wait_send(self) -> None: ...

    def wait_recv(self) -> None: ...
