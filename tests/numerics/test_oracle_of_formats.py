"""The NumPy oracle of block formats against Fractions, one block after another."""

import itertools
from fractions import Fraction

import format_cases
import format_oracle
import numpy as np
import pytest

from scalejax.numerics.formats import FORMATS


@pytest.mark.default_cases(first=12)
@pytest.mark.parametrize("name", FORMATS)
def test_the_oracle_equals_definitions_in_fractions(name):
    format = format_cases.small(name)
    form = format_cases.form(format)
    rng = np.random.default_rng(7)
    combinations = list(itertools.product(format_cases.rules(format), format_cases.ROUNDINGS))  # 24 at most
    for i in range(500 // len(FORMATS)):
        rule, rounding = combinations[i % len(combinations)]
        maximum = np.float32([rng.uniform(1, 2) * 2.0 ** rng.integers(-20, 20)])
        x = format_cases.blocks(maximum, format, rule, seed=i)
        chance = rng.integers(0, 1 << 32, x.shape, dtype=np.uint32)
        g = np.float32(maximum[0] / np.float32(2688)) if format.scale == "e4m3" else None
        got = format_oracle.quantize(x, form, rule, rounding, chance, tensor_scale=g)
        values, scale = format_oracle.exact_block(x[0], form, rule, rounding, chance[0], g)
        assert [np.float32(float(v)) for v in values] == list(got.values[0]), (rule, rounding)
        if format.scale == "exponent":
            assert scale + 2 ** (format.d1 - 1) - 1 == got.scales[0]
        elif format.scale == "float32":
            assert scale == Fraction(float(got.scales[0]))
        else:
            assert scale == Fraction(float(format_oracle.GRIDS["E4M3"][got.scales[0]]))
