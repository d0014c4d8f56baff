"""The id map compiled for every chip: it takes and moves nothing but its own part."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.embedding.ids import id_map
from scalejax.plan import explain_sharding, topology

pytestmark = pytest.mark.aot

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
IDS = 4096


@pytest.mark.parametrize("name", CHIPS[::3])
def test_a_sharded_map_compiles_without_collectives_and_without_a_copy(name):
    mesh, _ = topology.make_mesh(topology.parse(name))
    axes = tuple(mesh.axis_names)
    config = id_map.IdMapConfig(rows=1 + 2**24, admit_after=3)

    def local(state, hi, lo, valid, step):
        first = jax.lax.axis_index(axes) * (config.buckets // mesh.size)
        rows, state, evicted = id_map.apply(config, state, hi, lo, valid, step, first)
        return state, rows, evicted

    every, one = P(axes), P()
    step = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(every, every, every, every, one), out_specs=every), donate_argnums=0
    )

    def on(spec, shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    abstract = jax.eval_shape(functools.partial(id_map.init, config, mesh.size))
    state = {key: on(every, leaf.shape, leaf.dtype) for key, leaf in abstract.items()}
    ids = (on(every, (IDS * mesh.size,), dtype) for dtype in (jnp.uint32, jnp.uint32, bool))
    compiled = step.lower(state, *ids, on(one, (), jnp.int32)).compile()
    assert explain_sharding(compiled, mesh) == []
    found = compiled.memory_analysis()
    own = sum(leaf.size * leaf.dtype.itemsize for leaf in abstract.values()) // mesh.size
    assert found.argument_size_in_bytes < 1.1 * own
    assert found.alias_size_in_bytes >= own
    # Of the size of the batch, not of the map: padded or copied arrays would take as much as the map and more.
    assert found.temp_size_in_bytes < own / 4
