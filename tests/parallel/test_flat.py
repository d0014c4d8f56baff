import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.flat import FlatLayout
from scalejax.parallel.mesh import MeshShape

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)


def random_params(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {f"p{i}": rng.normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)}


@hypothesis.settings(deadline=None, max_examples=15)
@hypothesis.given(SHAPES, st.integers(1, 9))
def test_flatten_pad_chunk_and_unflatten_are_the_identity(shapes, shards):
    params = random_params(shapes)
    layout = FlatLayout.of(params, shards)
    chunks = layout.chunks(params)
    assert 0 <= layout.padding < shards
    assert chunks.shape == (shards, layout.chunk)
    literal = np.concatenate([p.ravel() for p in params.values()] + [np.zeros(layout.padding, np.float32)])
    np.testing.assert_array_equal(np.asarray(chunks).ravel(), literal)
    for path, p in layout.unflatten(chunks).items():
        np.testing.assert_array_equal(p, params[path])


def test_the_example_of_the_paper():
    # A 4x3 linear layer with a bias on 16 devices: one element each and one element of padding (figure 3).
    layout = FlatLayout.of({"weight": jnp.ones((4, 3)), "bias": jnp.ones(3)}, 16)
    assert (layout.size, layout.padding, layout.chunk) == (15, 1, 1)


@pytest.mark.parametrize(
    "optimizer", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1, weight_decay=0.1)], ids=["momentum", "adamw"]
)
def test_chunks_train_as_parameters_do_and_padding_stays_zero(optimizer):
    mesh = meshes.make_mesh(MeshShape(fsdp=8))
    params = random_params([(3, 5), (7,)])
    layout = FlatLayout.of(params, 8)
    assert layout.padding == 2

    def loss(params, x):
        return jnp.sum((x @ params["p0"] @ jnp.ones((5, 1)) - params["p1"].sum()) ** 2)

    def flat_gradient(chunk, x):
        # The flow of the paper: gather the vector, compute, reduce-scatter its gradient.
        whole = jax.lax.all_gather(chunk[0], "fsdp", tiled=True)
        gradient = jax.grad(lambda flat: loss(layout.unflatten(flat), x))(whole)
        return jax.lax.psum_scatter(gradient, "fsdp", tiled=True)[None]

    sharded = jax.shard_map(
        flat_gradient, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"), check_vma=False
    )

    def step(gradient, params, state, x):
        updates, state = optimizer.update(gradient(params, x), state, params)
        return optax.apply_updates(params, updates), state

    on_chunks = jax.jit(lambda *args: step(sharded, *args))
    on_whole = jax.jit(lambda *args: step(jax.grad(loss), *args))
    chunks = jax.device_put(layout.chunks(params), NamedSharding(mesh, P("fsdp")))
    chunk_state, state = jax.jit(optimizer.init)(chunks), jax.jit(optimizer.init)(params)
    for number in range(3):
        x = np.random.default_rng(number).normal(size=(8, 3)).astype(np.float32)
        chunks, chunk_state = on_chunks(chunks, chunk_state, x)
        params, state = on_whole(params, state, x)
        np.testing.assert_array_equal(np.asarray(chunks).ravel()[layout.size :], 0)
    for path, p in layout.unflatten(chunks).items():
        np.testing.assert_allclose(p, params[path], rtol=1e-4, atol=1e-5)  # float32 sums in another order
    for _ in range(50):
        chunks, chunk_state = on_chunks(chunks, chunk_state, x)
    np.testing.assert_array_equal(np.asarray(chunks).ravel()[layout.size :], 0)


def test_refuses_mixed_dtypes_and_no_shards():
    with pytest.raises(UserError, match="must have one dtype; got bfloat16, float32"):
        FlatLayout.of({"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}, 2)
    with pytest.raises(UserError, match="shards must be at least 1; got 0"):
        FlatLayout.of({"a": jnp.ones(2)}, 0)
