"""The exchange without padding gives the bits of the one with it; here by a literal form of the collective."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import (
    OPTIMIZERS,
    batch,
    device_features,
    given_grads,
    numpy_stack,
    plan_of,
    random_logical,
    wide_tables,
)
from jax import lax

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.exchange import ragged
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape


def literal(operand, output, starts, sizes, places, arrival_sizes, *, axis_name):
    """`lax.ragged_all_to_all` from its documentation, by gathering everything; wrong sizes make all of it garbage."""
    me = lax.axis_index(axis_name)
    everything = lax.all_gather(operand, axis_name)  # N n ...
    starts, sizes, places = (lax.all_gather(x, axis_name)[:, me] for x in (starts, sizes, places))
    index = lax.iota(jnp.int32, operand.shape[0])[None, :] - starts[:, None]  # N n
    sent = (index >= 0) & (index < sizes[:, None])
    place = jnp.where(sent, places[:, None] + index, output.shape[0]).reshape(-1)
    result = output.at[place].set(everything.reshape(-1, *operand.shape[1:]), mode="drop")
    return jnp.where((sizes == arrival_sizes).all() & (starts >= 0).all(), result, jnp.full_like(result, 77))


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", literal)
    monkeypatch.setattr(ragged, "PLATFORMS", ("cpu",))


def both(kind, exchange, *, optimizer=OPTIMIZERS["rowwise"], size=16, replica=2):
    """What a step looks up, leaves and counts, with padding and without."""
    tables = wide_tables(optimizer)
    host = batch(size, weighted=True)
    grads, results = given_grads(tables, host), []
    for all_to_all in ("padded", "ragged"):
        on = EmbeddingCollection(
            tables=tables,
            mesh=meshes.make_mesh(MeshShape(replica=replica), jax.devices()[:8]),
            plan=plan_of(kind, tables),
            exchange=Exchange(all_to_all=all_to_all, **exchange),
        )

        @jax.jit
        def step(state, features, on=on):
            embedded, routing = on.lookup(state, features)
            return embedded, on.update(state, routing, grads)

        state = numpy_stack(on, random_logical(on))
        embedded, new = step(state, device_features(on, host, size))
        results.append((embedded, on.to_logical(new), on.faults(new)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wires"),
    [
        ("row_wise", {}),
        ("table_row_wise", {"forward": "int8", "backward": "bfloat16"}),
        # Features of one id by runs, bags in their own buckets.
        ("table_wise", {}),
    ],
)
def test_steps_are_equal_to_the_bit(kind, wires):
    padded, without = both(kind, {"capacity_factor": 8.0, **wires})
    jax.tree.map(np.testing.assert_array_equal, without, padded)


@pytest.mark.slow
def test_statistics_of_cut_rows_travel_too():
    padded, without = both("grid", {"capacity_factor": 8.0}, optimizer=RowwiseAdagrad(learning_rate=0.1))
    jax.tree.map(np.testing.assert_array_equal, without, padded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("all_to_all", "skewed", "lost"),
    [
        ("padded", 1, 512 - 72),  # a bucket has what even ids need, 64, and 8 of slack
        ("ragged", 1, 0),
        ("ragged", 8, 8 * 512 - (640 + 8 * 128)),  # an owner: for 8 such buckets, and for where runs begin
    ],
)
def test_room_is_for_all_arrivals_together_and_what_has_none_is_counted(all_to_all, skewed, lost):
    schema = Schema(categorical=(Categorical(name="f", rows=4800, length=512),))
    table = TableConfig(name="t", rows=4800, dim=4, features=("f",), pooling="none")
    on = EmbeddingCollection(
        tables=(table,),
        mesh=meshes.make_mesh(MeshShape(), jax.devices()[:8]),
        exchange=Exchange(capacity_factor=1.0, overflow="count", all_to_all=all_to_all),
    )
    ids = np.arange(8 * 512).reshape(8, 512)
    ids[:skewed] = ids[:skewed] // 8 * 8  # all on the first device
    host = KeyedJagged(("f",), ids.reshape(-1), np.full((1, 8), 512, np.int32))
    rows = np.arange(1, 4801, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    leaves = {"rows": rows, "accumulator": np.zeros(4800, np.float32)}
    state = on.from_logical({"t": leaves})
    embedded, routing = jax.jit(on.lookup)(state, device_features(on, host, 8, schema))
    assert np.asarray(routing.faults).sum(axis=0).tolist() == [0, lost]
    got = np.asarray(embedded["f"])[..., 0].reshape(-1)
    assert (got == 0).sum() == lost
    np.testing.assert_array_equal(got[got != 0], (1 + ids.reshape(-1))[got != 0])


@pytest.mark.slow
def test_other_platforms_are_refused(monkeypatch):
    monkeypatch.setattr(ragged, "PLATFORMS", ("tpu",))
    with pytest.raises(UserError, match=r"all_to_all='ragged' needs a TPU or a GPU.*on 'cpu'.*'padded'"):
        both("row_wise", {})
    with pytest.raises(UserError, match="all_to_all must be one of padded, ragged; got 'dense'"):
        Exchange(all_to_all="dense")
