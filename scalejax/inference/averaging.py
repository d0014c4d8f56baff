"""The mean of several checkpoints of a run (Polyak averaging), as Llama 3 ends its pre-training.

The last checkpoints of a run whose learning rate goes to zero lie around one optimum; their mean is a better model than
the last (arXiv 2407.21783, section 3.4.3).
"""

import dataclasses

import numpy as np

from scalejax.models.llm.mapping import Index, Source


@dataclasses.dataclass
class AveragedSource:
    """Implements `mapping.Source`: the mean of equal parameters, added up in float64 and rounded once.

    Attributes:
      sources: Of equal paths, shapes and dtypes; at least one.
    """

    sources: tuple[Source, ...]
    _held: tuple[str, np.ndarray] | None = None

    def dtype(self, path: str) -> np.dtype:
        """Dtype of the sources."""
        return self.sources[0].dtype(path)

    def read(self, path: str, layer: int | None, index: Index | None = None) -> np.ndarray:
        """See `mapping.Source`. One layer of a parameter is held at a time, beside what the sources hold."""
        key = f"{path} {layer}"
        if self._held is None or self._held[0] != key:
            self._held = None  # before the next one comes
            total = np.zeros((), np.float64)
            for source in self.sources:
                total = total + np.asarray(source.read(path, layer), np.float64)
            self._held = (key, (total / len(self.sources)).astype(self.dtype(path)))
        array = self._held[1]
        return np.ascontiguousarray(array if index is None else array[index])
