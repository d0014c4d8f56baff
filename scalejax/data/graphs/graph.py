"""`NodeGraph`: one graph whose nodes have features and labels, on the host."""

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from scalejax.data.graphs.adjacency import Adjacency
from scalejax.data.splits import SPLITS
from scalejax.errors import UserError

_BEYOND_INT32 = 2**31


@dataclasses.dataclass(frozen=True, eq=False)
class NodeGraph:
    """A graph with what is known of its nodes.

    Attributes:
      adjacency: Who reads from whom, as it was written: no loops added, nothing normalised.
      features: float32[N, F], or None.
      labels: int32[N], a class each; int32[N, T], 0 or 1 for each of T tasks; -1 = not known; or None.
      splits: Nodes of "train", "validation" and "test", int64 each; empty where there is no split.
    """

    adjacency: Adjacency
    features: np.ndarray | None = None
    labels: np.ndarray | None = None
    splits: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.adjacency.shape[0] != self.adjacency.shape[1]:
            raise UserError(f"NodeGraph: adjacency must be square; got {self.adjacency.shape}.")
        for name, array in (("features", self.features), ("labels", self.labels)):
            if array is not None and array.shape[:1] != (self.num_nodes,):
                rows = array.shape[0] if array.ndim else "one number"
                raise UserError(f"NodeGraph: {name} must have {self.num_nodes} rows; got {rows}.")
        if self.features is not None and (self.features.ndim != 2 or not self.features.shape[1]):
            raise UserError(f"NodeGraph: features must be [N, F] with F of at least 1; got {self.features.shape}.")
        if self.labels is not None:
            _check_labels(self.labels)
        if self.features is not None and not np.isfinite(self.features).all():
            bad = int(np.argmax(~np.isfinite(self.features).all(1)))
            raise UserError(f"NodeGraph: features must be finite; those of node {bad} are not. Fill them in.")
        for name, nodes in self.splits.items():
            if name not in SPLITS:
                raise UserError(f"NodeGraph: splits are {', '.join(SPLITS)}; got {name!r}.")
            if nodes.size and not 0 <= nodes.min() <= nodes.max() < self.num_nodes:
                raise UserError(f"NodeGraph: split {name!r} names nodes outside [0, {self.num_nodes}).")
            if nodes.size and self.labels is not None:
                unknown = (self.labels[nodes].reshape(nodes.size, -1) < 0).all(1)
                if unknown.any():
                    bad = int(nodes[unknown][0])
                    raise UserError(f"NodeGraph: node {bad} of split {name!r} has no label. Leave it out of the split.")

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.adjacency.shape[0]

    @property
    def num_classes(self) -> int:
        """One more than the highest class; 0 without labels. Of labels of tasks: at most 2."""
        return 0 if self.labels is None or self.labels.size == 0 else int(self.labels.max()) + 1

    def fingerprint(self) -> str:
        """Hex digest of everything in it."""
        digest = hashlib.sha256(repr(self.adjacency.shape).encode())
        found = {"indptr": self.adjacency.indptr, "indices": self.adjacency.indices, "values": self.adjacency.values}
        found |= {"features": self.features, "labels": self.labels, **dict(sorted(self.splits.items()))}
        for name, array in found.items():
            if array is not None:
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def as_labels(values: np.ndarray) -> np.ndarray:
    """int32 of whole numbers.

    Raises:
      UserError: one does not fit.
    """
    _check_labels(values)
    return values.astype(np.int32)


def _check_labels(labels: np.ndarray) -> None:
    if labels.dtype.kind not in "iu":
        raise UserError(f"NodeGraph: labels must be whole numbers; got {labels.dtype}.")
    if labels.max(initial=0) >= _BEYOND_INT32:
        raise UserError(
            f"NodeGraph: labels must be classes below 2**31; got {labels.max()}, that of node "
            f"{np.argmax(labels.reshape(len(labels), -1).max(1))}. Number classes from 0 without gaps "
            "(np.unique(labels, return_inverse=True))."
        )
    if labels.ndim == 1 and labels.min(initial=0) < -1:
        raise UserError(
            f"NodeGraph: labels must be classes from 0 on, or -1 where none is known; got {labels.min()} among them."
        )
    if labels.ndim == 2 and (labels.min(initial=0) < -1 or labels.max(initial=0) > 1 or not labels.shape[1]):
        raise UserError(
            f"NodeGraph: labels [N, T] are of T tasks, at least one, 0 or 1 each, or -1 where not known; got "
            f"{list(labels.shape)} from {labels.min(initial=0)} to {labels.max(initial=0)}. Write one class a node as "
            "[N]."
        )
    if labels.ndim not in (1, 2):
        raise UserError(f"NodeGraph: labels must be [N], classes, or [N, T], tasks; got {list(labels.shape)}.")


def row_normalized(features: np.ndarray) -> np.ndarray:
    """float32[N, F] with each row divided by its sum; rows of sum 0 stay as they are.

    Raises:
      UserError: there are negative features, whose sum may be next to 0.
    """
    if features.min(initial=0) < 0:
        raise UserError(
            f"row_normalized: features must be counts, at least 0 each; got {features.min()}. Take them as they are: "
            "--set data.features=as-is."
        )
    total = features.sum(1, keepdims=True)
    return (features / np.where(total == 0, 1, total)).astype(np.float32)
