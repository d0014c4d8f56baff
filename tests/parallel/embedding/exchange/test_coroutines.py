"""What stacks send at a time goes by one collective, and arrives as if each had sent it alone."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changes import changed
from embedding_cases import (
    OPTIMIZERS,
    SIX_WIDTHS,
    batch,
    device_features,
    given_grads,
    random_logical,
    six_widths,
    two_steps,
    wide_tables,
)
from jax import lax
from jax.sharding import PartitionSpec as P

from scalejax.configs.recsys import wukong
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.exchange.coroutines import complete, send, together
from scalejax.parallel.embedding.plan.sharding_plan import Exchange, ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding
from scalejax.train.runs import binding

BATCH = 16


def equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def blocks_of(dtype, *shape):
    """Random bits of integers; floats of all magnitudes, NaN and infinite ones among them.

    No subnormal ones and no NaNs with other bits: a CPU widens floats of 16 bits to move them, and changes these.
    """
    rng = np.random.default_rng(len(shape))
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return rng.integers(info.min, info.max, (64, *shape), dtype, endpoint=True)
    info = jnp.finfo(dtype)
    found = rng.choice([-1.0, 1.0], (64, *shape)) * np.exp2(rng.uniform(info.minexp, info.maxexp - 1, (64, *shape)))
    found.flat[:3] = np.nan, np.inf, -np.inf
    return found.astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "bfloat16", "int32"),
        ("int8", "float16", "float32"),
        ("uint8", "float8_e4m3fn", "bfloat16"),
    ],
)
def test_arrays_of_any_shape_and_dtype_arrive_as_if_each_had_travelled_alone(dtypes):
    """The second coroutine has one hop more, over fewer devices; the third has none."""
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    everywhere = P(("replica", "fsdp"))
    axes = ("replica", "fsdp")
    shapes = ((3, 5), (7,), (2, 1, 9))
    arrays = [blocks_of(dtype, *shape) for dtype, shape in zip(dtypes, shapes, strict=True)]

    def coroutine(x):
        return (yield from send(axes, x))

    def longer(x):
        came = yield from send(axes, x)
        return (yield from send(("fsdp",), came[:4]))

    def still(x):
        return (yield from together([])) or x

    def shared(a, b, c):
        one, (two, three), four = complete(together([coroutine(a), together([longer(b), coroutine(c)]), still(a)]))
        return one, two, three, four

    def alone(a, b, c):
        def move(x, over=axes):
            return lax.all_to_all(x, over, 0, 0, tiled=True)

        return move(a), move(move(b)[:4], ("fsdp",)), move(c), a

    def run(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
        return jax.jit(mapped).lower(*arrays).compile()

    programs = run(shared), run(alone)
    found = ([np.asarray(x).view(np.uint8) for x in program(*arrays)] for program in programs)
    equal(*found)
    assert [program.as_text().count(" all-to-all(") for program in programs] == [2, 4]


KINDS = {"shared": "row_wise", "big": "table_wise", "means": "table_row_wise", "tiny": "row_wise"}


def several_widths(name, dtypes=("float32",)):
    """One table a width, and so one stack: rows, bags and in two levels sums of a host travel at a time."""
    widths, dtype = (8, 48, 32, 16), itertools.cycle(dtypes)
    return tuple(
        dataclasses.replace(table, dim=width, dtype=next(dtype))
        for table, width in zip(wide_tables(OPTIMIZERS[name]), widths, strict=True)
    )


def collection(tables, exchange, devices=8, hosts=2, kinds=KINDS, columns=1):
    plan = ShardingPlan(tables=tuple(TablePlan(table=t.name, kind=kinds[t.name], columns=columns) for t in tables))
    mesh = meshes.make_mesh(MeshShape(replica=hosts), jax.devices()[:devices])
    return EmbeddingCollection(tables=tables, mesh=mesh, plan=plan, exchange=exchange)


TWO_LEVEL = {"capacity_factor": 8.0, "route": "two_level"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "weighted", "dtypes"),
    [
        pytest.param({"capacity_factor": 8.0}, False, ("float32", "bfloat16"), id="dtypes"),
        pytest.param(TWO_LEVEL, False, ("bfloat16", "float32"), id="two_level dtypes"),
        pytest.param(
            TWO_LEVEL | {"forward": "int8", "backward": "bfloat16", "within_host": "bdr_mx9"},
            True,
            ("float32", "bfloat16"),
            id="formats",
        ),
    ],
)
def test_stacks_that_travel_together_equal_those_that_travel_alone_to_the_bit(exchange, weighted, dtypes):
    tables, host = several_widths("adagrad", dtypes), batch(BATCH, weighted=weighted)
    on = collection(tables, Exchange(**exchange))
    assert len(on.stacks) == 4
    logical, grads = random_logical(on), given_grads(tables, host)
    embedded, after = two_steps(on, device_features(on, host, BATCH), grads, logical)
    for table in tables:
        alone = collection((table,), on.exchange)
        own = {name: grads[name] for name in table.features}
        found = two_steps(alone, device_features(alone, host, BATCH), own, {table.name: logical[table.name]})
        equal(found, ({name: embedded[name] for name in table.features}, {table.name: after[table.name]}))
    if on.exchange.forward == "full":
        one = collection(tables, on.exchange, devices=1, hosts=1, kinds=dict.fromkeys(KINDS, "row_wise"))
        equal(two_steps(one, device_features(one, host, BATCH), grads, logical), (embedded, after))


def step_of(on, features):
    """A compiled step of lookup and update."""

    def step(state, features):
        embedded, routing = on.lookup(state, features)
        return on.update(state, routing, {name: x + 1 for name, x in embedded.items()})

    return jax.jit(step).lower(on.abstract_state(), features).compile()


@pytest.mark.slow
def test_statistics_of_columns_of_all_stacks_travel_together_too():
    tables = [dataclasses.replace(t, dim=dim) for t, dim in zip(several_widths("rowwise")[1:3], (32, 64), strict=True)]
    on = collection(tuple(tables), Exchange(), kinds=dict.fromkeys(KINDS, "column_wise"), columns=2)
    assert [stack.exchanges_statistics for stack in on.stacks] == [True, True]
    text = step_of(on, device_features(on, None, BATCH)).as_text()
    assert text.count(" all-to-all(") == 3 + 2  # sums of squares to those who looked up, means to the owners


@pytest.mark.slow
@pytest.mark.parametrize(
    ("route", "pipeline"),
    [
        ("flat", "none"),
        ("flat", "stale"),
        ("two_level", "none"),
    ],
)
def test_a_step_of_a_click_model_has_one_all_to_all_per_hop_and_direction(route, pipeline):
    recipe = changed(six_widths(wukong.smoke()), tables__exchange__route=route, tables__pipeline=pipeline)
    hosts = 2 if route == "two_level" else 1
    mesh = meshes.make_mesh(MeshShape(replica=hosts))
    program = binding.bind(recipe, recipe.data.schema(), mesh, abstract=True)
    assert {table.dim for table in program.collection.tables} == set(SIX_WIDTHS)
    assert len(program.collection.stacks) == len(SIX_WIDTHS)
    step, arguments = program.repeated_step()
    found = [c for c in explain_sharding(step.lower(*arguments).compile(), mesh) if c.kind == "all-to-all"]
    counts = {axes: sum(c.count for c in found if c.axes == axes) for axes in {c.axes for c in found}}
    assert counts == ({("replica",): 3, ("fsdp",): 3} if hosts > 1 else {("fsdp",): 3})  # ids, vectors, gradients
