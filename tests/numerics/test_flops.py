"""FLOPs of traced programs against products of their sizes."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from scalejax.nn.convolution import convolve
from scalejax.numerics import flops


def _shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def _count(function, *args):
    return flops.count(jax.jit(function).trace(*args))


def _mlp_gradient(w, x):
    return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]))(w, x)


def test_a_scan_multiplies_by_its_length_and_the_backward_pass_doubles():
    # 7 layers of [3, 8] @ [8, 8]: one product forward, two backward.
    assert _count(_mlp_gradient, _shape(7, 8, 8), _shape(3, 8)).total == 7 * 3 * (2 * 3 * 8 * 8)


def test_remat_counts_what_it_computes_again():
    def plain(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))

    product = 2 * 3 * 8 * 8
    args = (_shape(8, 8), _shape(3, 8))
    extra = _count(jax.grad(jax.checkpoint(plain)), *args).total - _count(jax.grad(plain), *args).total
    assert extra == 2 * product


def test_batched_products_by_dtype_and_precision():
    def products(a, b, c):
        exact = jnp.einsum("bij,bjk->bik", a, b, precision="highest")
        return exact, jnp.dot(c, c, preferred_element_type=jnp.int32)

    found = _count(products, _shape(5, 3, 4), _shape(5, 4, 6), _shape(2, 2, dtype=jnp.int8))
    assert found.by_kind == {("float32", "highest"): 2 * 5 * 3 * 4 * 6, ("int8", "default"): 2 * 8}


def test_shard_map_counts_all_devices_of_its_manual_axes():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharded = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )
    assert _count(sharded, _shape(8, 4), _shape(4, 4)).total == 2 * 8 * 4 * 4


def test_ragged_products_cost_one_product_of_all_rows_in_each_direction():
    sizes = _shape(3, dtype=jnp.int32)
    dense = 2 * 16 * 4 * 5
    assert _count(jax.lax.ragged_dot, _shape(16, 4), _shape(3, 4, 5), sizes).total == dense

    def both(x, w, sizes):
        return jax.grad(lambda x, w: jnp.sum(jax.lax.ragged_dot(x, w, sizes) ** 2), argnums=(0, 1))(x, w)

    assert _count(both, _shape(16, 4), _shape(3, 4, 5), sizes).total == 3 * dense


def test_a_kernel_counts_its_body_times_its_grid_or_what_it_declares():
    def kernel(x_ref, w_ref, o_ref):
        o_ref[...] = x_ref[...] @ w_ref[...]

    def call(x, w, **kwargs):
        specs = [pl.BlockSpec((16, 8), lambda i: (i, 0)), pl.BlockSpec((8, 32), lambda i: (0, 0))]
        out = pl.BlockSpec((16, 32), lambda i: (i, 0))
        return pl.pallas_call(
            kernel, out_shape=_shape(64, 32), grid=(4,), in_specs=specs, out_specs=out, interpret=True, **kwargs
        )(x, w)

    args = (_shape(64, 8), _shape(8, 32))
    assert _count(call, *args).total == 2 * 64 * 8 * 32
    stated = pl.CostEstimate(flops=123, bytes_accessed=0, transcendentals=0)
    assert _count(lambda x, w: call(x, w, cost_estimate=stated), *args).total == 123


def test_a_loop_without_a_trip_count_is_reported_if_it_multiplies_matrices():
    def loop(step):
        return lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) < 3, step, x)

    assert _count(loop(lambda c: c @ c), _shape(8, 8)) == flops.MatmulFlops({("float32", "default"): 1024}, 1)
    assert _count(loop(lambda c: c + 1), _shape(8, 8)).unbounded_loops == 0


def test_a_conditional_counts_its_most_expensive_branch():
    found = _count(lambda i, x: jax.lax.cond(i, lambda: x @ x @ x, lambda: x @ x), _shape(dtype=bool), _shape(8, 8))
    assert found.total == 2 * 1024


def test_gradients_of_a_strided_convolution_cost_what_it_does():
    def convolved(x, filters):
        return jax.lax.conv_general_dilated(
            x, filters, (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    args, forward = (_shape(5, 8, 8, 3), _shape(3, 3, 3, 7)), 2 * 5 * 4 * 4 * 7 * 3 * 3 * 3
    assert _count(convolved, *args).total == forward
    assert _count(jax.grad(lambda *a: convolved(*a).sum(), (0, 1)), *args).total == 3 * forward


def test_a_convolution_of_the_library_costs_one_product_in_each_direction():
    """Forms for a CPU apart, of which none counts."""
    for kernel, stride, inputs in ((1, 1, 6), (1, 2, 6), (3, 1, 6), (3, 2, 6), (3, 1, 40)):
        args = (_shape(5, 8, 8, inputs), _shape(kernel, kernel, inputs, 7))
        forward = 2 * 5 * (8 // stride) ** 2 * 7 * kernel**2 * inputs
        found = _count(jax.grad(lambda x, f, s=stride: convolve(x, f, s).sum(), (0, 1)), *args).total
        assert found == 3 * forward, (kernel, stride, inputs)
