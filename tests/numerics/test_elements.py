"""Elements: the codes of ml_dtypes and the values of the specification."""

import format_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from scalejax.numerics import bits as float32
from scalejax.numerics import elements

pytestmark = pytest.mark.usefixtures("strict_promotion")


@pytest.mark.slow
def test_elements_are_those_of_ml_dtypes():
    """All bfloat16 and a million float32 within the range, and saturation beyond it."""
    x = np.concatenate([format_cases.all_bfloat16(), format_cases.random_bits(1 << 10, 1 << 10, seed=1).ravel()])
    x = x[np.isfinite(x)]
    types = {
        elements.E4M3: ml_dtypes.float8_e4m3fn,
        elements.E5M2: ml_dtypes.float8_e5m2,
        elements.E3M2: ml_dtypes.float6_e3m2fn,
        elements.E2M3: ml_dtypes.float6_e2m3fn,
        elements.E2M1: ml_dtypes.float4_e2m1fn,
    }
    for element, dtype in types.items():
        want = np.clip(x, -element.max, element.max).astype(dtype).view(np.uint8)
        encode = jax.jit(lambda x, e=element: elements.encode(float32.float_bits(x), jnp.int32(0), e, "ties_to_even"))
        code = encode(jnp.asarray(x))
        np.testing.assert_array_equal(np.asarray(code), want, err_msg=element.name)
        every = np.arange(1 << element.bits, dtype=np.uint8)
        numbers = every.view(dtype).astype(np.float32)
        np.testing.assert_array_equal(element.magnitudes, numbers[: element.max_code + 1])
        # NaN and infinities too, which are never written here.
        back = np.asarray(elements.decode(jnp.asarray(every, jnp.int32), jnp.int32(0), element)).view(np.float32)
        np.testing.assert_array_equal(back, numbers)
        np.testing.assert_array_equal(np.signbit(back), np.signbit(numbers))


@pytest.mark.parametrize(
    ("element", "largest", "smallest_normal", "smallest", "emax"),
    [
        ("E5M2", 57344, 2.0**-14, 2.0**-16, 15),
        ("E4M3", 448, 2.0**-6, 2.0**-9, 8),
        ("E3M2", 28, 0.25, 0.0625, 4),
        ("E2M3", 7.5, 1, 0.125, 2),
        ("E2M1", 6, 1, 0.5, 2),
        ("INT8", 1 + 63 / 64, None, 1 / 64, 0),
    ],
)
def test_elements_are_those_of_the_specification(element, largest, smallest_normal, smallest, emax):
    found = getattr(elements, element)
    assert (found.max, found.max_exponent, found.magnitudes[1]) == (largest, emax, smallest)
    if smallest_normal is not None:
        assert 2.0**found.min_exponent == smallest_normal
