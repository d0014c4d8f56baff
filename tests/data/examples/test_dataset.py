import itertools

import numpy as np
import pytest

from scalejax.data.examples.batch import ClickBatch
from scalejax.data.examples.dataset import BatchedDataSet
from scalejax.data.examples.memory import Order, from_columns
from scalejax.data.examples.records import Ragged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import Fractions
from scalejax.errors import UserError

N = 50
SCHEMA = Schema(
    categorical=(
        Categorical(name="row", rows=N),
        Categorical(name="genre", rows=7, length=None, capacity=3.0),
        Categorical(name="pair", rows=2 * N, length=2),
    ),
    dense=("x", "y"),
    labels=("click", "buy"),
    group="row",
)
GENRES = [list(range(n % 4)) for n in range(N)]


def columns() -> dict[str, np.ndarray | Ragged]:
    """Everything is a function of the row number, so that a mix-up of rows or columns shows."""
    rows = np.arange(N)
    offsets = np.concatenate([[0], np.cumsum([len(g) for g in GENRES])])
    return {
        "row": rows,
        "genre": Ragged(offsets, np.concatenate(GENRES).astype(np.int32)),
        "pair": np.stack([rows, rows + N], axis=1),
        "x": rows.astype(np.float64),
        "y": -rows.astype(np.float64),
        "click": rows % 2,
        "buy": rows % 3 == 0,
        "day": rows // 7,
    }


def make(batch_size: int = 8, order: Order = "shuffled", **options: object) -> BatchedDataSet:
    return from_columns(columns(), SCHEMA, batch_size=batch_size, order=order, scaling="none", **options)  # pyright: ignore


def rows_of(batch: ClickBatch) -> list[int]:
    """Row numbers of the examples that count; checks that all columns belong together."""
    size = len(batch)
    real = int(batch.weights.sum())
    assert batch.weights.tolist() == [1.0] * real + [0.0] * (size - real)
    lists = batch.features.to_lists()
    batch.features.validate(SCHEMA)
    rows = [ids[0] for ids in lists["row"]][:real]
    assert lists["genre"] == [GENRES[r] for r in rows] + [[]] * (size - real)
    assert lists["pair"] == [[r, r + N] for r in rows] + [[0, 0]] * (size - real)
    np.testing.assert_array_equal(batch.dense[:real], np.array([[r, -r] for r in rows], np.float32).reshape(-1, 2))
    np.testing.assert_array_equal(batch.labels[:real], np.array([[r % 2, r % 3 == 0] for r in rows]).reshape(-1, 2))
    assert not batch.labels[real:].any()
    assert batch.groups is not None
    assert batch.groups[:real].tolist() == rows
    assert (batch.dense.dtype, batch.labels.dtype, batch.weights.dtype) == (np.float32,) * 3
    assert (batch.groups.dtype, batch.features.values.dtype) == (np.int64, np.int32)
    return rows


def stream(data: BatchedDataSet, batches: int, start: int = 0, process: int = 0, processes: int = 1) -> list[int]:
    found = data.train_batches(start_example=start, process_index=process, process_count=processes)
    return [row for batch in itertools.islice(found, batches) for row in rows_of(batch)]


def test_each_epoch_is_another_permutation_of_the_training_split_and_batches_span_epochs() -> None:
    data = make()
    train = data.num_examples("train")
    assert (train, data.batch_size) == (40, 8)
    whole = stream(make(batch_size=7), 24)[: 4 * train]
    epochs = [whole[e * train : (e + 1) * train] for e in range(4)]
    assert len({tuple(e) for e in epochs}) == 4
    assert {tuple(sorted(e)) for e in epochs} == {tuple(sorted(epochs[0]))}
    assert len(set(epochs[0])) == train


def test_the_stream_does_not_depend_on_the_batch_size() -> None:
    assert stream(make(batch_size=5), 24) == stream(make(batch_size=60), 2)


def test_one_batch_may_hold_several_epochs() -> None:
    assert stream(make(batch_size=120), 1) == stream(make(batch_size=8), 15)


@pytest.mark.parametrize("start", [0, 8, 39, 40, 1000])
def test_resumes_anywhere(start: int) -> None:
    assert stream(make(), 6, start=start) == stream(make(batch_size=1), start + 48)[start:]


def test_processes_share_every_global_batch_and_resume_with_another_number_of_processes() -> None:
    whole = stream(make(), 12)
    for processes in (1, 2, 4):
        parts = [stream(make(), 7, start=40, process=p, processes=processes) for p in range(processes)]
        local = 8 // processes
        merged = [row for b in range(7) for part in parts for row in part[b * local : (b + 1) * local]]
        assert merged == whole[40:96]


def test_seed_changes_the_order_and_nothing_else() -> None:
    one, other = stream(make(seed=1), 5), stream(make(seed=2), 5)
    assert one != other
    assert sorted(one) == sorted(other)


@pytest.mark.parametrize("processes", [1, 4])
def test_evaluation_is_one_pass_in_file_order_padded_with_weight_zero(processes: int) -> None:
    data = make(split=Fractions(train=0.5, validation=0.1))
    assert [data.num_examples(s) for s in ("train", "validation", "test")] == [25, 5, 20]
    parts = [list(data.eval_batches("test", process_index=p, process_count=processes)) for p in range(processes)]
    assert {len(part) for part in parts} == {3}
    assert {len(b) for part in parts for b in part} == {8 // processes}
    found = [row for batches in zip(*parts, strict=True) for b in batches for row in rows_of(b)]
    assert found == sorted(found)
    seen = set(found) | {r for s in ("train", "validation") for b in data.eval_batches(s) for r in rows_of(b)}
    assert len(found) == 20
    assert seen == set(range(N))


def test_an_empty_split_has_no_batches() -> None:
    assert list(make(split=Fractions(train=1.0, validation=0.0)).eval_batches("test")) == []


def test_days_cut_the_stream_in_time_order() -> None:
    data = make(order="time", time="day", split=Fractions(train=1.0, validation=0.0), day_name=lambda day: f"day {day}")
    days = data.days()
    assert [name for name, _, _ in days] == [f"day {d}" for d in range(8)]
    assert days[0] == ("day 0", 0, 7)
    assert days[-1] == ("day 7", 49, 50)
    for day, (_, start, stop) in enumerate(days):
        batches = list(data.range_batches(start, stop))
        assert [row // 7 for b in batches for row in rows_of(b)] == [day] * (stop - start)
        assert stream(data, 1, start=start)[: stop - start] == [row for b in batches for row in rows_of(b)][:8]


def test_time_order_sorts_rows_that_are_not() -> None:
    shuffled = columns()
    shuffled["day"] = 49 - np.arange(N)
    data = from_columns(shuffled, SCHEMA, batch_size=10, order="time", time="day", scaling="none")
    rows = stream(data, 4)
    assert rows == sorted(rows, reverse=True)


def test_range_batches_at_several_processes_are_the_slices_of_the_whole() -> None:
    data = make()
    whole = [row for b in data.range_batches(3, 30) for row in rows_of(b)]
    assert whole == stream(data, 4)[3:30]
    parts = [list(data.range_batches(3, 30, process_index=p, process_count=2)) for p in (0, 1)]
    assert [row for pair in zip(*parts, strict=True) for b in pair for row in rows_of(b)] == whole


def test_fingerprint_knows_data_split_and_order_but_not_the_batch_size() -> None:
    base = make().fingerprint()
    assert make(batch_size=4).fingerprint() == base
    others = [make(seed=1), make(order="time"), make(split=Fractions(seed=1))]
    changed = columns()
    assert isinstance(changed["x"], np.ndarray)
    changed["x"][3] += 1
    others.append(from_columns(changed, SCHEMA, batch_size=8, scaling="none"))
    assert len({base, *(other.fingerprint() for other in others)}) == 5


def test_errors_reach_the_caller_of_next() -> None:
    data = make()

    def broken(start: int, stop: int) -> None:
        raise UserError("row group 3 is damaged")

    data.examples.stream = broken  # pyright: ignore
    with pytest.raises(UserError, match="row group 3"):
        next(data.train_batches())


def test_a_batch_that_the_processes_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch_size=8 .* 3 processes; choose a multiple of 3, for example 9"):
        make().train_batches(process_index=0, process_count=3)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(UserError, match="start_example must not be negative; got -8"):
        make().train_batches(start_example=-8)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UserError, match="'dev' does not exist; choose one of train, validation, test"):
        make().eval_batches("dev")


def test_days_without_time_order_are_refused() -> None:
    with pytest.raises(UserError, match=r'needs data\.order="time"'):
        make().days()
