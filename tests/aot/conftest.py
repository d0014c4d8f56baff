"""Everything here needs the TPU compiler, and no TPU; some of it CUDA's, and no GPU."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("libtpu") is None:
        for item in items:
            if "/aot/" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs libtpu: pip install 'scalejax[plan]'"))


@pytest.fixture(autouse=True)
def _no_compile_cache():
    """What was compiled for absent devices cannot be read back from the cache that other tests share."""
    from scalejax.plan import run

    with run.no_compile_cache():
        yield
