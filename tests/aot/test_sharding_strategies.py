"""What the compiler for TPUs makes of strategies of sharding: docs/parallelism.md has the table for larger sizes."""

import jax
import numpy as np
import pytest
import residual_stack
import stablehlo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import mesh as meshes
from scalejax.parallel import offload, xla_flags
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.rules import Rules
from scalejax.plan import explain_sharding, topology

pytestmark = pytest.mark.aot

LAYERS, DIM, HIDDEN = 2, 256, 512
NUMBER = 4
INSIDE = LAYERS * (2 * DIM * HIDDEN + DIM) * NUMBER
OUTSIDE = (2 * residual_stack.V * DIM + DIM) * NUMBER
MATRIX = DIM * HIDDEN * NUMBER

CHIPS = pytest.mark.parametrize("chip", ["v5p:2x2x2", "v6e:2x4"])
IN_TURN = pytest.mark.parametrize(("chip", "form"), [("v5p:2x2x2", "implicit"), ("v6e:2x4", "explicit")])


def lowered(chip, strategy, axes="fsdp=8", rules=None):
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.parse_mesh(axes))
    sizes = {"layers": LAYERS, "dim": DIM, "hidden": HIDDEN, "rows": 8, "length": 16}
    return residual_stack.lowered(strategy, mesh, rules=rules, **sizes), mesh


def sizes(collectives, kinds):
    """Bytes of each execution, without sums of single numbers."""
    return sorted(c.bytes // c.count for c in collectives if c.kind in kinds and c.bytes > 64 * c.count)


@CHIPS
def test_buckets_are_put_together_unless_an_option_forbids_it(chip):
    program, mesh = lowered(chip, Ddp(bucket_bytes=2**18, accumulate="local"))
    stated = sizes(stablehlo.stated_collectives(program, mesh), ["all-reduce"])
    # Head, last norm and the norms of the layers; two stacked matrices; the embedding.
    assert len(stated) == 4
    assert sum(stated) == INSIDE + OUTSIDE
    merged = sizes(explain_sharding(program.compile(), mesh), ["all-reduce"])
    assert merged in ([sum(stated) + 8], [sum(stated) + 12])  # sum, weight and aux join them
    options = xla_flags.compiler_options(["tpu-separate-all-reduces"], "tpu")
    apart = sizes(explain_sharding(program.compile(compiler_options=options), mesh), ["all-reduce"])
    assert apart == stated


@IN_TURN
def test_a_layer_is_gathered_twice_and_its_gradient_is_summed_once(chip, form):
    program, mesh = lowered(chip, Fsdp(form=form, param_dtype="bfloat16"))
    found = explain_sharding(program.compile(), mesh)
    assert all(c.trip_count_known for c in found)
    gathered = sum(c.bytes for c in found if c.kind == "all-gather" and c.bytes // c.count >= MATRIX // 2)
    assert gathered == 2 * LAYERS * 2 * MATRIX // 2
    # The compiler writes reduce-scatters as it likes: as such, as all-reduces of equal size, or as rings.
    kinds = ("reduce-scatter", "all-reduce", "collective-permute")
    summed = sum(c.bytes for c in found if c.kind in kinds)
    assert 0.85 * INSIDE // 2 < summed < 1.15 * (INSIDE + OUTSIDE) // 2


@CHIPS
def test_a_whole_gradient_is_summed_across_replicas_only_in_shards(chip):
    program, mesh = lowered(chip, Fsdp(sharding="HYBRID_SHARD", form="explicit"), "replica=2,fsdp=4")
    found = explain_sharding(program.compile(), mesh)
    across = sum(c.bytes for c in found if "replica" in c.axes and c.bytes > 64 * c.count)
    assert across <= 1.1 * (INSIDE + OUTSIDE) // 4


@IN_TURN
def test_composes_with_tensor_parallelism(chip, form):
    rules = Rules(axes=(("hidden", ("tensor",)),))
    program, mesh = lowered(chip, Fsdp(form=form, param_dtype="bfloat16"), "fsdp=4,tensor=2", rules)
    found = explain_sharding(program.compile(), mesh)
    gathered = [c for c in found if c.kind == "all-gather" and c.axes == ("fsdp",) and c.count >= LAYERS]
    # Half of each matrix is gathered, over `fsdp` alone; sums of activations go over `tensor`.
    assert max(c.bytes // c.count for c in gathered) <= MATRIX // 2
    assert any("tensor" in c.axes and c.count >= LAYERS for c in found)


@CHIPS
def test_offloaded_state_is_an_argument_in_host_memory(chip):
    mesh, _ = topology.make_mesh(topology.parse(chip), meshes.parse_mesh("fsdp=8"))
    sharding = NamedSharding(mesh, P("fsdp"))
    state = {
        "mu": jax.ShapeDtypeStruct((1024, 512), np.float32, sharding=sharding),
        "count": jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, P())),
    }
    rest, places = offload.on_host(state), {name: s.sharding for name, s in state.items()}

    def step(state):
        fetched = offload.fetch(state, places)
        return offload.put_back({"mu": fetched["mu"] * 0.9, "count": fetched["count"] + 1}, rest)

    given = {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=rest[name]) for name, s in state.items()}
    compiled = jax.jit(step, out_shardings=rest, donate_argnums=0).lower(given).compile()
    memory = compiled.memory_analysis()
    assert memory.host_argument_size_in_bytes == 1024 * 512 * 4 // 8
    assert memory.argument_size_in_bytes < 1024
