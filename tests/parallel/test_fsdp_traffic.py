"""What a step moves and holds, against the formulas of the paper (section 3.2 of arXiv 2304.11277)."""

import dataclasses

import jax
import numpy as np
import pytest
import residual_stack
import stablehlo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients import blocks
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding

DIM, HIDDEN, LAYERS = 32, 64, 3
NUMBER = 4  # bytes
OUTSIDE = (2 * residual_stack.V * DIM + DIM) * NUMBER
INSIDE = LAYERS * (2 * DIM * HIDDEN + DIM) * NUMBER


def lowered(strategy, mesh, layers=LAYERS, dim=DIM, hidden=HIDDEN, **more):
    return residual_stack.lowered(strategy, mesh, layers=layers, dim=dim, hidden=hidden, **more)


def moved(collectives):
    """{(kind, axis): (payload, least bytes a device must send)} without sums of single numbers."""
    found = {}
    for c in collectives:
        if c.bytes > 3 * NUMBER * c.count:  # sum, weight and aux, which a compiler may put together
            payload, least = found.get((c.kind, c.axis), (0, 0))
            found[c.kind, c.axis] = (payload + c.bytes, least + c.minimum_bytes)
    return found


def expected(sharding, replica, shards):
    """The formulas: gathers of M forward and, if copies are dropped, again backward; M reduced; M / F over replicas."""
    gathered = {"FULL_SHARD": 2, "HYBRID_SHARD": 2}.get(sharding, 1) * INSIDE + OUTSIDE
    whole = INSIDE + OUTSIDE
    if sharding == "NO_SHARD":
        axis = "+".join(name for name, n in (("replica", replica), ("fsdp", shards)) if n > 1)
        return {("all-reduce", axis): (whole, 2 * whole * (replica * shards - 1) // (replica * shards))}
    if "HYBRID" not in sharding and replica > 1:
        axis, shards = "replica+fsdp", replica * shards
    else:
        axis = "fsdp"
    found = {
        ("all-gather", axis): (gathered, gathered * (shards - 1) // shards),
        ("reduce-scatter", axis): (whole, whole * (shards - 1) // shards),
    }
    if "HYBRID" in sharding and replica > 1:
        found["all-reduce", "replica"] = (whole // shards, 2 * (whole // shards) * (replica - 1) // replica)
    return found


STRATEGIES = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


@pytest.mark.default_cases
@pytest.mark.parametrize("sharding", STRATEGIES)
@pytest.mark.parametrize("replica", [1, 2])
def test_stated_bytes_equal_the_formulas(sharding, replica):
    mesh = meshes.make_mesh(MeshShape(replica=replica, fsdp=8 // replica))
    found = stablehlo.stated_collectives(lowered(Fsdp(sharding=sharding, form="explicit"), mesh), mesh)
    assert all(c.trip_count_known for c in found)
    assert moved(found) == expected(sharding, replica, 8 // replica)


@pytest.mark.default_cases("HYBRID_SHARD-2")
@pytest.mark.parametrize(("sharding", "replica"), [("FULL_SHARD", 1), ("SHARD_GRAD_OP", 1), ("HYBRID_SHARD", 2)])
def test_compiled_bytes_equal_the_formulas(sharding, replica):
    mesh = meshes.make_mesh(MeshShape(replica=replica, fsdp=8 // replica))
    compiled = lowered(Fsdp(sharding=sharding, form="explicit"), mesh).compile()
    assert moved(explain_sharding(compiled, mesh)) == expected(sharding, replica, 8 // replica)


@pytest.mark.parametrize("parts", [2, 4])
def test_local_accumulation_reduces_once_and_the_other_in_each_part(parts):
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    rows = 8 * parts
    for accumulate, times in (("communicate", parts), ("local", 1)):
        strategy = Fsdp(form="explicit", accumulate=accumulate)
        found = moved(stablehlo.stated_collectives(lowered(strategy, mesh, parts=parts, rows=rows), mesh))
        assert found["reduce-scatter", "fsdp"][0] == times * (INSIDE + OUTSIDE)
        assert found["all-gather", "fsdp"][0] == parts * (2 * INSIDE + OUTSIDE)


def test_parameters_travel_in_their_dtype_and_gradients_in_theirs():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    for param, reduce, gather_width, reduce_width in (
        ("bfloat16", "float32", 2, 4),
        ("bfloat16", None, 2, 2),
        (None, "bfloat16", 4, 2),
    ):
        strategy = Fsdp(form="explicit", param_dtype=param, reduce_dtype=reduce)
        found = moved(stablehlo.stated_collectives(lowered(strategy, mesh), mesh))
        assert found["all-gather", "fsdp"][0] == (2 * INSIDE + OUTSIDE) * gather_width // NUMBER
        assert found["reduce-scatter", "fsdp"][0] == (INSIDE + OUTSIDE) * reduce_width // NUMBER


@pytest.mark.default_cases("HYBRID_SHARD-implicit")
@pytest.mark.parametrize("form", ["explicit", "implicit"])
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "HYBRID_SHARD", "NO_SHARD"])
def test_arguments_take_what_is_sharded_over_f_and_what_is_whole(form, sharding):
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    strategy = Fsdp(sharding=sharding, form=form, replicate_below=DIM + 1)
    norms, batch = (LAYERS + 1) * DIM * NUMBER, 16 // 8 * 4 * 3 * NUMBER
    shards = {"FULL_SHARD": 8, "HYBRID_SHARD": 4, "NO_SHARD": 1}[sharding]
    memory = lowered(strategy, mesh).compile().memory_analysis()
    assert memory.argument_size_in_bytes == (INSIDE + OUTSIDE - norms) // shards + norms + batch


@pytest.mark.slow
@pytest.mark.parametrize("loss", [residual_stack.loss, residual_stack.without_remat], ids=["remat", "no remat"])
def test_temporaries_grow_by_whole_layers_only_if_gathered_copies_are_kept(loss):
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    dim, hidden = 64, 512
    layer = 2 * dim * hidden * NUMBER

    def growth(sharding):
        """Bytes that one more layer adds, of gathered parameters and whatever else is kept of it."""
        sizes = [
            lowered(Fsdp(sharding=sharding, form="explicit"), mesh, n, dim, hidden, rows=8, loss=loss)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
            for n in (4, 12)
        ]
        return (sizes[1] - sizes[0]) / 8

    # A layer is large beside a shard of it (1/8) and beside the activations of one row of 4 tokens.
    assert growth("FULL_SHARD") < 0.4 * layer
    assert growth("SHARD_GRAD_OP") > 0.9 * layer


@pytest.mark.slow
def test_temporaries_grow_with_the_largest_block():
    mesh = meshes.make_mesh(MeshShape(fsdp=8))

    def temporaries(hidden):
        compiled = lowered(Fsdp(form="explicit"), mesh, 6, 64, hidden, rows=8).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    added = 2 * 64 * 512 * NUMBER  # to each of six layers
    assert added < temporaries(1024) - temporaries(512) < 4 * added


@pytest.mark.default_cases("sizes0", "sizes3", "sizes6")
@pytest.mark.parametrize("sizes", [(1, 8, 1), (8, 1, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2)])
def test_reduce_scatter_inside_and_all_reduce_across_are_the_global_sum(sizes):
    replica, shards, expert = sizes
    mesh = meshes.make_mesh(MeshShape(replica=replica, fsdp=shards, expert=expert))
    rng = np.random.default_rng(0)
    each = rng.integers(-1000, 1000, (8, 3, 16)).astype(np.float32)  # sums of whole numbers are exact
    for sharding in ("FULL_SHARD", "HYBRID_SHARD"):
        strategy = Fsdp(sharding=sharding, form="explicit")
        (placed,) = fsdp.place({"w": (("a", "b"), (3, 16))}, strategy, mesh=mesh)
        where = blocks.layouts({"w": placed.spec}, {"w": 2}, mesh)
        exchange = strategy.exchange(where, blocks.data_axes(mesh))
        rows = P(meshes.BATCH_AXES)
        summed = jax.shard_map(
            lambda g, exchange=exchange: exchange.reduce({"w": g[0]}, {}, None)[0]["w"],
            mesh=mesh, in_specs=rows, out_specs=placed.spec, check_vma=False,
        )(each)  # fmt: skip
        np.testing.assert_array_equal(summed, each.sum(0))
        assert summed.sharding.is_equivalent_to(NamedSharding(mesh, placed.spec), 2)


@dataclasses.dataclass(frozen=True)
class Broken(Fsdp):
    """A strategy with one mistake."""

    mistake: str = ""

    def exchange(self, layouts, axes):
        return _BrokenExchange(layouts=layouts, axes=axes, mistake=self.mistake)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class _BrokenExchange(blocks.UncompressedExchange):
    mistake: str

    def _gather(self, path, x):
        if self.mistake == "a gather is missing" and path == "layers/mlp/up":
            ((dim, axes),) = self.layouts[path].dimensions(x.ndim)
            return jax.numpy.concatenate([x] * jax.lax.axis_size(axes), axis=dim)
        return super()._gather(path, x)

    def _reduce(self, path, x):
        if self.mistake == "a mean of means":
            return super()._reduce(path, x) / jax.lax.axis_size(self.axes)
        if self.mistake == "a sum over one axis is missing":
            return dataclasses.replace(self, axes=("fsdp",), mistake="")._reduce(path, x)
        return super()._reduce(path, x)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("mistake", ["", "a gather is missing", "a mean of means", "a sum over one axis is missing"])
def test_mistakes_of_an_exchange_show_in_gradients(mistake):
    mesh = meshes.make_mesh(MeshShape(replica=2, fsdp=4))
    strategy = Broken(sharding="HYBRID_SHARD", form="explicit", mistake=mistake)
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh)}
    params, batch = residual_stack.params(), residual_stack.batch()
    run = jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs))
    placed = {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()}
    *_, grads = run(placed, jax.device_put(batch, meshes.batch_sharding(mesh)))
    whole = jax.jit(jax.grad(lambda p: residual_stack.loss(p, batch, None)[0]))(params)
    worst = max(np.abs(np.asarray(g) - whole[path]).max() for path, g in grads.items())
    assert (worst > 1e-3) == bool(mistake)
    assert mistake or worst < 1e-12
