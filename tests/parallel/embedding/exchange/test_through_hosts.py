"""The exchange in two hops: formats of each hop, room between them, what is refused. Equality: `test_kinds.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from embedding_cases import (
    OPTIMIZERS,
    batch,
    device_features,
    numpy_stack,
    plan_of,
    random_logical,
    schema_of,
    wide_tables,
)

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.ids.occurrences import lookups
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape

BATCH = 16
TWO_LEVEL = {"capacity_factor": 8.0, "route": "two_level"}


def collection(tables, plan, exchange, hosts=2):
    mesh = meshes.make_mesh(MeshShape(replica=hosts, fsdp=8 // hosts))
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan, exchange=exchange)


def looked_up(on, logical, host):
    look_up = jax.jit(lambda state, features: on.lookup(state, features)[0])
    return jax.device_get(look_up(numpy_stack(on, logical), device_features(on, host, BATCH)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table_wise", "table_row_wise"])
def test_each_hop_has_a_format_of_its_own(kind):
    tables, host = wide_tables(OPTIMIZERS["sgd"]), batch(BATCH)
    plan = plan_of(kind, tables)
    results = {}
    for name, more in {
        "full": {},
        "between": {"forward": "bfloat16"},
        "within": {"within_host": "bfloat16"},
    }.items():
        on = collection(tables, plan, Exchange(**TWO_LEVEL, **more))
        results[name] = looked_up(on, random_logical(on), host)
    pooled = [name for table in tables if table.pooling == "sum" for name in table.features]
    assert pooled
    for feature in pooled:
        # Pooled vectors are rounded once, on their way between hosts.
        rounded = np.asarray(jnp.asarray(results["full"][feature]).astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_array_equal(results["between"][feature], rounded)
    # Within hosts travel the same vectors of whole tables, and rows of those that are striped.
    differ = any(not np.array_equal(results["within"][f], results["between"][f]) for f in pooled)
    assert differ == (kind == "table_row_wise")


def one_table(hosts=2, **exchange):
    table = TableConfig(name="t", rows=512, dim=8, features=("a",), pooling="sum")
    plan = ShardingPlan(tables=(TablePlan(table="t", kind="table_row_wise", ranks=tuple(range(8 // hosts))),))
    on = collection((table,), plan, Exchange(route="two_level", **exchange), hosts)
    schema = schema_of({"a": 4}, rows=512)
    return on, schema


def test_ids_without_room_between_the_hops_are_counted():
    on, schema = one_table(capacity_factor=1.0, overflow="count")
    size = 512
    (look,) = lookups(on.stacks[0], on.layout(schema, size))
    assert look.channel == "host"
    for ids, all_fit in ((np.zeros(4 * size), False), (np.arange(4 * size) % 512, True)):
        host = KeyedJagged(("a",), ids.astype(np.int32), np.full((1, size), 4, np.int32), None)
        routing = jax.jit(on.exchange_ids)(on.to_device(host, on.layout(schema, size)))
        bad, lost = np.asarray(routing.faults).sum(0)
        assert bad == 0
        if all_fit:
            assert lost == 0
        else:
            # 512 / 8 examples of 4 ids from each of 2 peers; one device of the 4 of the host has row 0.
            assert lost == 4 * (2 * 64 * 4 - (2 * 64 * 4 // 4 + 8))


def test_ids_without_room_between_the_hops_are_refused_before_anything_travels():
    """Exactly the batches of which the devices would count some, naming the feature and a factor that does."""
    size, (counting, schema) = 512, one_table(capacity_factor=1.2, overflow="count")
    refusing, layout = one_table(capacity_factor=1.2)[0], counting.layout(schema, size)
    exchange_ids, rng, refused = jax.jit(counting.exchange_ids), np.random.default_rng(0), []
    for hot in (0, 100, 180, 220, 512):  # ids of a feature that one device has more of
        ids = np.where(rng.permutation(4 * size) < hot, 4 * rng.integers(0, 128, 4 * size), np.arange(4 * size) % 512)
        host = KeyedJagged(("a",), ids.astype(np.int32), np.full((1, size), 4, np.int32), None)
        _, lost = np.asarray(exchange_ids(counting.to_device(host, layout)).faults).sum(0)
        refused.append(bool(lost))
        if not lost:
            refusing.pack(host, 8, layout)
            continue
        with pytest.raises(
            UserError, match=r"has \d+ ids for one device of its host.*room for 162.*'a' has.*capacity_factor="
        ):
            refusing.pack(host, 8, layout)
    assert refused[0] is False
    assert refused[-1] is True
    with pytest.raises(UserError) as refusal:
        refusing.pack(KeyedJagged(("a",), np.zeros(4 * size, np.int32), np.full((1, size), 4, np.int32)), 8, layout)
    assert "512 ids for one device" in str(refusal.value)  # 512 / 8 examples of 4 ids from each of 2 peers
    factor = float(str(refusal.value).rpartition("capacity_factor=")[2].split()[0])
    one_table(capacity_factor=factor)[0].pack(host, 8, layout)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Exchange(route="two_level", all_to_all="ragged"), "blocks of one size; got all_to_all='ragged'"),
        (lambda: Exchange(within_host="bfloat16"), "route='flat' does not have; got 'bfloat16'"),
        (lambda: Exchange(route="three"), "route must be one of"),
        (
            lambda: collection(
                (TableConfig(name="t", rows=9, dim=8, features=("a",)),),
                ShardingPlan(replicas="copy"),
                Exchange(route="two_level"),
            ),
            "replicas='copy' every host has all tables",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises((UserError, ValueError), match=message):
        make()
