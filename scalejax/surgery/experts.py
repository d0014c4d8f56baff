"""Models with experts made of trained ones: upcycling, and auxiliary routers for what is trained.

Upcycling copies each gated MLP into all experts of its place; routers are new (Komatsuzaki et al., arXiv 2212.05055).
Of a Llama it makes a Mixtral, of MoMa with one expert a modality one with more (arXiv 2407.21770, section 2.5), and of
m experts a multiple of them:

    Phase(name="experts", steps=..., changes={"model": ..., "optimizer": ...}, surgery=Upcycle())
"""

import dataclasses
import re
from typing import Any

import numpy as np

from scalejax.errors import UserError
from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.array_store import Index, LazyArray
from scalejax.train.checkpoints.trained import Trained

_EXPERTS = re.compile(r"layers/(?:some/|all/)?mlp/(?:\w+/)?(gate|up|down)")
_ROUTERS = re.compile(r"layers/(?:some/|all/)?mlp/(?:\w+/)?(router|auxiliary_in|auxiliary_out)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Upcycle:
    """Experts as copies of one MLP, new routers; all else as it was. A `train.experiment.Surgery`."""

    REMAKES = ("mlp", "depth")

    def operate(self, trained: Trained, fresh: Trained) -> Trained:
        """See `train.experiment.Surgery`.

        Raises:
          UserError: a parameter is neither that of a router nor made of one that there is.
        """
        made: dict[str, Any] = {}
        for path, new in fresh.params.items():
            old = trained.params.get(path)
            if _ROUTERS.fullmatch(path):
                made[path] = new
            elif old is not None and tuple(old.shape) == tuple(new.shape):
                made[path] = old
            elif old is not None and _EXPERTS.fullmatch(path) and _divides(tuple(old.shape), tuple(new.shape)):
                made[path] = _copies(old, new)
            else:
                raise _unlike(
                    path,
                    old,
                    new,
                    "A Llama becomes a model of experts as wide as its MLP, and every expert becomes equally many "
                    "of a larger number; sizes and names of all else must be the same.",
                )
        return dataclasses.replace(fresh, params=made)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddAuxiliaryRouters:
    """The trained model with new auxiliary routers. A `train.experiment.Surgery`."""

    REMAKES = ("auxiliary",)

    def operate(self, trained: Trained, fresh: Trained) -> Trained:
        """See `train.experiment.Surgery`.

        Raises:
          UserError: the models differ in more than these routers.
        """
        others = manifests.differences(
            trained.identity, {k: v for k, v in fresh.identity.items() if k in trained.identity}
        )
        if others:
            raise UserError(f"surgery: {'; '.join(others)}. Set what it was trained with; Upcycle makes new routers.")
        made: dict[str, Any] = {}
        for path, new in fresh.params.items():
            old = trained.params.get(path)
            if old is None and "/auxiliary_" in path:
                made[path] = new
            elif old is not None and tuple(old.shape) == tuple(new.shape):
                made[path] = old
            else:
                raise _unlike(
                    path,
                    old,
                    new,
                    "Take the config of the trained model with an AuxiliaryRouter added, and "
                    "nothing else; Upcycle changes the number of experts.",
                )
        return dataclasses.replace(fresh, params=made)


def _divides(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Whether [L, ...], or [L, m, ...] with an m that divides n, can be copied to [L, n, ...]."""
    one = (new[0], *new[2:])
    return old == one or (len(old) == len(new) and (old[0], *old[2:]) == one and new[1] % old[1] == 0)


def _copies(old: Any, new: Any) -> LazyArray:
    shape = tuple(new.shape)

    def read(index: Index) -> np.ndarray:
        whole = np.asarray(old[...] if len(old.shape) == len(shape) else old[...][:, None])
        return np.repeat(whole, shape[1] // whole.shape[1], axis=1)[index]

    return LazyArray(shape, new.dtype, read)


def _unlike(path: str, old: Any, new: Any, hint: str) -> UserError:
    was = "not there" if old is None else f"{tuple(old.shape)}"
    return UserError(
        f"surgery: {path!r} of the model to be is {tuple(new.shape)}, and of the trained one {was}. {hint}"
    )
