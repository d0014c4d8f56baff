"""Where there is a GPU, its kernels are compiled and run; elsewhere tests have them interpreted."""

import functools
import os

import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ON_A_GPU = "cuda" in os.environ["JAX_PLATFORMS"]


def pytest_collection_modifyitems(items):
    for item in items:
        if ON_A_GPU and item.get_closest_marker("without_a_gpu"):
            item.add_marker(pytest.mark.skip(reason="is about machines without a GPU, or with eight devices"))


@pytest.fixture(scope="session", autouse=True)
def compiled_on_a_gpu():
    if not ON_A_GPU:
        yield
        return
    interpreting = pl.pallas_call

    @functools.wraps(interpreting)
    def compiling(*args, compiler_params=None, interpret=False, **options):
        interpret = False if isinstance(compiler_params, plgpu.CompilerParams) else interpret
        return interpreting(*args, compiler_params=compiler_params, interpret=interpret, **options)

    pl.pallas_call = compiling
    yield
    pl.pallas_call = interpreting
