import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.records import Ragged
from scalejax.data.sessions.dedup_groups import choose_groups
from scalejax.data.sessions.generate import SessionLog, dedup_factor
from scalejax.errors import UserError


def sample(log: SessionLog, examples: int = 8192) -> KeyedJagged:
    """The first examples of the log, clustered by session."""
    columns = log.columns()
    session = columns["session_id"]
    assert isinstance(session, np.ndarray)
    rows = np.argsort(session, kind="stable")[:examples]
    lists = [columns[name] for name in log.names]
    taken = [column.take(rows) for column in lists if isinstance(column, Ragged)]
    lengths = np.stack([column.lengths for column in taken]).astype(np.int32)
    return KeyedJagged(log.names, np.concatenate([column.values for column in taken]), lengths)


@pytest.mark.parametrize("repeat", [0.5, 0.9])
def test_groups_of_the_generator_are_found_and_item_side_features_left_plain(repeat: float) -> None:
    log = SessionLog(
        sessions=600, samples=16, repeat=repeat, user_groups=(3, 1, 2), user_ids=8, item_ids=8, rows=10_000, dense=0
    )
    found = choose_groups(sample(log))
    assert found.groups == log.groups
    assert found.factors == pytest.approx([dedup_factor(16, repeat)] * 3, rel=0.1)
    assert found.feature_factors["user_2_1"] == pytest.approx(found.factors[2], rel=0.01)
    assert found.feature_factors["item_0"] < 1.01


def test_features_that_change_independently_have_the_product_of_their_probabilities() -> None:
    log = SessionLog(sessions=4096, samples=16, repeat=0.9, user_groups=(1, 1, 1), user_ids=8, item_features=0, dense=0)
    features = sample(log, 65_536)
    for count in (1, 2, 3):
        joint = deduplicate(features, [log.names[:count]]).factors[0]
        assert joint == pytest.approx(dedup_factor(16, 0.9**count), rel=0.03)
    assert choose_groups(features).groups == log.groups


def test_nothing_is_grouped_where_every_row_differs() -> None:
    log = SessionLog(sessions=600, samples=16, repeat=0.0, user_groups=(2, 1), user_ids=8, item_features=0, dense=0)
    found = choose_groups(sample(log))
    assert found.groups == ()
    assert found.saving == 1.0
    assert found.plain_bytes == found.dedup_bytes


@pytest.mark.parametrize(("length", "worth"), [(1, False), (2, True)])
def test_a_feature_is_deduplicated_when_its_repeated_rows_take_more_than_the_inverse(length: int, worth: bool) -> None:
    # Pairs of equal rows of int32 ids: (4 L + 4) / 2 bytes an example are saved, the inverse takes 4.
    rows = [[row // 2] * length for row in range(64)]
    found = choose_groups(KeyedJagged.from_lists({"a": rows}))
    assert found.groups == ((("a",),) if worth else ())
    # Two features that change together share the inverse, which makes the short one worth it.
    assert choose_groups(KeyedJagged.from_lists({"a": rows, "b": rows})).groups == (("a", "b"),)


def test_bytes_of_a_choice_are_those_of_the_arrays_with_their_weights() -> None:
    rows = {"a": [[1, 2, 3]] * 8, "b": [[4]] * 4 + [[5, 6]] * 4, "c": [[i] for i in range(8)]}
    for weights in (None, rows):
        features = KeyedJagged.from_lists(rows, weights)
        found = choose_groups(features)
        assert found.groups
        assert found.plain_bytes == deduplicate(features, ()).nbytes
        assert found.dedup_bytes == deduplicate(features, found.groups).nbytes


@st.composite
def batches(draw: st.DrawFn) -> KeyedJagged:
    count = draw(st.integers(1, 12))
    row = st.lists(st.integers(0, 1), max_size=3)
    rows = {key: draw(st.lists(row, min_size=count, max_size=count)) for key in ("a", "b", "c", "d")}
    if draw(st.booleans()):
        rows["d"] = rows["a"]
    dtype = draw(st.sampled_from([np.int32, np.int64]))
    return KeyedJagged.from_lists(rows, rows if draw(st.booleans()) else None, dtype)


def partitions(items: list[str]) -> list[list[tuple[str, ...]]]:
    """All ways to group some of the items."""
    if not items:
        return [[]]
    first, *rest = items
    found = []
    for groups in partitions(rest):
        found += [groups, [*groups, (first,)]]
        found += [[*groups[:i], (first, *group), *groups[i + 1 :]] for i, group in enumerate(groups)]
    return found


@pytest.mark.slow
@given(batches())
@settings(max_examples=60, deadline=None)
def test_bytes_are_those_of_the_arrays_and_no_merge_or_split_of_two_groups_saves_more(features: KeyedJagged) -> None:
    found = choose_groups(features)
    assert found.plain_bytes == deduplicate(features, ()).nbytes
    chosen = deduplicate(features, found.groups)
    assert found.dedup_bytes == chosen.nbytes <= found.plain_bytes
    assert found.factors == chosen.factors
    everything = [deduplicate(features, groups).nbytes for groups in partitions(list(features.keys))]
    assert len(everything) == 52  # the Bell number of 4 features and of "plain"
    assert min(everything) <= found.dedup_bytes
    # Greedy merging may miss the optimum, but not a pair that is still worth merging.
    groups = list(found.groups)
    for i in range(len(groups)):
        for j in range(i):
            rest = [group for k, group in enumerate(groups) if k not in (i, j)]
            assert deduplicate(features, [*rest, groups[j] + groups[i]]).nbytes >= found.dedup_bytes


def test_the_optimum_is_found_where_features_change_in_groups() -> None:
    log = SessionLog(sessions=40, samples=8, repeat=0.8, user_groups=(2, 2), user_ids=4, item_features=0, dense=0)
    features = sample(log, 320)
    best = min(deduplicate(features, groups).nbytes for groups in partitions(list(features.keys)))
    assert choose_groups(features).dedup_bytes == best


def test_a_sample_without_examples_is_refused() -> None:
    with pytest.raises(UserError, match="the sample must have 1 to 1048576 examples; got 0"):
        choose_groups(KeyedJagged(("a",), np.zeros(0, np.int32), np.zeros((1, 0), np.int32)))
