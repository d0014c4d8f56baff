"""A language model as 2 processes of 2 devices equals 1 process of 1 device, under every way of dividing it."""

import pathlib

import numpy as np
import pytest
import small_language_run
from launch import run_workers

pytestmark = pytest.mark.multiprocess

WORKER = pathlib.Path(__file__).with_name("language_worker.py")


def test_losses_and_parameters_agree_in_float64(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    texts = small_language_run.write(tmp_path / "texts")
    results = {}
    for shape in ((1, 1), (2, 2)):
        out = tmp_path / "{}x{}.npz".format(*shape)
        run_workers(WORKER, *shape, [str(texts), str(out)], timeout_s=400)
        with np.load(out) as arrays:
            results[shape] = dict(arrays)
    expected = {name.partition(":")[2]: value for name, value in results[1, 1].items() if name.startswith("implicit:")}
    assert expected["losses"].size == 10
    for of, got in results.items():
        for name, array in got.items():
            strategy, _, path = name.partition(":")
            assert array.dtype == np.float64, name
            # Sums are split over devices and parts: float64 rounding, grown over ten steps.
            tolerance = {"rtol": 1e-12} if path == "losses" else {"rtol": 1e-9, "atol": 1e-12}
            np.testing.assert_allclose(array, expected[path], **tolerance, err_msg=f"{of} {strategy} {path}")
