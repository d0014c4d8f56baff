"""The two programs of generation, compiled for four TPU chips: layers as wide as those of 8B, spread over `tensor`."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.inference import generate
from scalejax.inference.sampling import TokenSampling
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
    cache = jax.eval_shape(lambda: shape.merge(shape.params).cache(1, POSITIONS))
    spread = on._cache_shardings(cache).keys
    keys = leaf(cache.keys.shape, cache.keys.dtype, spread)
    state = generate._State(
        dataclasses.replace(cache, keys=keys, values=keys, lengths=leaf((1,), jnp.int32)),
        leaf((1, config.vocabulary), jnp.float32),
        *[leaf((1,), bool)] * 2,
    )
    number = leaf((), jnp.int32)
    draws = leaf((1,), jax.eval_shape(lambda: jax.random.key(0)).dtype)
    sampling = TokenSampling(temperature=0.8)  # the sort of a vocabulary for top_p compiles for minutes
    programs = {
        "read": on._read_piece.lower(params, leaf((1, 512), jnp.int32), leaf((1,), jnp.int32), state),
        "decode": on._decode.lower(params, state, draws, leaf((2,), jnp.int32), number, number, sampling),
    }
    cache_bytes = 2 * spread.shard_shape(keys.shape)[3] * 2 * POSITIONS * 128 * 2
    with run.no_compile_cache():
        return {name: lowered.compile() for name, lowered in programs.items()}, cache_bytes


@pytest.mark.parametrize("program", ["read", "decode"])
def test_the_tpu_compiler_takes_it_and_keeps_one_cache(compiled, program):
    programs, cache_bytes = compiled
    found = programs[program].memory_analysis()
    assert found.alias_size_in_bytes >= cache_bytes
    if program == "decode":
        assert found.temp_size_in_bytes < cache_bytes / 2


def test_a_decoding_step_moves_activations_and_no_weights(compiled):
    text = compiled[0]["decode"].as_text()
    gathered = [line for line in text.splitlines() if " all-gather(" in line]
    for line in gathered:
        assert "bf16[4096,14336]" not in line
        assert f"{POSITIONS}" not in line.split("all-gather(")[0]
