"""The GPU kernels of embedding tables: checked against XLA, then timed beside it and beside a plain copy.

python benchmarks/gpu_embedding.py [--json FILE] [--seconds 300]      # on a machine with a GPU
python benchmarks/gpu_embedding.py --smoke                            # anywhere: tiny sizes, kernels interpreted

One JSON object a line, to standard output and to FILE, as gpu_report.py says. `checks` come first: every kernel on
every case of tests/cases/bag_cases.py against XLA; where one differs, nothing is timed and the exit status
is 1.

Letters in the formulas of bytes:

    N ids, B bags, U distinct rows among the ids, D columns, 4 bytes each; a row state of one number per row

Timings are of one program, without making the plan (which belongs to the batch) unless the case says "and plan".
"""

import functools
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests" / "cases"))

import jax
import jax.numpy as jnp
import numpy as np
from bag_cases import CASES
from gpu_report import Report, main, timed
from jax import lax

from scalejax.kernels import embedding_bag as ops
from scalejax.kernels.embedding_bag.api import Implementation

KERNELS: tuple[Implementation, ...] = ("pallas_gpu", "xla")
POOLINGS: tuple[Literal["sum", "mean"], ...] = ("sum", "mean")


def how(implementation: Implementation, interpret: bool) -> dict[str, Any]:
    """Options of the operations; XLA needs no interpreter."""
    return {"implementation": implementation, "interpret": interpret and implementation == "pallas_gpu"}


def rowwise_adagrad(rate: float) -> Callable[..., Any]:
    def step(arrays: tuple[jax.Array, ...], grads: jax.Array) -> tuple[jax.Array, ...]:
        accumulator = arrays[1] + (grads * grads).sum(axis=1) * (1.0 / grads.shape[1])
        return arrays[0] - (rate / (jnp.sqrt(accumulator) + 1e-8))[:, None] * grads, accumulator

    return step


def sum_and_update(
    arrays: tuple[jax.Array, ...], plan: ops.RowPlan, grads: jax.Array, step: Callable[..., Any], **options: Any
) -> tuple[jax.Array, ...]:
    return ops.update_rows(arrays, plan, ops.sum_by_row(grads, plan, **options), step, **options)


# Checks.


SMOKE_CASES = ("empty bags", "no rows among the ids", "large pooling")


def differences(interpret: bool, dims: tuple[int, ...], names: tuple[str, ...]) -> dict[str, float]:
    """Largest difference from XLA of every kernel, relative to the largest number of XLA's result."""
    found: dict[str, float] = {}

    def compare(name: str, make: Callable[[Implementation], Any]) -> None:
        ours, theirs = (jax.tree.leaves(jax.jit(lambda i=i: make(i))()) for i in KERNELS)
        worst = 0.0
        for a, b in zip(ours, theirs, strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            worst = max(worst, float(np.abs(a - b).max(initial=0)) / max(1.0, float(np.abs(b).max(initial=0))))
            if not np.isfinite(a).all():
                worst = float("inf")
        found[name] = worst

    def options(implementation: Implementation) -> dict[str, Any]:
        return how(implementation, interpret)

    for name in names:
        case = CASES[name]
        for dim in dims:
            for dtype in (jnp.float32, jnp.bfloat16):
                table = jnp.asarray(case.table(dim), dtype)
                for pooling, weights in zip(POOLINGS, (jnp.asarray(case.weights()), None), strict=True):
                    compare(
                        f"bag, {name}, {dim}, {table.dtype}, {pooling}",
                        lambda i, t=table, c=case, w=weights, p=pooling: ops.embedding_bag(
                            t, jnp.asarray(c.ids), jnp.asarray(c.lengths), weights=w, pooling=p, **options(i)
                        ),
                    )
                compare(
                    f"gather, {name}, {dim}, {table.dtype}",
                    lambda i, t=table, c=case: ops.gather_rows(t, jnp.asarray(c.ids), **options(i)),
                )
            rows = np.where(case.ids < 0, case.num_rows, case.ids)
            plan = jax.tree.map(jnp.asarray, ops.plan_rows_host(rows, case.num_rows, min(len(rows), case.num_rows)))
            grads = jnp.asarray(np.random.default_rng(dim).normal(size=(len(rows), dim)), jnp.float32)
            arrays = (jnp.asarray(case.table(dim)), jnp.full(case.num_rows, 0.1))
            compare(f"sums, {name}, {dim}", lambda i, g=grads, p=plan: ops.sum_by_row(g, p, **options(i)))
            compare(
                f"update, {name}, {dim}",
                lambda i, a=arrays, g=grads, p=plan: sum_and_update(a, p, g, rowwise_adagrad(0.1), **options(i)),
            )
    return found


def check(report: Report, *, smoke: bool) -> bool:
    found = differences(smoke, (16,), SMOKE_CASES) if smoke else differences(False, (128, 64, 16), tuple(CASES))
    wrong = {name: worst for name, worst in found.items() if not worst < 1e-5}  # NaN is wrong too
    report.line(case="checks", checked=len(found), worst=max(found.values()), tolerance=1e-5, wrong=wrong)
    return not wrong


# Timings.


def draw(kind: str, num_rows: int, count: int) -> np.ndarray:
    """int32 ids: "uniform"; "zipf", exponent 1.2, hot rows scattered over the table; "four of each"."""
    rng = np.random.default_rng(0)
    if kind == "uniform":
        return rng.integers(0, num_rows, count, dtype=np.int32)
    if kind == "four of each":
        rows = rng.integers(0, num_rows, count // 4, dtype=np.int32)
        return rng.permutation(np.tile(rows, 4))
    # The inverse of the distribution function of a continuous Zipf law on [1, V].
    power = 1 - 1.2
    rank = (1 + rng.random(count) * (float(num_rows) ** power - 1)) ** (1 / power)
    scattered = np.minimum(rank.astype(np.int64) - 1, num_rows - 1) * 1_000_003 % num_rows
    return scattered.astype(np.int32)


def large_table(num_rows: int, dim: int) -> jax.Array:
    """Numbers in [-1, 1) that differ by row and column, made in place."""

    @jax.jit
    def make() -> jax.Array:
        row, column = (lax.broadcasted_iota(jnp.uint32, (num_rows, dim), axis) for axis in (0, 1))
        mixed = (row * jnp.uint32(2654435761)) ^ (column * jnp.uint32(40503) * jnp.uint32(2246822519))
        return mixed.astype(jnp.float32) * jnp.float32(2**-31) - 1

    return jax.block_until_ready(make())


def lookups(report: Report, table: jax.Array, count: int, *, smoke: bool) -> None:
    dim = table.shape[1]
    for kind in ("uniform", "zipf"):
        ids = jnp.asarray(draw(kind, table.shape[0], count))
        for length in (1, 8):
            case = f"lookup, {table.shape[0]:.0e} x {dim}, {kind} ids, {length} a bag"
            if not report.has_time_for(case, 15):
                continue
            bags = count // length
            lengths = jnp.full(bags, length, jnp.int32)
            for implementation in KERNELS:
                look = jax.jit(functools.partial(ops.embedding_bag, **how(implementation, smoke)))
                report.timing(
                    case, implementation, timed(lambda f=look, i=ids, n=lengths: f(table, i, n)),
                    count * (4 + 4 * dim) + bags * (4 + 4 * dim), "N * (4 + 4 * D) + B * (4 + 4 * D)",
                    goal_share=0.8 if kind == "uniform" else None,
                )  # fmt: skip


def updates(report: Report, table: jax.Array, count: int, *, smoke: bool) -> jax.Array:
    """Lookup and row-wise AdaGrad in one program; gives the table back, which is updated in place."""
    num_rows, dim = table.shape
    grads = jax.random.normal(jax.random.key(0), (count, dim), jnp.float32) * 1e-3
    lengths = jnp.ones(count, jnp.int32)
    arrays = (table, jnp.full(num_rows, 0.1))
    del table
    for kind in ("four of each", "uniform", "zipf"):
        host = draw(kind, num_rows, count)
        touched = len(np.unique(host))
        moved = count * (4 + 4 * dim) + count * 4 * dim  # lookup
        moved += count * (4 * dim + 8) + touched * (2 * 4 * dim + 2 * 4 + 4)
        formula = "lookup N * (4 + 8 * D), then N * (4 * D + 8) for gradients + U * (8 * D + 12) for rows and states"
        ids, plan = jnp.asarray(host), jax.tree.map(jnp.asarray, ops.plan_rows_host(host, num_rows, count))
        for implementation in KERNELS:
            for planned in ("", " and plan"):
                case = f"forward and update{planned}, {num_rows:.0e} x {dim}, {kind} ids"
                if not report.has_time_for(case, 20):
                    continue
                options = how(implementation, smoke)

                def step(arrays, ids, plan, grads, options=options, on_device=bool(planned)):
                    pooled = ops.embedding_bag(arrays[0], ids, lengths, **options)
                    if on_device:
                        plan = ops.plan_rows(ids, num_rows=num_rows, capacity=count)
                    return sum_and_update(arrays, plan, grads, rowwise_adagrad(0.01), **options), pooled

                compiled, state = jax.jit(step, donate_argnums=0), [arrays]

                def call(f=compiled, state=state, ids=ids, plan=plan):
                    state[0], pooled = f(state[0], ids, plan, grads)
                    return pooled

                seconds = timed(call)
                arrays = state[0]
                goal = {"four of each": 0.6, "uniform": 0.45}.get(kind)
                report.timing(
                    case, implementation, seconds, moved, formula,
                    duplicates=count / touched, goal_share=None if planned else goal,
                )  # fmt: skip
    return arrays[0]


def small_tables(report: Report, *, smoke: bool) -> None:
    """All tables in one call, against a call for each, in one program either way."""
    tables, num_rows, dim, batch = (3, 20, 16, 8) if smoke else (100, 10_000, 64, 2048)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, num_rows, (tables, batch), dtype=np.int32)
    grads = jnp.asarray(rng.normal(size=(tables, batch, dim)), jnp.float32)
    stacked = ids + np.arange(tables, dtype=np.int32)[:, None] * num_rows
    together = jax.tree.map(jnp.asarray, ops.plan_rows_host(stacked.reshape(-1), tables * num_rows, tables * batch))
    each = jax.tree.map(jnp.asarray, ops.plan_tables_host(ids, num_rows, batch))
    ones = jnp.ones(tables * batch, jnp.int32)
    moved = tables * batch * (4 + 8 * dim + 4 * dim + 8)
    moved += sum(len(np.unique(row)) for row in ids) * (8 * dim + 12)
    formula = "N * (4 + 8 * D) + N * (4 * D + 8) + U * (8 * D + 12) over all tables"
    for implementation in KERNELS:
        options = how(implementation, smoke)
        if not report.has_time_for(f"{tables} small tables", 60):
            continue

        def look_and_update(arrays, ids, plan, grads, options=options):
            pooled = ops.embedding_bag(arrays[0], ids, ones[: ids.shape[0]], **options)
            return sum_and_update(arrays, plan, grads, rowwise_adagrad(0.01), **options), pooled

        def loop(all_arrays, one=look_and_update):
            plans = [jax.tree.map(lambda x, t=t: x[t], each) for t in range(tables)]
            return [one(a, jnp.asarray(ids[t]), plans[t], grads[t]) for t, a in enumerate(all_arrays)]

        fused = jax.jit(look_and_update, donate_argnums=0)
        looped = jax.jit(loop, donate_argnums=0)
        state = [(jnp.ones((tables * num_rows, dim)), jnp.full(tables * num_rows, 0.1))]
        states = [[(jnp.ones((num_rows, dim)), jnp.full(num_rows, 0.1)) for _ in range(tables)]]
        flat_ids, flat_grads = jnp.asarray(stacked.reshape(-1)), grads.reshape(-1, dim)

        def call_fused(f=fused, state=state, flat_ids=flat_ids, flat_grads=flat_grads):
            state[0], pooled = f(state[0], flat_ids, together, flat_grads)
            return pooled

        def call_looped(f=looped, states=states):
            made = f(states[0])
            states[0] = [arrays for arrays, _ in made]
            return [pooled for _, pooled in made]

        # The same work, before it is timed.
        pooled, one_by_one = call_fused(), jnp.concatenate(call_looped())
        np.testing.assert_allclose(pooled, one_by_one, rtol=1e-5, atol=1e-5)
        fused_s, looped_s = timed(call_fused), timed(call_looped)
        name = f"{tables} tables of {num_rows} x {dim}, batch {batch}"
        report.timing(f"fused, {name}", implementation, fused_s, moved, formula)
        report.timing(f"table after table, {name}", implementation, looped_s, moved, formula)
        report.line(case=f"fused over table after table, {name}", implementation=implementation,
                    ratio=looped_s / fused_s, goal=3.0)  # fmt: skip


def time_cases(report: Report, *, smoke: bool) -> None:
    dim, count, num_rows = 16, 256, 1000
    if not smoke:
        memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16 * 2**30)
        dim, num_rows = 128, int(min(1e8, 0.55 * memory / (4 * 128)))
        count = 2**22 if memory > 60 * 2**30 else 2**20
    table = large_table(num_rows, dim)
    lookups(report, table, count, smoke=smoke)
    table = updates(report, table, count, smoke=smoke)
    del table
    small_tables(report, smoke=smoke)


if __name__ == "__main__":
    sys.exit(main("gpu_embedding", __doc__, check, time_cases, seconds=300))
