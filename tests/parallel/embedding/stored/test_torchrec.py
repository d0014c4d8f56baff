"""State dicts shaped as TorchRec's, without TorchRec: shards of several ranks, and what is wrong with them."""

import types

import ml_dtypes
import numpy as np
import pytest

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel.embedding.config import Adam, RowwiseAdagrad, Sgd, TableConfig
from scalejax.parallel.embedding.stored import torchrec

TABLE = TableConfig(name="t", rows=6, dim=4, features=("a",), optimizer=RowwiseAdagrad())
ROWS = np.arange(24, dtype=np.float32).reshape(6, 4)


class Sharded:
    """What `read_state` knows of a ShardedTensor."""

    def __init__(self, *shards):
        self._shards = [
            types.SimpleNamespace(metadata=types.SimpleNamespace(shard_offsets=list(offsets)), tensor=values)
            for offsets, values in shards
        ]

    def local_shards(self):
        return self._shards


KEY = "model.sparse.ebc.embedding_bags.t.weight"


def ranks():
    """Row-wise over two ranks."""
    models = [{KEY: Sharded(((0, 0), ROWS[:4])), "model.over.weight": ROWS}, {KEY: Sharded(((4, 0), ROWS[4:]))}]
    states = [
        {"state": {KEY: {"t.momentum1": Sharded(((0,), np.float32([1, 2, 3, 4])))}}},
        {"state": {KEY: {"t.momentum1": Sharded(((4,), np.float32([5, 6])))}}},
    ]
    return models, states


def test_shards_are_put_where_their_offsets_say():
    logical = torchrec.read_state(*ranks(), [TABLE])
    np.testing.assert_array_equal(logical["t"]["rows"], ROWS)
    np.testing.assert_array_equal(logical["t"]["accumulator"], [1, 2, 3, 4, 5, 6])


def test_column_shards_of_rows_are_joined():
    models = [{KEY: Sharded(((0, 2), ROWS[:, 2:]), ((0, 0), ROWS[:, :2]))}]
    sgd = TableConfig(name="t", rows=6, dim=4, features=("a",), optimizer=Sgd())
    np.testing.assert_array_equal(torchrec.read_state(models, [], [sgd])["t"]["rows"], ROWS)


def test_what_is_written_reads_back():
    adam = TableConfig(name="t", rows=6, dim=4, features=("a",), optimizer=Adam(), dtype="bfloat16")
    logical = {"t": {"rows": ROWS.astype(ml_dtypes.bfloat16), "moment1": ROWS + 1, "moment2": ROWS + 2}}
    model, optimizer = torchrec.write_state(logical, [adam])
    assert set(optimizer["state"]["embedding_bags.t.weight"]) == {"t.exp_avg", "t.exp_avg_sq"}
    again = torchrec.read_state([model], [optimizer], [adam])
    for name, leaf in logical["t"].items():
        np.testing.assert_array_equal(again["t"][name], leaf)
        assert again["t"][name].dtype == leaf.dtype


def test_without_optimizer_states_they_begin_anew():
    models, _ = ranks()
    table = TableConfig(name="t", rows=6, dim=4, features=("a",), optimizer=RowwiseAdagrad(initial_accumulator=0.5))
    assert (torchrec.read_state(models, [], [table])["t"]["accumulator"] == 0.5).all()


def test_what_does_not_fit_is_named():
    models, states = ranks()
    with pytest.raises(UserError, match=r"'absent' is in no state dict; they hold t\."):
        torchrec.read_state(models, states, [TableConfig(name="absent", rows=1, dim=1, features=("a",))])
    with pytest.raises(UserError, match="row 4 is held 0 times by the 1 state dicts"):
        torchrec.read_state(models[:1], states[:1], [TABLE])
    with pytest.raises(UserError, match="row 0 is held 2 times by the 3 state dicts"):
        torchrec.read_state([*models, models[0]], states, [TABLE])
    with pytest.raises(UserError, match=r"shape \(4, 4\) at \(0, 0\).*wanted \(3, 4\)"):
        torchrec.read_state(models, states, [TableConfig(name="t", rows=3, dim=4, features=("a",))])
    with pytest.raises(UserError, match=r"Adam wants the state exp_avg_sq or momentum2.*have momentum1"):
        adam = TableConfig(name="t", rows=6, dim=4, features=("a",), optimizer=Adam())
        widened = [{"state": {KEY: {"t.momentum1": ROWS}}}]
        torchrec.read_state([{KEY: ROWS}], widened, [adam])


def test_configs_become_tables():
    def config(kind, pooling):
        return types.SimpleNamespace(
            name="t",
            num_embeddings=6,
            embedding_dim=4,
            feature_names=["a", "b"],
            data_type=types.SimpleNamespace(value=kind),
            pooling=types.SimpleNamespace(value=pooling),
        )

    (table,) = torchrec.tables([config("FP16", "MEAN")], Sgd())
    assert table == TableConfig(
        name="t", rows=6, dim=4, features=("a", "b"), pooling="mean", dtype="float16", optimizer=Sgd()
    )
    with pytest.raises(UserError, match="data type INT8"):
        torchrec.tables([config("INT8", "SUM")], Sgd())


def test_a_keyed_jagged_tensor_becomes_a_keyed_jagged():
    def tensor(lengths):
        return types.SimpleNamespace(
            keys=lambda: ["a", "b"],
            values=lambda: np.int64([3, 7, 1, 12]),
            lengths=lambda: np.int32(lengths),
            weights_or_none=lambda: None,
        )

    got = KeyedJagged.from_torchrec(tensor([2, 1, 0, 1]))
    assert got.to_lists() == {"a": [[3, 7], [1]], "b": [[], [12]]}
    with pytest.raises(UserError, match="3 lengths of 2 features"):
        KeyedJagged.from_torchrec(tensor([2, 1, 1]))
