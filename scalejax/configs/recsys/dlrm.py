"""DLRM (arXiv 1906.00091).

scalejax train dlrm
scalejax train dlrm --data my.csv --label income
scalejax train dlrm-flights_alternate
"""

from scalejax import optim
from scalejax.configs.recsys import _common, _flights, _movielens, _table
from scalejax.data import CriteoTerabyteData
from scalejax.models.recsys import dlrm
from scalejax.models.recsys.towers import DlrmTower, TowersConfig
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.surgery.alternation import alternate
from scalejax.train.experiment import Experiment, Tables

_MODEL = dlrm.DlrmConfig(dim=32, bottom_hidden=(64,), top_hidden=(512, 256))


def flights() -> Experiment:
    """DLRM on the bundled New York flights; half a minute on two cores, test AUC 0.789."""
    return _flights.experiment(_MODEL)


def flights_towers() -> Experiment:
    """DLRM over four towers of the flights' features, which halve what leaves them; one run: test AUC 0.786."""
    modules = (DlrmTower(dim=16),)
    return _flights.experiment(TowersConfig(base=_MODEL, towers=_flights.TOWERS, modules=modules))


def flights_day() -> Experiment:
    """DLRM on the flights with the day of the year as a feature; test AUC 0.817 ± 0.002."""
    return _flights.with_day(_MODEL)


def flights_time() -> Experiment:
    """DLRM on the flights, trained on January to October, tested on December; AUC 0.682 ± 0.001."""
    return _flights.by_time(_MODEL)


def flights_alternate() -> Experiment:
    """DLRM on the flights that shrinks to half of its hidden units twice and ends whole: 65 % of the FLOPs.

    The schedule is our choice: of the paper (arXiv 2105.01064) only the abstract could be read. While rates fall by a
    cosine, what grows back hardly helps here (docs/log.md). Rates that stay and the Taylor score are those with which
    NE is within 0.2 % of the dense model's on planted logs (benchmarks/results/growth_pruning.md); with them this
    recipe has not been compared with dense ones.
    """
    schedule = ((64, 1.0), (160, 0.5), (64, 1.0), (128, 0.5), (96, 1.0))
    return alternate(_flights.held(flights()), schedule, multiple=8, score="taylor")


def flights_recurring() -> Experiment:
    """DLRM on January to June, then day by day to October: each day is scored before it is trained."""
    return _flights.day_by_day(_flights.offline(_MODEL))


def flights_recurring_alternate() -> Experiment:
    """The same, but that it shrinks to half of its hidden units twice while it is trained on January to June.

    Rates and score are those of `flights_alternate`; what it scores has not been measured.
    """
    schedule = ((40, 1.0), (96, 0.5), (40, 1.0), (80, 0.5), (56, 1.0))
    offline = _flights.held(_flights.offline(_MODEL))
    return _flights.day_by_day(alternate(offline, schedule, multiple=8, score="taylor"))


def movielens() -> Experiment:
    """DLRM on MovieLens 100K, test AUC 0.775 ± 0.002.

    Put recbole==1.2.1 (pip download --no-deps) beside you or set data.path.
    """
    return _movielens.experiment(dlrm.DlrmConfig(dim=16, bottom_hidden=(64,), top_hidden=(64,)))


def criteo() -> Experiment:
    """DLRM on the Criteo 1TB days, MLPerf's table sizes, for accelerators: set data.path. Not trained here."""
    return _common.experiment(
        model=dlrm.DlrmConfig(bottom_hidden=(512, 256), top_hidden=(1024, 1024, 512, 256)),
        data=CriteoTerabyteData(path="criteo-terabyte", batch_size=16_384),
        steps=256_000,
        optimizer=optim.Adam(learning_rate=optim.WarmupLinear(peak=1e-3, warmup=0.05)),
        tables=Tables(optimizer=RowwiseAdagrad(learning_rate=0.006), pipeline="ids"),
        eval_every=12_800,
    )


def table() -> Experiment:
    """DLRM on a table of your own: scalejax train dlrm --data FILE --label COLUMN."""
    return _table.experiment(dlrm.DlrmConfig(dim=8, bottom_hidden=(32,), top_hidden=(64, 32), embedding_scale=0.05))


def smoke() -> Experiment:
    """A few steps of a tiny DLRM."""
    return _flights.smoke(dlrm.DlrmConfig(dim=8, bottom_hidden=(16,), top_hidden=(16,)))


def smoke_towers() -> Experiment:
    """A few steps of a tiny DLRM over two towers."""
    base = dlrm.DlrmConfig(dim=8, bottom_hidden=(16,), top_hidden=(16,))
    return _flights.smoke(TowersConfig(base=base, towers=_flights.TWO_TOWERS, modules=(DlrmTower(dim=4),)))


def smoke_alternate() -> Experiment:
    """A few steps of a tiny DLRM that shrinks and grows."""
    return alternate(smoke(), ((3, 1.0), (3, 0.5), (2, 1.0), (2, 0.5), (2, 1.0)), multiple=8)
