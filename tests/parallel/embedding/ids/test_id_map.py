"""The id map against a model of the same policy in plain Python, on any trace of ids."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from id_map_model import Model, bucket_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel.embedding.ids import id_map
from scalejax.parallel.embedding.ids.id_map import IdMapConfig, split_ids

SLOTS = 12
MASK = 2**64 - 1
EXTREMES = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**32 - 1, 2**31]

CONFIGS = {
    "lfu": IdMapConfig(rows=1 + 2 * 3, ways=3, policy="lfu"),
    "lru": IdMapConfig(rows=1 + 3 * 2, ways=2, policy="lru"),
    "ttl": IdMapConfig(rows=1 + 2 * 3, ways=3, policy="ttl", ttl_steps=1),
    "lfu after 3": IdMapConfig(rows=1 + 2 * 2, ways=2, policy="lfu", admit_after=3, candidate_ways=2),
    "lru after 2": IdMapConfig(rows=1 + 1 * 4, ways=4, policy="lru", admit_after=2, candidate_ways=3),
    "ttl after 2": IdMapConfig(rows=1 + 3 * 1, ways=1, policy="ttl", ttl_steps=0, admit_after=2, candidate_ways=1),
}


@functools.cache
def compiled(config):
    return jax.jit(functools.partial(id_map.apply, config))


def padded(ids):
    """hi, lo, valid of `SLOTS` slots."""
    hi, lo = split_ids(np.array([*ids, *[7] * (SLOTS - len(ids))], np.int64))
    return hi, lo, np.arange(SLOTS) < len(ids)


def join_ids(hi, lo):
    """The inverse of `split_ids`."""
    return ((np.asarray(hi, np.uint64) << np.uint64(32)) | np.asarray(lo, np.uint64)).view(np.int64)


def run(config, state, ids, step):
    """(rows of the ids, new state, {(row, evicted id)})."""
    rows, state, evicted = compiled(config)(state, *padded(ids), np.int32(step))
    rows = np.asarray(rows)
    assert not rows[len(ids) :].any()
    taken = np.asarray(evicted.rows) < config.rows
    gone = zip(np.asarray(evicted.rows)[taken].tolist(), join_ids(evicted.hi, evicted.lo)[taken].tolist(), strict=True)
    return rows[: len(ids)].tolist(), state, sorted(gone)


def assert_equal(state, other):
    assert set(state) == set(other)
    for name, leaf in state.items():
        np.testing.assert_array_equal(leaf, other[name], err_msg=name)
        assert np.asarray(leaf).dtype == np.asarray(other[name]).dtype


def signed(id_):
    return id_ - 2**64 if id_ >= 2**63 else id_


batches = st.lists(
    st.lists(st.one_of(st.integers(0, 9), st.sampled_from(EXTREMES)), max_size=SLOTS), min_size=1, max_size=8
)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@settings(max_examples=60, deadline=None)
@given(trace=batches, gaps=st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_rows_evictions_counters_and_state_follow_the_model(config, trace, gaps):
    state, model, step = id_map.init(config), Model(config), 0
    for ids, gap in zip(trace, gaps, strict=False):
        step += gap
        rows, state, evicted = run(config, state, ids, step)
        expected, gone = model.apply([id_ & MASK for id_ in ids], step)
        assert rows == [expected[id_ & MASK] for id_ in ids]
        assert evicted == sorted((row, signed(id_)) for row, id_ in gone)
    assert id_map.totals(state["counts"]) == model.counts
    assert_equal({name: leaf for name, leaf in state.items() if name != "counts"}, model.arrays())


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIGS["lfu after 3"], CONFIGS["lru after 2"]], ids=["lfu", "lru"])
def test_an_entry_that_stands_for_several_occurrences_counts_like_them(config):
    rng, one, other = np.random.default_rng(5), id_map.init(config), id_map.init(config)
    for step in range(8):
        ids = np.unique(rng.integers(0, 9, 5)).tolist()
        times = rng.integers(1, 3, len(ids))
        spread, one, gone = run(config, one, np.repeat(ids, times).tolist(), step)
        given = np.ones(SLOTS, np.uint32)
        given[: len(ids)] = times
        rows, other, evicted = compiled(config)(other, *padded(ids), np.int32(step), times=given)
        assert np.repeat(np.asarray(rows)[: len(ids)], times).tolist() == spread
        assert sorted(np.asarray(evicted.rows)[np.asarray(evicted.rows) < config.rows].tolist()) == [r for r, _ in gone]
    assert_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_finding_gives_the_rows_that_ids_have_and_zero_to_the_others(config):
    state, model, rng = id_map.init(config), Model(config), np.random.default_rng(6)
    for step in range(6):
        ids = rng.integers(-9, 9, SLOTS).tolist()
        _, state, _ = run(config, state, ids, step)
        model.apply([i & MASK for i in ids], step)
    entries = {e.id: model.row(b, w) for b, ways in enumerate(model.ways) for w, e in enumerate(ways) if e}
    asked = [*EXTREMES[:3], *[signed(i) for i in entries], *range(50, 60)][:SLOTS]
    found = np.asarray(jax.jit(functools.partial(id_map.find, config))(state, *padded(asked)))
    assert found[: len(asked)].tolist() == [entries.get(i & MASK, 0) for i in asked]
    assert not found[len(asked) :].any()
    assert (found > 0).any()
    assert (found[: len(asked)] == 0).any()


@pytest.mark.default_cases("lru")
@pytest.mark.parametrize("policy", ["lfu", "lru"])
def test_large_batches_of_hashed_ids_follow_the_model(policy):
    config = IdMapConfig(rows=1 + 16 * 4, ways=4, policy=policy, admit_after=2, candidate_ways=4)
    apply = jax.jit(functools.partial(id_map.apply, config))
    state, model, rng = id_map.init(config), Model(config), np.random.default_rng(4)
    for step in range(20):
        ids = rng.zipf(1.1, 400).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        rows, state, evicted = apply(state, *split_ids(ids), np.ones(400, bool), np.int32(step))
        expected, gone = model.apply(ids.tolist(), step)
        assert np.asarray(rows).tolist() == [expected[i] for i in ids.tolist()]
        assert sorted(np.asarray(evicted.rows)[np.asarray(evicted.rows) < config.rows]) == sorted(r for r, _ in gone)
    totals = id_map.totals(state["counts"])
    assert totals == model.counts
    assert all(totals[name] for name in id_map.COUNTS if name != "misplaced"), totals
    assert_equal({name: leaf for name, leaf in state.items() if name != "counts"}, model.arrays())


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_order_of_a_batch_changes_nothing(config):
    rng = np.random.default_rng(0)
    one = other = id_map.init(config)
    for step in range(12):
        ids = rng.integers(-6, 6, SLOTS)
        order = rng.permutation(SLOTS)
        rows, one, evicted = run(config, one, ids.tolist(), step)
        permuted, other, also_evicted = run(config, other, ids[order].tolist(), step)
        assert permuted == [rows[i] for i in order]
        assert evicted == also_evicted
    assert_equal(one, other)
    assert id_map.totals(one["counts"])["evicted"] > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_map_taken_to_numpy_and_back_continues_as_if_nothing_had_happened(config):
    trace = np.random.default_rng(1).integers(0, 8, (10, SLOTS)).tolist()
    whole, rows_of_whole = id_map.init(config), []
    for step, ids in enumerate(trace):
        rows, whole, _ = run(config, whole, ids, step)
        rows_of_whole.append(rows)
    state = id_map.init(config)
    for step, ids in enumerate(trace):
        if step == 5:
            leaves, tree = jax.tree.flatten(state)
            stored = [np.asarray(leaf).tobytes() for leaf in leaves]
            arrays = [
                np.frombuffer(raw, leaf.dtype).reshape(leaf.shape) for raw, leaf in zip(stored, leaves, strict=True)
            ]
            state = jax.tree.unflatten(tree, arrays)
        rows, state, _ = run(config, state, ids, step)
        assert rows == rows_of_whole[step]
    assert_equal(state, whole)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIGS["lfu"], CONFIGS["lru after 2"]], ids=["lfu", "lru after 2"])
def test_eight_devices_and_one_assign_the_same_rows(config):
    config = IdMapConfig(
        rows=1 + 8 * config.ways,
        ways=config.ways,
        policy=config.policy,
        admit_after=config.admit_after,
        candidate_ways=config.candidate_ways,
    )
    mesh = Mesh(np.array(jax.devices()[:8]), ("fsdp",))
    everywhere = NamedSharding(mesh, P("fsdp"))
    rng = np.random.default_rng(2)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("fsdp"), P("fsdp"), P("fsdp"), P()), out_specs=(P("fsdp"),) * 3
    )
    def on_owners(state, hi, lo, step):
        # Every device sees all ids and serves those that it owns; an exchange would send it those alone.
        me = jax.lax.axis_index("fsdp")
        hi, lo = (jax.lax.all_gather(x, "fsdp", tiled=True) for x in (hi, lo))
        mine = id_map.owner_of(config, hi, lo, 8) == me
        rows, state, evicted = id_map.apply(config, state, hi, lo, mine, step, me * (config.buckets // 8))
        return jax.lax.psum_scatter(rows, "fsdp", tiled=True), state, evicted.rows

    whole, state = id_map.init(config), jax.device_put(id_map.init(config, shards=8), everywhere)
    one = jax.jit(functools.partial(id_map.apply, config))
    for step in range(8):
        hi, lo = split_ids(rng.integers(1, 100, 64).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        expected, whole, gone = one(whole, hi, lo, np.ones(64, bool), np.int32(step))
        rows, state, evicted = on_owners(state, *jax.device_put((hi, lo), everywhere), np.int32(step))
        np.testing.assert_array_equal(rows, expected)
        assert set(np.asarray(evicted).tolist()) == set(np.asarray(gone.rows).tolist())
    totals = id_map.totals(state["counts"])
    assert totals == id_map.totals(whole["counts"])
    assert totals["evicted"] > 0
    id_map.check_totals(totals)
    assert_equal(*({name: leaf for name, leaf in s.items() if name != "counts"} for s in (state, whole)))


def test_ids_of_another_device_get_row_zero_and_are_refused_later():
    config = IdMapConfig(rows=1 + 8 * 2, ways=2)
    ids = np.arange(40)
    hi, lo = split_ids(ids)
    shard = {name: leaf[4 * 2 :] for name, leaf in id_map.init(config, shards=2).items() if name != "counts"}
    shard["counts"] = id_map.init(config, shards=2)["counts"][1:]
    rows, shard, _ = jax.jit(functools.partial(id_map.apply, config))(shard, hi, lo, np.ones(40, bool), 0, 4)
    theirs = np.array([bucket_of(config, int(i)) < 4 for i in ids])
    assert 0 < theirs.sum() < 40
    assert not np.asarray(rows)[theirs].any()
    totals = id_map.totals(shard["counts"])
    assert totals["misplaced"] == theirs.sum()
    with pytest.raises(UserError, match=rf"{theirs.sum()} ids came to a device that does not own"):
        id_map.check_totals(totals)


def test_expired_ids_leave_at_once():
    config = IdMapConfig(rows=1 + 4 * 2, ways=2, policy="ttl", ttl_steps=2)
    state, model = id_map.init(config), Model(config)
    for step, ids in enumerate([[1, 2, 3], [3, 4, -5], [-5, 6], [6]]):
        _, state, _ = run(config, state, ids, step)
        model.apply([i & MASK for i in ids], step)
    state, rows = jax.jit(functools.partial(id_map.expire, config))(state, np.int32(4))
    rows = np.asarray(rows)
    expected = model.expire(4)
    assert expected
    assert sorted(rows[rows < config.rows].tolist()) == sorted(expected)
    assert id_map.totals(state["counts"]) == model.counts
    assert_equal({name: leaf for name, leaf in state.items() if name != "counts"}, model.arrays())
    with pytest.raises(ValueError, match="policy must be 'ttl'"):
        id_map.expire(CONFIGS["lru"], id_map.init(CONFIGS["lru"]), 0)


def test_a_row_is_fresh_when_its_id_is_new():
    """Rows and optimizer state of evicted ids are reset by the caller; here with counters as tables."""
    config = IdMapConfig(rows=1 + 1 * 2, ways=2, policy="lru")
    state = id_map.init(config)
    uses = jnp.zeros(config.rows, jnp.int32)
    seen_since_admission = {}
    for step, id_ in enumerate([10, 11, 10, 12, 12, 11, 12]):
        rows, state, evicted = compiled(config)(state, *padded([id_]), np.int32(step))
        for gone in join_ids(evicted.hi, evicted.lo)[np.asarray(evicted.rows) < config.rows]:
            del seen_since_admission[int(gone)]
        uses = uses.at[evicted.rows].set(0, mode="drop").at[rows[0]].add(1)
        seen_since_admission[id_] = seen_since_admission.get(id_, 0) + 1
        assert int(uses[rows[0]]) == seen_since_admission[id_]
    assert id_map.totals(state["counts"])["evicted"] == 2


def test_the_hash_of_ids_is_the_stated_one():
    config = IdMapConfig(rows=1 + 1000 * 2, ways=2)
    rng = np.random.default_rng(3)
    ids = rng.integers(-(2**63), 2**63 - 1, 500)
    found = id_map.bucket_of(config, *split_ids(ids))
    assert np.asarray(found).tolist() == [bucket_of(config, int(i) & MASK) for i in ids]
    # The well-known value of fmix32 at 1.
    assert int(id_map._mix(jnp.uint32(1))) == 0x514E28B7


def test_consecutive_ids_fill_the_buckets_evenly():
    config = IdMapConfig(rows=1 + 256 * 8, ways=8)
    counts = np.bincount(id_map.bucket_of(config, *split_ids(np.arange(256 * 64))), minlength=256)
    # Poisson with mean 64: a bucket beyond 64 +- 5 * 8 has probability below 1e-5.
    assert counts.min() > 24
    assert counts.max() < 104


def test_counters_hold_more_than_32_bits():
    config = CONFIGS["lfu"]
    state = id_map.init(config)
    hits = id_map.COUNTS.index("hits")
    state["counts"] = state["counts"].at[0, hits].set(jnp.array([1, 2**32 - 2], jnp.uint32))
    state["frequency"] = state["frequency"].at[:].set(2**32 - 2)
    state["seen"] = jnp.zeros_like(state["seen"])
    _, state, _ = run(config, state, [0] * 5, 1)
    assert id_map.totals(state["counts"])["hits"] == 2**33 - 2 + 5
    assert int(state["frequency"].max()) == 2**32 - 1


@pytest.mark.slow
def test_no_type_is_promoted_and_nothing_depends_on_64_bit_types(strict_promotion):
    config = CONFIGS["lfu after 3"]
    args = (*(jnp.asarray(x) for x in padded([1, 1, 1, 2, -3])), jnp.int32(0))
    narrow = id_map.apply(config, id_map.init(config), *args)
    with jax.enable_x64(True):
        wide = id_map.apply(config, id_map.init(config), *args)
    for a, b in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_rows_of_the_first_ways_lie_evenly_on_every_number_of_devices():
    """Tables are striped by rows; in a young map most ids have the first way of their bucket."""
    config = IdMapConfig(rows=1 + 512 * 8, ways=8)
    rows, _, _ = jax.jit(functools.partial(id_map.apply, config))(
        id_map.init(config), *split_ids(np.arange(512)), np.ones(512, bool), 0
    )
    for devices in (2, 3, 8):
        counts = np.bincount(np.asarray(rows) % devices, minlength=devices)
        # Binomial: the mean is 512 / devices, five standard deviations are below 60.
        assert abs(counts - 512 / devices).max() < 60


@pytest.mark.slow
def test_an_empty_batch_changes_nothing():
    config = CONFIGS["lfu after 3"]
    state = id_map.init(config)
    none = np.zeros(0, np.uint32)
    rows, after, evicted = id_map.apply(config, state, none, none, np.zeros(0, bool), 0)
    assert rows.shape == evicted.rows.shape == (0,)
    assert_equal(after, state)


def test_every_64_bit_id_is_split_and_joined_without_loss():
    ids = np.array(EXTREMES, np.int64)
    assert join_ids(*split_ids(ids)).tolist() == EXTREMES
    unsigned = ids.view(np.uint64)
    assert all((a == b).all() for a, b in zip(split_ids(ids), split_ids(unsigned), strict=True))
    assert join_ids(*split_ids(np.array([-3, 5], np.int32))).tolist() == [-3, 5]
    with pytest.raises(UserError, match="must be integers; got float64"):
        split_ids(np.array([1.0]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 10, "ways": 4}, r"got 10\. The nearest that fit: 9 and 13"),
        ({"rows": 2, "ways": 4}, "The nearest that fit: 5 and 9"),
        ({"rows": 1 + 2**30, "ways": 1}, r"at most 2\*\*30"),
        ({"rows": 9, "ways": 0}, "ways must be at least 1; got 0"),
        ({"rows": 9, "policy": "fifo"}, "one of lfu, lru, ttl; got 'fifo'"),
        ({"rows": 9, "admit_after": 0}, "admit_after must be at least 1"),
        ({"rows": 9, "candidate_ways": 0}, "candidate_ways must be at least 1"),
        ({"rows": 9, "policy": "ttl"}, "ttl_steps=None with policy 'ttl'"),
        ({"rows": 9, "policy": "lru", "ttl_steps": 3}, "ttl_steps=3 with policy 'lru'"),
        ({"rows": 9, "policy": "ttl", "ttl_steps": -1}, "at least 0"),
    ],
)
def test_contradicting_fields_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        IdMapConfig(**fields)


def test_buckets_that_do_not_divide_over_the_devices_are_refused():
    config = IdMapConfig(rows=1 + 10 * 8)
    with pytest.raises(UserError, match=r"10 buckets of 8 ways, which do not divide over 4 devices") as refusal:
        id_map.init(config, shards=4)
    # A trained map keeps its buckets, so the numbers of devices that suit it are named beside the rows of a new one.
    assert "it can be on 1, 2, 5 devices or another divisor of 10" in str(refusal.value)
    assert "rows=97, or another 1 + multiple of 32" in str(refusal.value)
    for shards in (1, 2, 5):
        id_map.init(config, shards)
    id_map.init(IdMapConfig(rows=97), shards=4)
