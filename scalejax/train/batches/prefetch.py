"""A thread that prepares batches ahead of the step that takes them."""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Host = TypeVar("Host")
Device = TypeVar("Device")


class Prefetch(Generic[Host, Device]):
    """Iterates over (host batch, device batch) pairs that a thread prepares ahead; use as a context manager.

    An exception of the thread (a bad id, a corrupt file) is raised by `__next__` at the batch where it happened.

    Args:
      batches: Host batches.
      place: Puts one on the devices.
      depth: Batches ready at one time.
    """

    def __init__(self, batches: Iterator[Host], place: Callable[[Host], Device], *, depth: int = 2) -> None:
        self._ready: queue.Queue[tuple[Host, Device] | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(batches, place), name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetch[Host, Device]":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():  # a blocked put must find room to see the stop
            with contextlib.suppress(queue.Empty):
                self._ready.get_nowait()
            self._thread.join(0.05)  # not a wait for a batch: a thread that is about to end brings none

    def __iter__(self) -> Iterator[tuple[Host, Device]]:
        return self

    def __next__(self) -> tuple[Host, Device]:
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # whoever asks again is told again, and does not wait for ever
            raise item
        return item

    def _fill(self, batches: Iterator[Host], place: Callable[[Host], Device]) -> None:
        try:
            for batch in batches:
                if self._stop.is_set():
                    return
                self._ready.put((batch, place(batch)))
            self._ready.put(StopIteration())
        except BaseException as error:  # handed over to the consumer, which raises it
            self._ready.put(error)
