import numpy as np
import pytest

from scalejax.data.arrays import ArrayDataSet
from scalejax.errors import UserError


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([[1.0, 2.0], [3.0, 1e300]]), r"'x' of split 'train' has 1e\+300 in row 1, column 1, which float32"),
        (np.array([5, 2**40]), r"'x' of split 'train' has 1.09951e\+12 in row 1, which int32 does not hold"),
        (np.array([2**63, 1], np.uint64), "in row 0, which int32 does not hold"),
    ],
)
def test_numbers_that_devices_cannot_hold_are_refused(array: np.ndarray, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ArrayDataSet({"train": {"x": array}}, batch_size=1)


def test_infinities_and_numbers_that_fit_stay() -> None:
    array = np.array([np.inf, np.nan, 3e38])
    assert ArrayDataSet({"train": {"x": array}}, batch_size=1).num_examples("train") == 3


@pytest.mark.parametrize("process_count", [1, 2])
def test_a_pass_counts_every_example_once_and_none_that_fills_the_last_batch(process_count: int) -> None:
    data = ArrayDataSet({"train": {"x": np.arange(9)}, "test": {"x": 10 + np.arange(9)}}, batch_size=4)
    passes = [data.eval_batches("test", process_index=p, process_count=process_count) for p in range(process_count)]
    seen = [batch for of_all in zip(*passes, strict=True) for batch in of_all]
    assert len(seen) == 3 * process_count
    counted = np.concatenate([batch["x"][batch["weights"] > 0] for batch in seen])
    np.testing.assert_array_equal(counted, 10 + np.arange(9))
