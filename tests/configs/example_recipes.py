"""Recipes that exist for tests only: every kind of field, no training behind them."""

import dataclasses
from typing import Any, Literal

from scalejax import optim
from scalejax.parallel.mesh import MeshShape
from scalejax.train.experiment import Experiment, Placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mlp:
    hidden: tuple[int, ...] = (64, 32)
    dropout: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deep:
    """Has a field without default: it cannot be made by name."""

    depth: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    layers: int = 2
    mlp: Mlp = Mlp()
    heads: tuple[Mlp, ...] = (Mlp(), Mlp(hidden=(8,)))
    interaction: Mlp | Deep | None = None
    kind: Literal["plain", "low_rank"] = "plain"
    important: tuple[str, ...] = ()
    scale: float | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1; got {self.layers}")

    def task(self, schema: Any) -> Any:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    batch_size: int = 8
    path: str | None = None

    def schema(self) -> Any:
        raise NotImplementedError

    def build(self) -> Any:
        raise NotImplementedError


def first() -> Experiment:
    """The first of the file.

    More lines that a table does not show.
    """
    return Experiment(
        model=Model(), data=Data(), steps=10, optimizer=optim.Adam(), placement=Placement(mesh=MeshShape(fsdp=2))
    )


def second() -> "Experiment":
    base = first()
    return dataclasses.replace(base, steps=3, optimizer=optim.AdamW())


def _private() -> Experiment:
    return first()


def with_argument(steps: int) -> Experiment:
    return dataclasses.replace(first(), steps=steps)


def not_annotated():
    return first()


def another_type() -> Model:
    return Model()
