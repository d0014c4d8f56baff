"""The forms of click models that `tune.py` and `quality.py` compare, and the eight settings of each.

Two shapes times four ways of training, those of gradient boosting and logistic regression apart. On the flights all
have tables that are 32 wide, batches of 1,024 and two epochs (`configs/recsys/_flights.py`); on MovieLens 100K tables
that are 16 wide, batches of 512 and four (`_movielens.py`).
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from scalejax.configs import overrides
from scalejax.configs.recsys import _flights, _movielens, dcnv2, dhen, dlrm, logistic, wukong
from scalejax.data import FlightsData, MovielensData
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dhen import EnsembleLayer
from scalejax.models.recsys.interactions import (
    Convolution,
    DotProduct,
    FactorizationMachine,
    FeatureCross,
    Interaction,
    LinearCompression,
    MlpExperts,
    SecondMoment,
    SelfAttention,
)
from scalejax.models.recsys.logistic import LogisticConfig
from scalejax.models.recsys.towers import DcnTower, DlrmTower, TowersConfig
from scalejax.parallel.towers import Partition

_PEAK = "optimizer.learning_rate.peak="
_L2 = "tables.optimizer.weight_decay="
TRAININGS = {
    "flights": ((_PEAK + "8e-3",), (_PEAK + "4e-3",), (_PEAK + "2e-3",), (_PEAK + "4e-3", _L2 + "3e-5")),
    "movielens": ((_PEAK + "2e-3",), (_PEAK + "1e-3",), (_PEAK + "5e-4",), (_PEAK + "1e-3", _L2 + "3e-4")),
}
LOGISTIC = tuple(
    (f"tables.optimizer.learning_rate={rate}", _L2 + l2)
    for rate, l2 in itertools.product(("0.3", "1.0"), ("3e-5", "1e-4", "3e-4", "1e-3"))
)
BOOSTING = tuple(
    (f"learning_rate={rate}", f"max_leaf_nodes={leaves}", f"max_iter={trees}")
    for rate, leaves, trees in itertools.product(("0.05", "0.1"), ("31", "127"), ("250", "500"))
)

MODULES: dict[str, Callable[[int, int], Interaction]] = {
    "dot products": lambda n, d: DotProduct(outputs=n, mixed=64, hidden=(256,)),
    "self-attention": lambda n, d: SelfAttention(outputs=n),
    "convolution": lambda n, d: Convolution(outputs=n, activation="relu"),
    "linear": lambda n, d: LinearCompression(outputs=n),
    "cross": lambda n, d: FeatureCross(outputs=n),
    "second moment": lambda n, d: SecondMoment(outputs=n),
    "FM": lambda n, d: FactorizationMachine(outputs=n, rank=3 * d, hidden=(256,), normalization="none"),
    "MLP module": lambda n, d: MlpExperts(outputs=n, hidden=(256,)),
    "4 experts": lambda n, d: MlpExperts(outputs=n, experts=4, hidden=(256,)),
    "8 experts": lambda n, d: MlpExperts(outputs=n, experts=8, hidden=(256,)),
}
"""By the number of vectors and their width."""


def stacks(*modules: str, repeats: int = 2) -> tuple[Any, ...]:
    """The two shapes of a form of DHEN: 8 vectors of 4 a feature, or 4 of 8."""
    shapes = []
    for dim in (4, 8):
        n = dhen.vectors_on_flights(dim)
        shapes.append(dhen.on_flights(*(MODULES[name](n, dim) for name in modules), dim=dim, repeats=repeats))
    return tuple(shapes)


_WUKONG: Any = wukong.flights().model
_DLRM: Any = dlrm.flights().model
_DCN: Any = dcnv2.flights().model

FIRST: dict[str, tuple[Any, ...]] = {
    "logistic regression": (LogisticConfig(),),
    "gradient boosting": (),
    "MLP": tuple(
        DcnV2Config(dim=32, cross_layers=0, bottom_hidden=(64,), deep_hidden=widths)
        for widths in ((256, 128), (1024, 512))
    ),
    "DLRM": (_DLRM, dataclasses.replace(_DLRM, top_hidden=(1024, 512))),
    "DCNv2": (_DCN, dataclasses.replace(_DCN, cross_layers=2)),
    "Wukong": (
        _WUKONG,
        dataclasses.replace(_WUKONG, dim=8, dense_vectors=4, feature_vectors=4, fm_outputs=32, lcb_outputs=36, rank=24),
    ),
    "cross + FM": stacks("cross", "FM"),
    "cross, 5 layers": stacks("cross", repeats=5),
    "cross, wider": tuple(dhen.on_flights(FeatureCross(outputs=n), dim=dim) for n, dim in ((245, 4), (133, 8))),
    "FM, 3 layers": stacks("FM", repeats=3),
    "FM, wider": tuple(
        dhen.on_flights(
            FactorizationMachine(
                outputs=dhen.vectors_on_flights(dim), rank=3 * dim, hidden=(424,), normalization="none"
            ),
            dim=dim,
        )
        for dim in (4, 8)
    ),
}
"""The comparison of DHEN with its baselines and with each of its two modules alone at equal FLOPs, deeper and wider."""

SIZES = {
    f"Wukong, {layers} layer{'s' * (layers > 1)}": tuple(
        dataclasses.replace(shape, layers=layers) for shape in FIRST["Wukong"]
    )
    for layers in (1, 4)
}
"""Wukong with more compute beside the same tables; it has two layers in the first table."""

SINGLES = {name: stacks(name) for name in list(MODULES)[:8]}
PAIRS = {
    **{f"linear + {name}": stacks("linear", name) for name in SINGLES if name != "linear"},
    "self-attention + convolution": stacks("self-attention", "convolution"),
}


def deep(*modules: str, repeats: int) -> tuple[Any, ...]:
    """The two shapes of a deep form of DHEN: 8 vectors of 4 a feature, or 4 of 8 with the LayerNorm of the paper.

    Without a norm four layers have validation AUCs of .50 to .60 in the trials.
    """
    plain, normalized = stacks(*modules, repeats=repeats)
    layers = tuple(dataclasses.replace(layer, normalization="layer") for layer in normalized.layers)
    return plain, dataclasses.replace(normalized, layers=layers)


DEPTHS = {
    "cross + FM, 1 layer": stacks("cross", "FM", repeats=1),
    **{f"cross + FM, {n} layers": deep("cross", "FM", repeats=n) for n in (4, 8)},
}
EXPERTS = {name: stacks(name) for name in ("4 experts", "8 experts")}
TOWERS: dict[str, Partition] = {
    name: Partition(towers=tuple(map(tuple, towers)))
    for name, towers in json.loads(
        (pathlib.Path(__file__).parent / "results" / "tower_partitions.json").read_text()
    ).items()
}
"""From `tower_partitions.py`, by data and how they were made, such as "flights coherent 4"."""


def over_towers(base: Any, towers: str, dim: int) -> tuple[Any, ...]:
    """Both shapes of a base model over towers whose modules return vectors of width `dim`."""
    module = DlrmTower(dim=dim) if isinstance(base[0], dlrm.dlrm.DlrmConfig) else DcnTower(dim=dim)
    return tuple(TowersConfig(base=shape, towers=TOWERS[towers], modules=(module,)) for shape in base)


OVER_TOWERS = {
    f"{base}, {towers} towers": over_towers(FIRST[base], f"flights coherent {towers}", 16)
    for base in ("DLRM", "DCNv2")
    for towers in (2, 4, 8)
}
COMPRESSED = {
    f"DLRM, 4 towers, CR {ratio}": over_towers(FIRST["DLRM"], "flights coherent 4", 32 // ratio)
    for ratio in (1, 4, 8, 16)
}
PARTITIONS = {
    f"DLRM, 4 towers, {how}": over_towers(FIRST["DLRM"], f"flights {how} 4", 16)
    for how in ("diverse", "stride", "random")
}

_ML_DLRM: Any = dlrm.movielens().model
_ML_DCN: Any = dcnv2.movielens().model
_ML_WUKONG: Any = wukong.movielens().model
_ML_DHEN: Any = dhen.movielens().model
_ML_FIRST: dict[str, tuple[Any, ...]] = {
    "logistic regression": (LogisticConfig(),),
    "gradient boosting": (),
    "MLP": tuple(
        DcnV2Config(dim=16, cross_layers=0, bottom_hidden=(64,), deep_hidden=widths) for widths in ((64,), (256, 128))
    ),
    "DLRM": (_ML_DLRM, dataclasses.replace(_ML_DLRM, top_hidden=(256, 128))),
    "DCNv2": (_ML_DCN, dataclasses.replace(_ML_DCN, deep_hidden=(256, 128))),
    "Wukong": (_ML_WUKONG, dataclasses.replace(_ML_WUKONG, layers=1)),
    "cross + FM": (_ML_DHEN, dataclasses.replace(_ML_DHEN, repeats=1)),
    "cross, wider": tuple(
        dataclasses.replace(
            _ML_DHEN, layers=(EnsembleLayer(modules=(FeatureCross(outputs=n),), ensemble="sum"),), repeats=repeats
        )
        for n, repeats in ((12, 2), (19, 1))
    ),
}
MOVIELENS = _ML_FIRST | {
    f"{base}, {towers} towers": over_towers(_ML_FIRST[base], f"movielens coherent {towers}", 8)
    for base in ("DLRM", "DCNv2")
    for towers in (2, 4)
}

TABLES: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "first": FIRST,
    "sizes": SIZES,
    "single": SINGLES,
    "pairs": PAIRS,
    "depths": DEPTHS,
    "experts": EXPERTS,
    "towers": OVER_TOWERS,
    "compressed": COMPRESSED,
    "partitions": PARTITIONS,
}
"""Of the flights."""
FLIGHTS = {form: shapes for forms in TABLES.values() for form, shapes in forms.items()}
SPLITS: Mapping[str, dict[str, Any]] = {
    "random": {},
    "random-day": {"calendar_day": "include"},
    "time": {"split": "time"},
    "movielens": {},
}


def forms_of(split: str) -> Mapping[str, tuple[Any, ...]]:
    """The shapes of every form on the data of a split."""
    return MOVIELENS if split == "movielens" else FLIGHTS


def data_of(split: str, **fields: Any) -> Any:
    """The data set of a split, with these fields."""
    if split == "movielens":
        return MovielensData(**{"path": _movielens.WHEEL, "batch_size": 512, **fields})
    return FlightsData(**fields, **SPLITS[split])


@dataclasses.dataclass(frozen=True)
class Setting:
    """One of the eight of a form: which shape, and what is set."""

    form: str
    shape: int
    sets: tuple[str, ...]

    def experiment(self, split: str, seed: int) -> Any:
        """The training of this setting."""
        model = forms_of(split)[self.form][self.shape]
        if split == "movielens":
            experiment = dataclasses.replace(_movielens.experiment(model), data=data_of(split, seed=seed))
        else:
            l2 = logistic.L2 if self.form == "logistic regression" else 1e-4
            experiment = _flights.experiment(model, data_of(split, number_bins=64, seed=seed), l2)
        kept = ("evaluation.every=0", "checkpoints.every=0")
        return dataclasses.replace(overrides.apply(experiment, (*self.sets, *kept)), seed=seed)


def settings(form: str, split: str = "random") -> list[Setting]:
    """All eight of a form."""
    if form == "gradient boosting":
        return [Setting(form, 0, sets) for sets in BOOSTING]
    trainings = TRAININGS["movielens" if split == "movielens" else "flights"]
    trainings = LOGISTIC if form == "logistic regression" else trainings
    return [
        Setting(form, shape, sets) for shape, sets in itertools.product(range(len(forms_of(split)[form])), trainings)
    ]
