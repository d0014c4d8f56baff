"""Logistic regression (the floor).

scalejax train logistic
scalejax train logistic --data my.csv --label income
"""

from scalejax.configs.recsys import _flights, _table
from scalejax.models.recsys import logistic
from scalejax.train.experiment import Experiment

_MODEL = logistic.LogisticConfig()
L2 = 3e-4


def flights() -> Experiment:
    """Logistic regression on the bundled New York flights; half a minute on two cores, test AUC 0.739."""
    return _flights.experiment(_MODEL, l2=L2)


def flights_day() -> Experiment:
    """Logistic regression on the flights with the day of the year as a feature; test AUC 0.767."""
    return _flights.with_day(_MODEL, l2=L2)


def flights_time() -> Experiment:
    """Logistic regression on the flights, trained on January to October, tested on December; AUC 0.704 ± 0.001."""
    return _flights.by_time(_MODEL, l2=L2)


def table() -> Experiment:
    """Logistic regression on a table of your own: scalejax train logistic --data FILE --label COLUMN."""
    return _table.experiment(_MODEL)


def smoke() -> Experiment:
    """A few steps of a tiny logistic regression."""
    return _flights.smoke(logistic.LogisticConfig())
