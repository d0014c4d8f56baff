"""Deduplicated lookups and updates on several devices: bytes of the compiled step, three devices, and room."""

import jax
import numpy as np
import pytest
from embedding_cases import placed, two_steps

from scalejax.data.examples.dedup import deduplicate
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import RowwiseAdagrad, TableConfig
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.mesh import MeshShape
from scalejax.plan.compiled import hlo

TABLES = (
    TableConfig(name="t", rows=4096, dim=16, features=("a",), optimizer=RowwiseAdagrad(learning_rate=0.1)),
    TableConfig(name="means", rows=97, dim=8, features=("b",), pooling="mean",
    optimizer=RowwiseAdagrad(learning_rate=0.1)),
)  # fmt: skip


def collection(devices: int, tables=TABLES, **options) -> EmbeddingCollection:
    mesh = meshes.make_mesh(MeshShape(), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, **options)


def sessions(examples: int, samples: int, ids: int, seed: int = 0) -> KeyedJagged:
    """Lists of Poisson lengths, some empty, that `samples` examples in a row share."""
    rng = np.random.default_rng(seed)
    parts = []
    for name, rows in (("a", 4096), ("b", 97)):
        lists = [rng.integers(0, rows, rng.poisson(ids)).tolist() for _ in range(examples // samples)]
        parts.append((name, [own for own in lists for _ in range(samples)]))
    return KeyedJagged.from_lists(dict(parts))


def schema(capacity: float) -> Schema:
    return Schema(
        categorical=(
            Categorical(name="a", rows=4096, length=None, capacity=capacity),
            Categorical(name="b", rows=97, length=None, capacity=capacity),
        )
    )


@pytest.mark.slow
def test_a_sharded_deduplicated_step_is_the_plain_step_of_one_device() -> None:
    devices = 3
    examples = 48
    host, room = sessions(examples, samples=4, ids=3), Exchange(capacity_factor=8.0)
    rng = np.random.default_rng(1)
    grads = {n: rng.normal(size=(examples, d)).astype(np.float32) for n, d in (("a", 16), ("b", 8))}
    one = collection(1, accumulate="exact")
    layout = one.layout(schema(9.0), examples)
    wanted = two_steps(one, placed(one, one.pack(host, 1, layout)), grads)
    on = collection(devices, accumulate="exact", exchange=room)
    groups = (DedupGroup(features=("a", "b"), rows_per_example=0.5),)
    layout = on.layout(schema(9.0), examples, groups)
    packed = on.pack_deduplicated(deduplicate(host, (("a", "b"),)), devices, layout, groups)
    assert packed is not None
    found = two_steps(on, placed(on, packed), grads)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 4])
def test_bytes_that_the_compiled_step_moves_fall_by_the_factor(factor: int) -> None:
    devices, per_device, ids = 8, 64, 32
    on = collection(devices, tables=TABLES[:1], exchange=Exchange(capacity_factor=1.0))
    fixed = Schema(categorical=(Categorical(name="a", rows=4096, length=ids),))
    # Ids evenly spread, so that buckets without slack suffice.
    lists = np.repeat(np.arange(per_device * ids // factor).reshape(-1, ids), factor, axis=0)
    host = KeyedJagged(
        ("a",), np.tile(lists, (devices, 1)).reshape(-1), np.full((1, devices * per_device), ids, np.int32)
    )

    def moved(groups: tuple[DedupGroup, ...]) -> int:
        layout = on.layout(fixed, devices * per_device, groups)
        if groups:
            packed = on.pack_deduplicated(deduplicate(host, (("a",),)), devices, layout, groups)
        else:
            packed = on.pack(host, devices, layout)
        features = placed(on, packed)

        def step(state, features, grads):
            embedded, routing = on.lookup(state, features)
            return embedded, on.update(state, routing, grads)

        grads = {"a": np.zeros((devices * per_device, 16), np.float32)}
        text = jax.jit(step).lower(on.abstract_state(), features, grads).compile().as_text()
        return sum(
            execution.count * instruction.bytes
            for execution in hlo.parse(text).executions()
            for instruction in execution.computation.instructions
            if instruction.opcode == "all-to-all"
        )

    ratio = moved(()) / moved((DedupGroup(features=("a",), rows_per_example=1 / factor),))
    slots, slack = per_device * ids // devices, 8
    assert ratio == pytest.approx((slots + slack) / (slots / factor + slack))


def test_exact_sums_go_the_plain_way_where_the_lists_of_all_examples_have_no_room() -> None:
    # 8 examples of one device share a list of 10 ids: 10 of 16 slots deduplicated, 80 of 32 for the update.
    lists = [list(range(10)) if e < 8 else [e // 4] for e in range(64)]
    host = KeyedJagged.from_lists({"a": lists, "b": [[1]] * 64})
    groups = (DedupGroup(features=("a",), rows_per_example=0.5),)
    for accumulate, fits in (("ordered", True), ("exact", False)):
        on = collection(8, accumulate=accumulate, exchange=Exchange(capacity_factor=8.0))
        layout = on.layout(schema(4.0), 64, groups)
        packed = on.pack_deduplicated(deduplicate(host, (("a",),)), 8, layout, groups)
        assert (packed is not None) == fits


def test_exact_sums_are_refused_where_an_exchange_has_no_room_for_all_examples() -> None:
    # Every id of a device belongs to device 0: 8 ids deduplicated, 64 for the update, in buckets of 8 + 8.
    lists = [[8 * (e // 8)] * 8 for e in range(64)]
    host = KeyedJagged.from_lists({"a": lists, "b": [[]] * 64})
    groups = (DedupGroup(features=("a",), rows_per_example=0.5),)
    on = collection(8, accumulate="exact", exchange=Exchange(capacity_factor=1.0))
    layout = on.layout(schema(8.0), 64, groups)
    with pytest.raises(UserError, match=r"64 ids for one other device.*--set tables.exchange.capacity_factor="):
        on.pack_deduplicated(deduplicate(host, (("a",),)), 8, layout, groups)
