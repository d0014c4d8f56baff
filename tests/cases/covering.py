"""Fewer cases than a complete product, for tests that run by default."""

import itertools


def covering(cases):
    """A subset in which every pair of values of two columns still occurs, chosen greedily."""
    pairs = [{(i, j, a[i], a[j]) for i, j in itertools.combinations(range(len(a)), 2)} for a in cases]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(cases)), key=lambda k: len(pairs[k] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
