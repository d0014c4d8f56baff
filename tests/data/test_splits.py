import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scalejax.data.examples.memory import from_columns
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.data.splits import SPLITS, ByPosition, Fractions
from scalejax.data.tables.parquet import ParquetData
from scalejax.errors import UserError


@given(st.tuples(*[st.integers(0, 50)] * 3).map(sorted))
def test_positions_cut_the_examples_in_three(edges: list[int]) -> None:
    validation_from, test_from, examples = edges
    rows = ByPosition(validation_from=validation_from, test_from=test_from).assign(examples)
    assert np.concatenate([rows[split] for split in SPLITS]).tolist() == list(range(examples))
    assert [rows[split].size for split in SPLITS] == [
        validation_from,
        test_from - validation_from,
        examples - test_from,
    ]


@pytest.mark.parametrize(("validation_from", "test_from"), [(5, 4), (-1, 4), (5, 11)])
def test_positions_out_of_order_are_refused(validation_from: int, test_from: int) -> None:
    with pytest.raises(UserError, match=f"validation_from={validation_from}, test_from={test_from} and 10 examples"):
        ByPosition(validation_from=validation_from, test_from=test_from).assign(10)


@pytest.mark.parametrize(
    "split",
    [
        ByPosition(validation_from=13, test_from=20),
        ByPosition(validation_from=3, test_from=3),
        Fractions(by="position"),
    ],
)
def test_a_split_by_position_is_the_same_in_memory_and_in_windows(tmp_path, split) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {"id": np.arange(23), "label": np.arange(23) % 2}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=5)
    feature = (Categorical(name="id", rows=23),)
    whole = from_columns(columns, Schema(categorical=feature), batch_size=4, split=split)
    data = ParquetData(path=str(tmp_path / "a.parquet"), categorical=feature, split=split, batch_size=4)
    for access in ("memory", "windows"):
        streamed = ParquetData(**{**vars(data), "access": access}).build()
        for name in SPLITS:
            assert streamed.num_examples(name) == whole.num_examples(name)
            ids, expected = (
                [int(i) for b in d.eval_batches(name) for i in b.features.values[b.weights > 0]]
                for d in (streamed, whole)
            )
            assert ids == expected == split.assign(23)[name].tolist()


def test_every_row_group_and_seed_has_a_split_of_its_own() -> None:
    trained = set()
    for seed, group in itertools.product(range(2), range(3)):
        split = Fractions(train=0.6, validation=0.2, seed=seed)
        rows = {name: split.assign_group(group, 40, name).tolist() for name in SPLITS}
        assert {name: len(of) for name, of in rows.items()} == split.group_sizes(40)
        assert sorted(itertools.chain(*rows.values())) == list(range(40))
        trained.add(tuple(rows["train"]))
    assert len(trained) == 6
