"""DCNv2 (arXiv 2008.13535).

scalejax train dcnv2
scalejax train dcnv2 --data my.csv --label income
"""

from scalejax import optim
from scalejax.configs.recsys import _common, _flights, _movielens, _table
from scalejax.data import CriteoMultiHotData
from scalejax.models.recsys import dcnv2
from scalejax.models.recsys.towers import DcnTower, TowersConfig
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.train.experiment import Experiment, Tables

_MODEL = dcnv2.DcnV2Config(dim=32, cross_layers=3, bottom_hidden=(64,), deep_hidden=(256, 128))


def flights() -> Experiment:
    """DCNv2 on the bundled New York flights; half a minute on two cores, test AUC 0.804."""
    return _flights.experiment(_MODEL)


def flights_towers() -> Experiment:
    """DCNv2 over four towers of the flights' features, which halve what leaves them; one run: test AUC 0.799."""
    modules = (DcnTower(dim=16),)
    return _flights.experiment(TowersConfig(base=_MODEL, towers=_flights.TOWERS, modules=modules))


def flights_day() -> Experiment:
    """DCNv2 on the flights with the day of the year as a feature; test AUC 0.820 ± 0.001."""
    return _flights.with_day(_MODEL)


def flights_time() -> Experiment:
    """DCNv2 on the flights, trained on January to October, tested on December; AUC 0.687 ± 0.006."""
    return _flights.by_time(_MODEL)


def movielens() -> Experiment:
    """DCNv2 on MovieLens 100K, test AUC 0.784 ± 0.001.

    Put recbole==1.2.1 (pip download --no-deps) beside you or set data.path.
    """
    return _movielens.experiment(dcnv2.DcnV2Config(dim=16, bottom_hidden=(64,), deep_hidden=(64,)))


def criteo() -> Experiment:
    """MLPerf's DLRM-DCNv2 on its multi-hot Criteo logs, one epoch, for accelerators: set data.path. Not trained here.

    Its mark is AUC 0.80275 on the validation split; 104.5 GiB of tables.
    """
    return _common.experiment(
        model=dcnv2.DcnV2Config(
            cross_layers=3, cross_rank=512, bottom_hidden=(512, 256), deep_hidden=(1024, 1024, 512, 256)
        ),
        data=CriteoMultiHotData(path="criteo-multi-hot", batch_size=65_536),
        steps=64_000,
        optimizer=optim.Adam(learning_rate=optim.WarmupLinear(peak=1e-3, warmup=0.05)),
        tables=Tables(optimizer=RowwiseAdagrad(learning_rate=0.005), pipeline="ids"),
        eval_every=3_200,
    )


def table() -> Experiment:
    """DCNv2 on a table of your own: scalejax train dcnv2 --data FILE --label COLUMN."""
    return _table.experiment(
        dcnv2.DcnV2Config(dim=8, cross_layers=2, bottom_hidden=(32,), deep_hidden=(64, 32), embedding_scale=0.05)
    )


def smoke() -> Experiment:
    """A few steps of a tiny DCNv2."""
    return _flights.smoke(dcnv2.DcnV2Config(dim=8, bottom_hidden=(16,), deep_hidden=(16,)))


def smoke_towers() -> Experiment:
    """A few steps of a tiny DCNv2 over two towers."""
    base = dcnv2.DcnV2Config(dim=8, bottom_hidden=(16,), deep_hidden=(16,))
    return _flights.smoke(TowersConfig(base=base, towers=_flights.TWO_TOWERS, modules=(DcnTower(dim=4),)))
