"""The synthetic log of sessions as a data set."""

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest

from scalejax.data import SessionData, SessionLog
from scalejax.data.examples.dedup import DedupBatch, expand_batch
from scalejax.errors import UserError

LOG = SessionLog(sessions=60, samples=8, user_groups=(2,), user_ids=3.0, item_features=1, dense=1, concurrent=10)


def data(folder: pathlib.Path, **options) -> SessionData:
    return SessionData(log=LOG, rows=500, capacity=4.0, batch_size=64, folder=str(folder), **options)


@pytest.mark.parametrize("shuffle", ["sessions", "rows"])
@pytest.mark.parametrize("access", ["memory", "windows"])
def test_distinct_lists_hold_the_examples_of_plain_ones(tmp_path: pathlib.Path, shuffle, access) -> None:
    ours, plain = (
        data(tmp_path, lists=lists, shuffle=shuffle, access=access).build() for lists in ("distinct", "plain")
    )
    assert ours.schema == data(tmp_path).schema()
    for a, b in itertools.islice(zip(ours.train_batches(), plain.train_batches(), strict=True), 8):
        assert isinstance(a, DedupBatch)
        again = expand_batch(a)
        np.testing.assert_array_equal(again.features.values, expand_batch(b).features.values)
        np.testing.assert_array_equal(again.features.lengths, expand_batch(b).features.lengths)
        np.testing.assert_array_equal(again.labels, b.labels)
        assert again.features.values.max() < 500


def test_shuffled_sessions_repeat_their_lists_and_shuffled_rows_hardly(tmp_path: pathlib.Path) -> None:
    factor = {
        shuffle: next(data(tmp_path, shuffle=shuffle).build().train_batches()).features.factors[0]
        for shuffle in ("sessions", "rows")
    }
    assert factor["sessions"] > 2 * factor["rows"]


def test_each_log_is_kept_in_a_folder_of_its_own_and_in_the_cache_by_default(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = dataclasses.replace(data(tmp_path), folder=None)
    config.build()
    dataclasses.replace(config, log=dataclasses.replace(LOG, seed=1)).build()
    dataclasses.replace(config, batch_size=32, seed=3).build()
    kept = sorted(path.name for path in (tmp_path / "scalejax" / "data").iterdir())
    assert len(kept) == 2
    assert all(name.startswith("sessions-") for name in kept)


def test_a_log_that_another_process_made_meanwhile_is_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data(tmp_path)
    write = SessionLog.write

    def slow(self: SessionLog, *arguments, **options) -> None:
        monkeypatch.setattr(SessionLog, "write", write)
        config.build()  # the other process
        write(self, *arguments, **options)

    monkeypatch.setattr(SessionLog, "write", slow)
    built = config.build()
    assert built.num_examples("train") + built.num_examples("validation") + built.num_examples("test") == 480
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file: the log of sessions cannot be kept there .*Set data.folder"):
        data(tmp_path / "file").build()
