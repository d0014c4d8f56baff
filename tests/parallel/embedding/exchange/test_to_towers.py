"""Lookups that stop between the hops: the vectors and updates of the exchange that goes on, in both forms of a step."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import OPTIMIZERS, device_features, numpy_stack, numpy_unstack, random_logical
from jax.sharding import PartitionSpec as P

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange import to_towers
from scalejax.parallel.embedding.plan.placement import PlanRefused
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.towers import Partition

BATCH, DIM = 16, 32
LENGTHS = (1, 3, None)
SCHEMA = Schema(
    categorical=tuple(
        Categorical(name=f"f{i}", rows=11 + 7 * i, length=LENGTHS[i % 3], capacity=None if LENGTHS[i % 3] else 4)
        for i in range(12)
    )
)
TOWERS = {
    8: (("f5", "f0"), ("f1",), ("f2",), ("f3", "f8", "f9"), ("f4",), ("f6",), ("f7", "f11"), ("f10",)),
    4: (("f5", "f0", "f1"), ("f2",), ("f3", "f8", "f9", "f4", "f6"), ("f7", "f11", "f10")),
    2: (("f5", "f0", "f1", "f2", "f3", "f8", "f9"), ("f4", "f6", "f7", "f11", "f10")),
}
"""Unequal."""


def tables(optimizer, pooling=("sum", "mean")):
    return tuple(
        TableConfig(name=f"t{i}", rows=f.rows, dim=DIM, features=(f.name,), pooling=pooling[i % 2], optimizer=optimizer)
        for i, f in enumerate(SCHEMA.categorical)
    )


def host_batch(weighted):
    """Ids with many duplicates; every third bag of any length is empty."""
    rng, lengths, values = np.random.default_rng(0), [], []
    for f in SCHEMA.categorical:
        lengths.append(np.full(BATCH, f.length) if f.length else rng.integers(0, 4, BATCH))
        values.append(rng.zipf(1.3, lengths[-1].sum()) % f.rows)
    values = np.concatenate(values).astype(np.int32)
    weights = rng.normal(size=values.size).astype(np.float32) if weighted else None
    return KeyedJagged(SCHEMA.keys, values, np.stack(lengths).astype(np.int32), weights)


def plan_for(kinds, towers, inside):
    """Tables in the host of their tower; kinds in turn. No kind: left to `in_hosts`."""
    entries = []
    for i in range(len(SCHEMA.categorical)):
        kind = kinds[i % len(kinds)] if kinds else None
        if kind is None:
            continue
        begin = towers.places[f"f{i}"][0] * inside
        ranks = {
            "table_wise": (begin + i % inside,),
            "table_row_wise": tuple(range(begin, begin + inside)),
            "table_column_wise": (begin, begin + (i + 1) % inside),
        }[kind]
        entries.append(TablePlan(table=f"t{i}", kind=kind, ranks=ranks, columns=1 + kind.endswith("column_wise")))
    return ShardingPlan(tables=tuple(entries))


def collection(hosts, towers, kinds, optimizer="sgd", pooling=("sum", "mean"), **exchange):
    mesh = meshes.make_mesh(MeshShape(replica=hosts, fsdp=8 // hosts))
    own = tables(OPTIMIZERS[optimizer], pooling)
    plan = plan_for(kinds, towers, 8 // hosts)
    plan = to_towers.in_hosts(plan, {t.name: t.features for t in own}, towers, 8 // hosts)
    exchange = Exchange(**{"capacity_factor": 8.0, "route": "two_level", **exchange})
    return EmbeddingCollection(tables=own, mesh=mesh, plan=plan, exchange=exchange)


def through_towers(on, form, half_way):
    """[T, F, B, N], every vector having been where a tower module would be."""

    def there_and_back(half_way):
        x, present = half_way.by_tower()
        return half_way.to_examples(jnp.where(present[:, :, None, None], x, 7))

    if form == "explicit":
        rows = P(meshes.BATCH_AXES)
        back = P(None, None, meshes.BATCH_AXES)
        there_and_back = jax.shard_map(there_and_back, mesh=on.mesh, in_specs=rows, out_specs=back, check_vma=False)
    with jax.sharding.use_abstract_mesh(on.mesh.abstract_mesh):
        return there_and_back(half_way)


def given_grads():
    rng = np.random.default_rng(1)
    return {name: rng.normal(size=(BATCH, DIM)).astype(np.float32) for name in SCHEMA.keys}


def stacked(towers, by_feature):
    """{feature: [B, N]} -> [T, F, B, N]; numbers that nobody reads where a tower has none."""
    rest = jnp.full((BATCH, DIM), jnp.nan)
    room = max(map(len, towers))
    return jnp.stack([jnp.stack([by_feature[n] for n in t] + [rest] * (room - len(t))) for t in towers])


def same(on, towers, form, weighted=True):
    """The exchange and what passes through towers: vectors, and tables after a step."""
    features = device_features(on, host_batch(weighted), BATCH, schema=SCHEMA)
    grads, state = given_grads(), numpy_stack(on, random_logical(on))

    @jax.jit
    def whole(state, features, grads):
        embedded, routing = on.lookup(state, features)
        return embedded, on.update(state, routing, grads)

    @jax.jit
    def half(state, features, grads):
        routing = on.exchange_ids(features)
        x, pull = jax.vjp(functools.partial(through_towers, on, form), on.fetch_half_way(state, routing, towers))
        (of_half_way,) = pull(stacked(towers.towers, grads))
        return x, on.update(state, routing, of_half_way)

    expected, after = whole(state, features, grads)
    x, found = half(state, features, grads)
    for t, tower in enumerate(towers.towers):
        for place, name in enumerate(tower):
            np.testing.assert_array_equal(x[t, place], expected[name], err_msg=name)
        assert (np.asarray(x[t, len(tower) :]) == 7).all()  # of which the tower has none
    jax.tree.map(np.testing.assert_array_equal, numpy_unstack(on, found), numpy_unstack(on, after))
    assert not np.asarray(on.faults(found)).any()


CASES = [
    ("rows", ("table_row_wise",), "rowwise", True),
    ("tables", ("table_wise",), "adam", False),
    ("columns", ("table_column_wise",), "rowwise", True),
    ("all kinds", ("table_row_wise", "table_wise", "table_column_wise"), "sgd", True),
    ("no plan", (), "adagrad", False),
]


HOSTS = {"2": (2, 2), "2 of 2 towers": (2, 4), "4": (4, 4), "8": (8, 8)}
"""Hosts and towers."""
PRODUCT = [
    pytest.param(("implicit", "explicit")[(i + j) % 2], *HOSTS[hosts], *case[1:], id=f"{hosts}-{case[0]}")
    for (i, hosts), (j, case) in itertools.product(enumerate(HOSTS), enumerate(CASES))
    if i == j % 4 or (case[0] == "all kinds" and hosts in ("2 of 2 towers", "8"))
]
"""Each kind alone with one number of hosts, and all at once."""


@pytest.mark.compiled_as_users_do
@pytest.mark.default_cases("2 of 2 towers-all kinds")
@pytest.mark.parametrize(("form", "hosts", "count", "kinds", "optimizer", "weighted"), PRODUCT)
def test_what_passes_through_towers_unchanged_is_the_exchange_to_the_bit(
    form, hosts, count, kinds, optimizer, weighted
):
    towers = Partition(towers=TOWERS[count]).on_hosts(hosts)
    same(collection(hosts, towers, kinds, optimizer), towers, form, weighted)


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_formats_of_each_hop_are_those_of_the_exchange():
    formats = {"forward": "int8", "backward": "float16", "loss_scale": 8.0, "within_host": "bfloat16"}
    towers = Partition(towers=TOWERS[4]).on_hosts(4)
    same(collection(4, towers, ("table_row_wise", "table_wise"), pooling=("sum", "sum"), **formats), towers, "explicit")


def test_what_has_no_host_is_refused():
    towers = Partition(towers=TOWERS[4]).on_hosts(4)
    others = Partition(towers=TOWERS[4][::-1]).on_hosts(4)
    for on, towers_of, error, words in (
        (collection(4, towers, (), route="flat"), towers, ValueError, "need an exchange of two hops"),
        (
            collection(4, towers, ()),
            Partition(towers=(*TOWERS[4][:3], ("f7", "f11"))).on_hosts(4),
            ValueError,
            r"\['f10'\] are in one of the two alone",
        ),
        (collection(4, towers, (), pooling=("sum", "none")), towers, ValueError, "table 't1' has pooling='none'"),
        (
            collection(4, towers, ()),
            others,
            PlanRefused,
            r"table 't0' has rows on indices 0 of .* and feature 'f0' is in a tower of index 3; .*give it ranks of",
        ),
    ):
        with pytest.raises(error, match=words):
            on.fetch_half_way({}, None, towers_of)
    with pytest.raises(UserError, match=r"got 2 towers and replica=4\. Take replica=1 or 2 "):
        Partition(towers=TOWERS[2]).on_hosts(4)
