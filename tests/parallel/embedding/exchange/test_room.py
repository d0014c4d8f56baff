"""How much room an exchange gets."""

import jax.numpy as jnp
import numpy as np

from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.exchange.routed import bucket_capacity
from scalejax.parallel.embedding.ids.occurrences import lookups
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape, make_mesh


def _collection(exchange):
    table = TableConfig(name="t", rows=1000, dim=4, features=("t",))
    return EmbeddingCollection(tables=(table,), mesh=make_mesh(MeshShape()), exchange=exchange)


def test_small_exchanges_take_any_skew():
    schema = Schema(categorical=(Categorical(name="t", rows=1000),))
    same = KeyedJagged(("t",), np.full(512, 8, np.int32), np.ones((1, 512), np.int32))
    roomy = _collection(Exchange(roomy_below_bytes=2**20))
    roomy.pack(same, 8, roomy.layout(schema, 512))  # every id goes to one device


def test_large_exchanges_go_by_the_factor():
    schema = Schema(categorical=(Categorical(name="t", rows=1000),))
    rooms = []
    for below in (0, 8 * 64 * 4 * 4 - 1, 8 * 64 * 4 * 4):  # devices x ids per device x dim x bytes
        collection = _collection(Exchange(roomy_below_bytes=below))
        (stack,) = collection.stacks
        assert stack.wide_dtype == jnp.float32
        found = lookups(stack, collection.layout(schema, 512))
        rooms.append(bucket_capacity(stack, found, collection.exchange))
    assert rooms[0] == rooms[1] < rooms[2] == 64
