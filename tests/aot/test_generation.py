"""The two programs of generation, compiled for four TPU chips: layers as wide as those of 8B, spread over `tensor`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax import nn
from scalejax.inference import generate, sampling
from scalejax.inference.programs import DecodingState, Slots
from scalejax.inference.sampling import RowSampling
from scalejax.models.llm import llama3
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import LLM
from scalejax.plan import run, topology
from scalejax.train.state import ModelShape

pytestmark = pytest.mark.aot

POSITIONS = 65_536


@pytest.fixture(scope="module")
def compiled():
    """{program: compiled}, and the bytes of the cache on a chip."""
    machine = topology.parse("v6e:2x2")
    mesh, _ = topology.make_mesh(machine, MeshShape(fsdp=1, tensor=4))
    config = dataclasses.replace(llama3.SIZES["3.1-8b"], layers=2)
    half = Dtypes(jnp.bfloat16, jnp.bfloat16)
    shape = ModelShape.of(nnx.eval_shape(lambda: llama3.Llama(config, nnx.Rngs(0), half)))
    on = generate.Engine(config, shape, {}, mesh)
    whole = NamedSharding(mesh, P())

    def leaf(shape, dtype, sharding=whole):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    placed = shape.shardings(mesh, LLM)
    params = {name: leaf(p.shape, p.dtype, placed[name]) for name, p in shape.params.items()}
    pages = nn.PageShape(POSITIONS // 64)
    cache = on.programs.cache(pages)
    spread = on.programs.cache_shardings(cache)
    state = DecodingState(
        jax.tree.map(lambda a, s: leaf(a.shape, a.dtype, s), cache, spread), leaf((1, config.vocabulary), jnp.float32)
    )
    number, row = leaf((), jnp.int32), leaf((1,), jnp.int32)
    table = leaf((1, pages.pages), jnp.int32)
    # Without the sort of a vocabulary for top_p and top_k, which compiles for minutes.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sampling, "nucleus", lambda logits, top_p, top_k: logits)
    how = jax.tree.map(lambda a: leaf(a.shape, a.dtype), RowSampling.greedy(1))
    slots = Slots(how, row, row, leaf((1, 8), jnp.int32), table)
    reading = nn.Reading(leaf((1, 512), jnp.int32), table, row)
    programs = {
        "read": on.programs.read.lower(params, leaf((1, 512), jnp.int32), reading, row, state),
        "decode": on.programs.decode.lower(params, state, slots, number, leaf((), bool)),
    }
    monkeypatch.undo()
    cache_bytes = 2 * spread.kv.shard_shape(cache.kv.shape)[3] * POSITIONS * 128 * 2
    with run.no_compile_cache():
        return {name: lowered.compile() for name, lowered in programs.items()}, cache_bytes


@pytest.mark.parametrize("program", ["read", "decode"])
def test_the_tpu_compiler_takes_it_and_keeps_one_cache(compiled, program):
    programs, cache_bytes = compiled
    found = programs[program].memory_analysis()
    assert found.alias_size_in_bytes >= cache_bytes
    assert ("paged_attention" in programs[program].as_text()) == (program == "decode")
    if program == "decode":
        assert found.temp_size_in_bytes < cache_bytes / 2


def test_a_decoding_step_moves_activations_and_no_weights(compiled):
    text = compiled[0]["decode"].as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    for line in gathered:
        assert "bf16[4096,14336]" not in line
        assert f"{POSITIONS}" not in line.split("all-gather(")[0]
