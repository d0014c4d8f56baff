"""Work of compiled programs against that of traced ones, and against XLA's where no loop hides it."""

import jax
import jax.numpy as jnp
import pytest

from scalejax.numerics import flops
from scalejax.plan.compiled import hlo, traffic


def _shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def _mlp_gradient(w, x):
    return jax.grad(lambda w, x: jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]))(w, x)


def _convolution(x, k):
    return jax.lax.conv_general_dilated(x, k, (2, 2), "VALID")


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: jax.nn.relu(x @ w), ((64, 32), (32, 16))),
        (lambda x: jnp.einsum("bfd,bgd->bfg", x, x), ((16, 12, 8),)),
        (_convolution, ((4, 3, 17, 17), (6, 3, 3, 3))),
    ],
)
def test_compiled_work_equals_xla_and_the_trace_where_nothing_loops(function, shapes):
    traced = jax.jit(function).trace(*(_shape(*s) for s in shapes))
    compiled = traced.lower().compile()
    found = traffic.of_module(hlo.parse(compiled.as_text()))
    costs = compiled.cost_analysis()
    assert found.matmul_flops == flops.count(traced).total
    # XLA adds element-wise FLOPs.
    assert costs["flops"] == pytest.approx(found.matmul_flops, rel=0.1)
    assert found.hbm_bytes == pytest.approx(costs["bytes accessed"], rel=0.01)


def test_compiled_work_counts_loop_bodies_as_often_as_they_run():
    traced = jax.jit(_mlp_gradient).trace(_shape(7, 8, 8), _shape(3, 8))
    compiled = traced.lower().compile()
    found = traffic.of_module(hlo.parse(compiled.as_text()))
    assert found.matmul_flops == flops.count(traced).total
    assert found.unbounded_loops == ()
    assert compiled.cost_analysis()["flops"] < found.matmul_flops  # which counts each body once


def test_a_lookup_and_an_update_touch_rows_not_tables():
    table, ids, rows = _shape(10_000, 64), _shape(16, dtype=jnp.int32), _shape(16, 64)
    table_bytes = 10_000 * 64 * 4

    def bytes_of(function, *args, **kwargs):
        compiled = jax.jit(function, **kwargs).lower(*args).compile()
        return traffic.of_module(hlo.parse(compiled.as_text())).hbm_bytes

    assert bytes_of(lambda t, i: t[i], table, ids) < table_bytes / 50
    assert bytes_of(lambda t, i, r: t.at[i].add(r), table, ids, rows, donate_argnums=0) < table_bytes / 10


def test_a_scatter_reads_its_indices_once_and_its_rows_twice_and_writes_them():
    module = hlo.parse(
        """HloModule m
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
ENTRY %main (t: f32[1000,64], i: s32[16,1], u: f32[16,64]) -> f32[1000,64] {
  %t = f32[1000,64]{1,0} parameter(0)
  %i = s32[16,1]{1,0} parameter(1)
  %u = f32[16,64]{1,0} parameter(2)
  ROOT %s = f32[1000,64]{1,0} scatter(%t, %i, %u), update_window_dims={1}, to_apply=%add
}
"""
    )
    assert traffic.of_module(module).hbm_bytes == 3 * 16 * 64 * 4 + 16 * 4


@pytest.mark.parametrize(
    ("sizes", "window", "pairs"),
    [
        ([8, 3, 6], {}, 18),  # no padding: every tap of every output
        ([8, 3, 8], {"pad": "1_1"}, 22),  # two taps fall off
        ([4, 4, 4], {"pad": "0_0", "stride": "3", "lhs_dilate": "4"}, 4),  # a batch in disguise: one tap an output
        ([8, 2, 4], {"stride": "2"}, 8),
        ([8, 2, 6], {"rhs_dilate": "2"}, 12),
    ],
)
def test_windows_count_only_positions_that_hold_data(sizes, window, pairs):
    assert traffic._window_positions(sizes, window, 0) == pairs
