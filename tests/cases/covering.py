"""Fewer cases than a complete product."""

import itertools


def covering(cases, columns=None):
    """A subset in which every pair of values of two columns still occurs, chosen greedily.

    If pairs of `columns` are given, of these alone, and every value of every column.
    """
    if columns is None:
        columns = [*itertools.combinations(range(len(cases[0])), 2)]
    else:
        columns = [*columns, *((i, i) for i in range(len(cases[0])))]
    pairs = [{(i, j, a[i], a[j]) for i, j in columns} for a in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
