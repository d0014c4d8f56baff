"""Pallas kernels under interpret mode. Oracle: literal NumPy loops in float64, and the reference for derivatives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bag_cases import CASES
from jax.experimental.pallas import tpu as pltpu

from scalejax.errors import UnsupportedError
from scalejax.kernels import embedding_bag as ops
from scalejax.kernels.embedding_bag import packing, pallas_gpu, pallas_tpu
from scalejax.numerics import rounding
from scalejax.parallel.embedding import config
from scalejax.parallel.embedding.update import optimizers

WAIT = pltpu.InterpretParams()  # copies happen when they are waited for; unwritten memory is NaN
EAGER = pltpu.InterpretParams(dma_execution_mode="eager")
BACKENDS = [("pallas_tpu", True), ("pallas_gpu", True)]
SIMULATED = [("pallas_tpu", WAIT), ("pallas_tpu", EAGER)]
DEFAULT = ("many bags", "no rows among the ids", "duplicates")
"""Interpreting a TPU takes seconds a case."""


@pytest.fixture(autouse=True)
def _strict(strict_promotion):
    yield
    pltpu.reset_tpu_interpret_mode_state()


def numpy_bags(table, case, weights, pooling):
    out, slot = np.zeros((len(case.lengths), table.shape[1])), 0
    for bag, length in enumerate(case.lengths):
        for _ in range(length):
            if 0 <= case.ids[slot] < len(table):
                out[bag] += table[case.ids[slot]].astype(np.float64) * (1.0 if weights is None else weights[slot])
            slot += 1
        if pooling == "mean" and length:
            out[bag] /= length
    return out


@functools.partial(jax.jit, static_argnames=("pooling", "implementation", "interpret"))
def _bags(table, ids, lengths, weights, *, pooling, implementation, interpret):
    return ops.embedding_bag(
        table, ids, lengths, weights=weights, pooling=pooling, implementation=implementation, interpret=interpret
    )


def _assert_bags(case, table, stored, weights, pooling, implementation, interpret):
    made = _bags(
        stored, case.ids, case.lengths, weights, pooling=pooling, implementation=implementation, interpret=interpret
    )
    assert made.dtype == jnp.float32
    # Sums of up to 1100 values of size 1 in float32.
    np.testing.assert_allclose(made, numpy_bags(table, case, weights, pooling), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(name, kernel, marks=() if name in DEFAULT else pytest.mark.slow)
        for kernel in ("pallas_gpu", "pallas_tpu")
        for name in CASES
    ],
)
def test_bags_equal_literal_loops(name, implementation):
    case = CASES[name]
    table = case.table(128)
    _assert_bags(case, table, table, case.weights(), "sum", implementation, True)
    _assert_bags(case, table, table, None, "mean", implementation, True)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "interpret"), SIMULATED[:2])
@pytest.mark.parametrize("name", ["empty bags", "no rows among the ids", "long bags"])
def test_bags_equal_literal_loops_on_a_simulated_chip(implementation, interpret, name):
    case = CASES[name]
    table = case.table(128)
    _assert_bags(case, table, table, case.weights(), "sum", implementation, interpret)


@pytest.mark.parametrize("implementation", ["xla", "pallas_gpu"])
def test_rows_of_numbered_bags_are_added_in_their_order(implementation):
    """A bag may end with ids that are no rows, and numbers beyond the bags are ignored."""
    rng = np.random.default_rng(0)
    table = rng.normal(size=(9, 6)).astype(np.float32)
    ids = np.array([3, -1, 8, 0, 9, 9, 5, 5, 7, 9, 2], np.int32)
    bags = np.array([0, 0, 0, 2, 2, 2, 3, 3, 3, 3, 4], np.int32)
    expected = np.zeros((4, 6), np.float32)
    for row, bag in zip(ids, bags, strict=True):
        if bag < 4 and 0 <= row < 9:
            expected[bag] += table[row]
    rows = np.where(((ids >= 0) & (ids < 9))[:, None], table[np.clip(ids, 0, 8)], 0)

    @jax.jit
    def sums(table, rows, ids, bags):
        options = {"implementation": implementation, "interpret": True}
        pooled = ops.pool_rows(rows, bags, 4, **options)
        mean = ops.pool_rows(rows, bags, 4, pooling="mean", **options)
        return pooled, mean, ops.gather_and_pool_rows(table, ids, bags, 4, **options)

    pooled, mean, gathered = sums(table, rows, ids, bags)
    np.testing.assert_array_equal(pooled, expected)
    np.testing.assert_array_equal(gathered, expected)
    np.testing.assert_allclose(mean, expected / np.array([[3], [1], [3], [4]]), rtol=1e-6)


def test_a_tpu_refuses_more_bags_than_it_has_steps_for():
    shapes = ((8, 128), jnp.float32), ((4,), jnp.int32), ((2**28,), jnp.int32)
    with pytest.raises(UnsupportedError, match=r"at most 67108864 bags of width 128 at once; got 268435456\. Cut"):
        jax.eval_shape(
            lambda *a: ops.embedding_bag(*a, implementation="pallas_tpu"),
            *(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes),
        )


def test_steps_of_a_tpu_are_all_pairs_of_a_block_of_bags_and_a_chunk_of_ids_that_have_ids_in_common():
    """Chunks of 8 ids and blocks of 2 bags: some end where a chunk does, and some have no ids."""
    schedule = jax.jit(functools.partial(pallas_tpu._schedule, count=40, block=2, chunk=8))
    for lengths in ((4, 4, 8, 16, 8, 0), (3, 0, 30, 0, 0, 2), (0, 0, 0, 0, 0, 0), (16, 8, 0, 0, 9, 7)):
        starts, block_of, chunk_of = (x.tolist() for x in schedule(jnp.asarray(lengths, jnp.int32)))
        assert starts == [sum(lengths[:bag]) for bag in (0, 2, 4, 6)]

        def common(block, chunk, starts=starts):
            return max(starts[block], 8 * chunk) < min(starts[block + 1], 8 * chunk + 8)

        steps = [pair for pair in zip(block_of, chunk_of, strict=True) if common(*pair)]
        assert steps == [(block, chunk) for block in range(3) for chunk in range(5) if common(block, chunk)]
        assert set(block_of) == {0, 1, 2}  # the sums of each have to be set to 0


@pytest.mark.default_cases(first=2)
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 2048])
def test_a_gpu_takes_rows_of_any_width(dim):
    case = CASES["empty bags"]
    table = case.table(dim)
    _assert_bags(case, table, table, None, "sum", "pallas_gpu", True)


def test_a_tpu_takes_wide_rows_and_many_blocks_of_bags():
    case = CASES["many bags"]
    table = case.table(384)
    _assert_bags(case, table, table, None, "sum", "pallas_tpu", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "interpret"), [("xla", False), ("reference", False), BACKENDS[0], SIMULATED[0]]
)
def test_packed_rows_are_bfloat16_rows(implementation, interpret):
    case = CASES["no rows among the ids"]
    packed = ops.pack_rows(jnp.asarray(case.table(256)))
    assert packed.shape == (case.num_rows, 128)
    table = np.asarray(ops.unpack_rows(packed).astype(jnp.float32))
    _assert_bags(case, table, packed, case.weights(), "sum", implementation, interpret)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_gpu_takes_rows_of_16_bits(dtype):
    case = CASES["empty bags"]
    table = jnp.asarray(case.table(64)).astype(dtype)
    _assert_bags(case, np.asarray(table.astype(jnp.float32)), table, case.weights(), "mean", "pallas_gpu", True)


def test_packing_rounds_like_a_cast_and_keeps_what_is_special():
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, (64, 32), dtype=np.uint32).view(np.float32)  # all exponents, NaNs among them
    values[0, :6] = [np.nan, np.inf, -np.inf, -0.0, 1 + 2**-8, 1 + 3 * 2**-8]
    cast = jnp.asarray(values).astype(jnp.bfloat16)
    back = ops.unpack_rows(ops.pack_rows(jnp.asarray(values)))
    np.testing.assert_array_equal(back.astype(jnp.float32), cast.astype(jnp.float32))
    # What kernels use inside.
    words = packing.join(jnp.asarray(values[:, :16]), jnp.asarray(values[:, 16:]))
    np.testing.assert_array_equal(ops.unpack_rows(words).astype(jnp.float32), cast.astype(jnp.float32))


@pytest.mark.parametrize(
    ("implementation", "interpret"),
    [*BACKENDS, *(pytest.param(*simulated, marks=pytest.mark.slow) for simulated in SIMULATED)],
)
@pytest.mark.parametrize("name", ["no rows among the ids", "many bags"])
def test_gathered_rows_are_the_rows(implementation, interpret, name):
    case = CASES[name]
    table = case.table(128)
    made = jax.jit(lambda t, i: ops.gather_rows(t, i, implementation=implementation, interpret=interpret))(
        table, case.ids
    )
    is_row = (case.ids >= 0) & (case.ids < case.num_rows)
    np.testing.assert_array_equal(made, np.where(is_row[:, None], table[np.where(is_row, case.ids, 0)], 0))


@pytest.mark.parametrize(("implementation", "interpret"), [("xla", False), *BACKENDS])
def test_ids_of_64_bits_do_not_wrap_into_rows(implementation, interpret, x64):
    ids = jnp.asarray([2, 2**32 + 1, -(2**32) + 1, 3], jnp.int64)
    table = jnp.ones((4, 128), jnp.float32)
    rows = jax.jit(lambda t, i: ops.gather_rows(t, i, implementation=implementation, interpret=interpret))(table, ids)
    np.testing.assert_array_equal(rows[:, 0], [1, 0, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "interpret"), [*BACKENDS, SIMULATED[0]])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_gradients_equal_those_of_the_reference(implementation, interpret, pooling):
    case = CASES["no rows among the ids"]
    table, weights = jnp.asarray(case.table(128)), jnp.asarray(case.weights())

    def gradients(implementation, interpret):
        def loss(table, weights):
            out = ops.embedding_bag(
                table, case.ids, case.lengths, weights=weights, pooling=pooling, implementation=implementation,
                interpret=interpret,
            )  # fmt: skip
            return (out**2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(table, weights)

    for ours, theirs in zip(gradients(implementation, interpret), gradients("reference", False), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize(("implementation", "interpret"), BACKENDS)
def test_gathers_have_gradients(implementation, interpret):
    case = CASES["duplicates"]
    table = jnp.asarray(case.table(128))

    def loss(table):
        rows = ops.gather_rows(table, case.ids, implementation=implementation, interpret=interpret)
        return (rows**2).sum()

    counts = np.bincount(case.ids, minlength=case.num_rows).astype(np.float32)
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(table), 2 * table * counts[:, None], rtol=1e-5)


def test_weights_of_packed_rows_have_gradients():
    case = CASES["empty bags"]
    packed = ops.pack_rows(jnp.asarray(case.table(256)))
    weights = jnp.asarray(case.weights())

    def loss(weights, implementation, interpret):
        out = ops.embedding_bag(
            packed, case.ids, case.lengths, weights=weights, implementation=implementation, interpret=interpret
        )
        return (out**2).sum()

    ours = jax.jit(jax.grad(lambda w: loss(w, "pallas_tpu", True)))(weights)
    theirs = jax.jit(jax.grad(lambda w: loss(w, "reference", False)))(weights)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def _occurrences(count, num_rows, hot, dim=128):
    """Rows of occurrences, one of them `hot` times, some that are no row, and their gradients."""
    rng = np.random.default_rng(count)
    rows = rng.integers(0, num_rows + 3, count)
    rows[rng.permutation(count)[:hot]] = 2
    return rows.astype(np.int32), rng.normal(size=(count, dim)).astype(np.float32)


def test_runs_of_a_gpu_are_all_places_of_the_rows_that_are_longer_than_one(monkeypatch):
    """The second pass, over these runs, takes no row that is longer; what is summed is not looked at."""
    lengths, longest = np.int32([3, 130, 64, 65, 0, 128]), 64

    @jax.jit
    def runs_of(lengths):
        seen = []

        def note(segments, **_):
            seen.append(segments)
            return jnp.zeros((segments.counts.shape[0], 1), jnp.float32)

        monkeypatch.setattr(pallas_gpu, "_sum", note)
        ends = jnp.cumsum(lengths)
        source = jnp.zeros((400, 1), jnp.float32)
        short, _ = pallas_gpu._sum_long(pallas_gpu._Segments(source, None, ends - lengths, lengths), interpret=True)
        runs, again = seen[0], seen[-1]
        return runs.starts, runs.counts, short.counts, again.counts

    starts, counts, short, again = (np.asarray(x) for x in runs_of(lengths))
    places = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])
    ends = np.cumsum(lengths)
    np.testing.assert_array_equal(
        places, np.concatenate([np.arange(e - n, e) for e, n in zip(ends, lengths, strict=True) if n > longest])
    )
    assert counts.max() == longest
    np.testing.assert_array_equal(short, np.where(lengths > longest, 0, lengths))
    np.testing.assert_array_equal(again[again > 0], [3, 2, 2])


@pytest.mark.slow
@pytest.mark.parametrize(("count", "hot"), [(40, 0), (64, 64), (65, 65), (700, 600), (9000, 8500)])
def test_sums_of_hot_rows_equal_literal_sums(count, hot):
    rows, grads = _occurrences(count, 30, hot)
    plan = ops.plan_rows_host(rows, 30, 30)
    sums = jax.jit(
        lambda g: ops.sum_by_row(g, jax.tree.map(jnp.asarray, plan), implementation="pallas_gpu", interpret=True)
    )(grads)
    expected = np.stack([grads[rows == row].astype(np.float64).sum(axis=0) for row in plan.rows])
    # Float32 sums of n values of size 1 by runs of 64: errors of about 64 + n / 64 roundings.
    np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=2e-4)


@pytest.mark.slow
def test_the_sum_of_a_hot_row_does_not_depend_on_the_rest_of_the_batch():
    rows, grads = _occurrences(700, 30, 600)

    @jax.jit
    def sums(rows, grads):
        plan = ops.plan_rows(rows, num_rows=30, capacity=30)
        return ops.sum_by_row(grads, plan, implementation="pallas_gpu", interpret=True), plan.rows

    made, distinct = sums(rows, grads)
    # The same occurrences behind others, of rows that sort before and after them.
    order = np.concatenate([np.flatnonzero(rows != 2), np.flatnonzero(rows == 2)])
    moved = np.where(rows == 2, 2, rows % 2 * 5)[order]
    again, distinct_again = sums(moved.astype(np.int32), grads[order])
    np.testing.assert_array_equal(made[np.asarray(distinct) == 2], again[np.asarray(distinct_again) == 2])


def _sgd(rate):
    return lambda arrays, grads: (arrays[0] - rate * grads,)


def _adagrad(rate):
    def step(arrays, grads):
        accumulator = arrays[1] + grads * grads
        return arrays[0] - rate * grads / (jnp.sqrt(accumulator) + 1e-8), accumulator

    return step


def _rowwise_adagrad(rate):
    def step(arrays, grads):
        accumulator = arrays[1] + (grads * grads).sum(axis=1) * (1.0 / grads.shape[1])
        return arrays[0] - (rate / (jnp.sqrt(accumulator) + 1e-8))[:, None] * grads, accumulator

    return step


OPTIMIZERS = {"sgd": _sgd, "adagrad": _adagrad, "row-wise adagrad": _rowwise_adagrad}


def _arrays(optimizer, num_rows, dim=128):
    rng = np.random.default_rng(num_rows)
    table = jnp.asarray(rng.normal(size=(num_rows, dim)), jnp.float32)
    match optimizer:
        case "sgd":
            return (table,)
        case "adagrad":
            return table, jnp.asarray(rng.random((num_rows, dim)), jnp.float32)
        case _:
            return table, jnp.asarray(rng.random(num_rows), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "implementation", "interpret"),
    [
        *(("adagrad", *backend) for backend in BACKENDS),
        ("row-wise adagrad", "pallas_tpu", WAIT),
        *((o, *backend) for o in OPTIMIZERS for backend in BACKENDS if o != "adagrad"),
        ("adagrad", "pallas_tpu", EAGER),
    ],
)
def test_updates_equal_those_of_the_reference_and_touch_nothing_else(optimizer, implementation, interpret):
    num_rows, capacity = 700, 600  # three blocks of rows and a part of one
    rows, grads = _occurrences(capacity, num_rows, 50)
    arrays, make = _arrays(optimizer, num_rows), OPTIMIZERS[optimizer]

    @jax.jit
    def update(arrays, grads, rate):
        plan = ops.plan_rows(jnp.asarray(rows), num_rows=num_rows, capacity=capacity)
        sums = ops.sum_by_row(grads, plan)
        # The rate is data of the program, not a constant of the kernel.
        return ops.update_rows(arrays, plan, sums, make(rate), implementation=implementation, interpret=interpret)

    updated = update(arrays, grads, jnp.float32(0.1))
    plan = jax.tree.map(jnp.asarray, ops.plan_rows_host(rows, num_rows, capacity))
    expected = ops.update_rows(arrays, plan, ops.sum_by_row(grads, plan), make(0.1), implementation="reference")
    untouched = ~np.isin(np.arange(num_rows), rows)
    assert 0 < untouched.sum() < num_rows
    for ours, theirs, before in zip(updated, expected, arrays, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(ours[untouched], before[untouched])


@pytest.mark.default_cases("pallas_tpu-True", "xla-False")
@pytest.mark.parametrize(("implementation", "interpret"), [BACKENDS[0], SIMULATED[0], ("xla", False)])
def test_packed_rows_are_updated_in_float32_and_rounded_once(implementation, interpret):
    num_rows, capacity = 20, 20
    rows, _ = _occurrences(capacity, num_rows, 3)
    grads = np.random.default_rng(1).normal(size=(capacity, 256)).astype(np.float32)
    packed = ops.pack_rows(_arrays("sgd", num_rows, 256)[0])
    plan = jax.tree.map(jnp.asarray, ops.plan_rows_host(rows, num_rows, capacity))
    (updated,) = jax.jit(
        lambda t, g: ops.update_rows(
            (t,), plan, ops.sum_by_row(g, plan), _sgd(0.5), implementation=implementation, interpret=interpret
        )
    )(packed, grads)
    before = np.asarray(ops.unpack_rows(packed).astype(jnp.float32))
    expected = before.copy()
    for row in plan.rows:
        if row < num_rows:
            expected[row] -= np.float32(0.5) * grads[rows == row].astype(np.float64).sum(axis=0).astype(np.float32)
    # One bfloat16 place: the sums may differ in their last bit, and with it the direction of rounding.
    np.testing.assert_allclose(ops.unpack_rows(updated).astype(jnp.float32), expected, rtol=2**-8, atol=1e-6)


ENGINE = {
    "Sgd": (),
    "Adagrad": ("each",),
    "RowwiseAdagrad": ("row",),
    "LarsSgd": ("each",),
    "Adam": ("each", "each"),
    "PartialRowwiseAdam": ("each", "row"),
    "Lamb": ("each", "each"),
    "PartialRowwiseLamb": ("each", "row"),
}
"""Optimizers of the engine: whether each of their states has a number for each column or one for the row."""


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ENGINE)
@pytest.mark.parametrize(("implementation", "dim"), [("pallas_tpu", 128), ("pallas_gpu", 128), ("pallas_gpu", 4)])
def test_steps_of_the_embedding_engine_run_inside_kernels(implementation, dim, optimizer):
    num_rows, rng = 20, np.random.default_rng(3)
    rows, grads = _occurrences(20, num_rows, 5, dim)
    states = [(num_rows, dim) if kind == "each" else (num_rows,) for kind in ENGINE[optimizer]]
    arrays = tuple(jnp.asarray(rng.random(shape), jnp.float32) for shape in [(num_rows, dim), *states])
    plan = jax.tree.map(jnp.asarray, ops.plan_rows_host(rows, num_rows, 20))
    optimizer = getattr(config, optimizer)(learning_rate=0.1)

    @functools.partial(jax.jit, static_argnums=(3, 4))
    def update(arrays, grads, count, implementation, interpret):
        step = optimizers.step(optimizer, jnp.float32(1), jnp.int32(0), rounding.runtime_zero(count))
        return ops.update_rows(
            arrays, plan, ops.sum_by_row(grads, plan), step, implementation=implementation, interpret=interpret
        )

    ours = update(arrays, grads, jnp.int32(1), implementation, True)
    theirs = update(arrays, grads, jnp.int32(1), "xla", False)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-7)


def test_what_a_kernel_cannot_take_is_refused_and_never_done_by_another():
    ids, lengths = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)
    refused = [
        ("pallas_tpu", jnp.zeros((4, 64)), "multiple of 128"),
        ("pallas_tpu", jnp.zeros((4, 128), jnp.bfloat16), "packed by pack_rows"),
        ("pallas_tpu", jnp.zeros((4, 64), jnp.uint32), "multiple of 256"),
        ("pallas_gpu", jnp.zeros((4, 64), jnp.uint32), "Packed rows are for TPUs"),
        ("cuda", jnp.zeros((4, 64)), "got 'cuda'"),
    ]
    for implementation, table, message in refused:
        with pytest.raises(ValueError, match=message):
            ops.gather_rows(table, ids, implementation=implementation)
        with pytest.raises(ValueError, match=message):
            ops.embedding_bag(table, ids, lengths, implementation=implementation)
    plan = ops.plan_rows(ids, num_rows=4, capacity=2)
    for op in (ops.sum_by_row, lambda g, p, **kw: ops.pool_rows(g, p.slots, 2, **kw)):
        with pytest.raises(ValueError, match="implementation must be None or one of"):
            op(jnp.zeros((2, 128)), plan, implementation="pallas_tpu")
    with pytest.raises(ValueError, match="Leave one of them out"):
        ops.sum_by_row(jnp.zeros((2, 128)), plan, implementation="pallas_gpu", summation="tree")


@pytest.mark.without_a_gpu
@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_kernels_refuse_to_run_where_their_chip_is_not(implementation):
    ids, lengths = jnp.zeros(2, jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match=r"(?i)interpret mode"):
        ops.embedding_bag(jnp.zeros((4, 128)), ids, lengths, implementation=implementation)


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_a_step_that_a_kernel_cannot_hold_is_refused(implementation):
    plan = ops.plan_rows(jnp.zeros(2, jnp.int32), num_rows=4, capacity=2)
    table, sums, rates = jnp.zeros((4, 128)), jnp.zeros((2, 128)), jnp.ones(128)

    def update(table, sums, step):
        return ops.update_rows((table,), plan, sums, step, implementation=implementation, interpret=True)

    with pytest.raises(ValueError, match=r"it captures float32\[128\]"):
        update(table, sums, lambda a, g: (a[0] - rates[None] * g,))
    with pytest.raises(ValueError, match="step must return its arrays"):
        update(table, sums, lambda a, g: (a[0].sum(axis=1),))
    with pytest.raises(ValueError, match="float32; sums are bfloat16"):
        update(table, sums.astype(jnp.bfloat16), _sgd(0.1))
    with pytest.raises(ValueError, match=r"power of two|multiple of 128"):
        update(jnp.zeros((4, 96)), jnp.zeros((2, 96)), _sgd(0.1))


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_nothing_in_gives_nothing_out(implementation):
    table, none = jnp.ones((4, 128)), jnp.zeros(0, jnp.int32)
    assert ops.gather_rows(table, none, implementation=implementation).shape == (0, 128)
    pooled = ops.embedding_bag(table, none, jnp.zeros(3, jnp.int32), implementation=implementation)
    np.testing.assert_array_equal(pooled, np.zeros((3, 128)))
    if implementation == "pallas_gpu":
        pooled = ops.gather_and_pool_rows(table, none, none, 3, implementation=implementation)
        np.testing.assert_array_equal(pooled, np.zeros((3, 128)))
