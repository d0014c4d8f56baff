"""Blocks of models whose weights have number formats: the same blocks on weights that were cast by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

from scalejax import nn
from scalejax.nn import scan_layers
from scalejax.numerics.quantize import cast
from scalejax.numerics.quantized import products, weights
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.compression.quantized_gather import QuantizedGather
from scalejax.parallel.gradients.blocks import ParamGather

WEIGHTS = QuantizationRule(weight_qtype="bdr_mx4")
ALL = QuantizationRule(weight_qtype="bdr_mx6", act_qtype="bdr_mx6", bwd_qtype="bdr_mx9")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def formatted(array, rule=WEIGHTS):
    return weights.FormattedWeight(array=array, rule=rule, path="here")


def test_a_weight_is_multiplied_from_either_side_turned_and_reshaped():
    w, x = normal(32, 48), normal(64, 32, seed=1)
    tolerance = {"rtol": 0, "atol": 1e-5}
    np.testing.assert_allclose(x @ formatted(w), x @ cast(w, "bdr_mx4", axis=0), **tolerance)
    np.testing.assert_allclose(formatted(w).T @ x.T, cast(w, "bdr_mx4", axis=0).T @ x.T, **tolerance)
    np.testing.assert_allclose(formatted(w) @ normal(48, 3), cast(w, "bdr_mx4", axis=1) @ normal(48, 3), **tolerance)
    four = formatted(w.reshape(4, 8, 48)).reshape(32, 48)[...].astype(jnp.float32)
    np.testing.assert_allclose(x @ four, x @ cast(w, "bdr_mx4", axis=0), **tolerance)


def test_a_table_is_read_row_by_row():
    table, ids = normal(7, 32), jnp.array([[1, 1, 6]])
    np.testing.assert_array_equal(formatted(table)[ids], cast(table, "bdr_mx4", axis=1)[ids])


def test_any_other_use_of_a_weight_is_an_error():
    w = formatted(normal(32, 32))
    with pytest.raises(TypeError, match="FormattedWeight"):
        jnp.einsum("bi,io->bo", normal(4, 32), w)
    with pytest.raises(TypeError, match="FormattedWeight"):
        normal(32, 32) + w
    for index in (0, slice(4), (slice(None), slice(4)), jnp.ones(32, bool)):
        with pytest.raises(TypeError, match=r"FormattedWeight: here can be read whole .* or by rows"):
            w[index]
    with pytest.raises(TypeError, match=r"needs matrices; got \(32, 32\) and \(32, 32, 2\)"):
        w @ normal(32, 32, 2)
    with pytest.raises(TypeError, match=r"needs matrices; got \(2, 32, 32\)"):
        normal(2, 32, 32) @ formatted(normal(2, 32, 32))


def test_projections_of_several_axes_have_blocks_along_all_that_are_summed():
    x, w = normal(2, 16, 4, 8), normal(4, 8, 32, seed=1)
    want = nn.project(x, cast(w.reshape(32, 32), "bdr_mx4", axis=0).reshape(4, 8, 32), contract=2)
    np.testing.assert_allclose(nn.project(x, formatted(w), contract=2), want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(weights.dot(x, formatted(w), contract=2), want, rtol=0, atol=1e-5)


def test_a_linear_layer_keeps_its_bias_and_dtypes():
    layer = nn.Linear(32, 16, rngs=nnx.Rngs(0), dtypes=nn.Dtypes(compute=jnp.bfloat16), out_dtype=jnp.float32)
    graph, state = nnx.split(layer)
    (path,) = weights.weights_of({"top/kernel": ("input", "hidden"), "top/bias": ("hidden",)})
    assert path == "top"
    kernel = state["kernel"].get_value()
    x = normal(8, 32)

    def output(kernel):
        return nnx.merge(graph, nnx.State({**state, "kernel": state["kernel"].replace(kernel)}))(x)

    got = output(formatted(kernel))
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, output(cast(kernel.astype(jnp.bfloat16), "bdr_mx4", axis=0)), rtol=0, atol=1e-5)


def test_modules_of_flax_take_the_product():
    dot = functools.partial(products.mx_dot_general, rule=ALL)
    layer = nnx.Linear(32, 16, use_bias=False, rngs=nnx.Rngs(0), dot_general=dot)
    x, kernel = normal(16, 32), layer.kernel[...]
    np.testing.assert_allclose(
        layer(x), cast(x, "bdr_mx6", axis=1) @ cast(kernel, "bdr_mx6", axis=0), rtol=0, atol=1e-5
    )


def test_only_what_rules_name_gets_a_format():
    arrays = {"a/kernel": normal(2, 2), "a/bias": normal(2), "b/weight": normal(2, 2), "c": normal(2, 2)}
    found = weights.formatted(arrays, {"a": ALL, "c": QuantizationRule(module_path="c")})
    assert [path for path, value in found.items() if isinstance(value, weights.FormattedWeight)] == ["a/kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("positions", [16, 100])
def test_the_head_of_a_language_model_quantizes_as_three_products(positions):
    """In slices of the positions too, where blocks along examples end with the slice."""
    rng = np.random.default_rng(0)
    x, w = normal(2, 32, 48), normal(48, 80, seed=1)
    targets = jnp.asarray(rng.integers(0, 80, (2, 32)), jnp.int32)
    counted = jnp.asarray(rng.choice([0.0, 1.0], (2, 32)), jnp.float32)

    def ours(x, w):
        return 3 * nn.linear_cross_entropy(x, formatted(w, ALL), targets, counted, positions=positions)

    value, (d_x, d_w) = jax.value_and_grad(ours, argnums=(0, 1))(x, w)
    logits = np.einsum("bse,ev->bsv", cast(x, "bdr_mx6", axis=2), cast(w, "bdr_mx6", axis=0)).astype(np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    hit = np.eye(80)[np.asarray(targets)]
    np.testing.assert_allclose(value, 3 * ((lse - (logits * hit).sum(-1)) * counted).sum(), rtol=1e-5)
    np.testing.assert_allclose(ours(x, w), value, rtol=1e-6)  # without gradients it is another program
    d = jnp.asarray((np.exp(logits - lse[..., None]) - hit) * np.asarray(counted)[..., None], jnp.float32)
    want_x = 3 * np.einsum("bsv,ev->bse", cast(d, "bdr_mx9", axis=2), cast(w, "bdr_mx6", axis=1))
    want_w = 3 * np.einsum("bse,bsv->ev", cast(x, "bdr_mx6", axis=1), cast(d, "bdr_mx9", axis=1))
    # The softmax differs in its last bits, and a few codes of its gradient with them.
    np.testing.assert_allclose(d_x, want_x, rtol=0, atol=1e-3 * np.abs(want_x).max())
    np.testing.assert_allclose(d_w, want_w, rtol=0, atol=1e-3 * np.abs(want_w).max())


def test_the_head_passes_gradients_straight_through_where_they_have_no_format():
    x, w = normal(2, 16, 32), normal(32, 48, seed=1)
    targets, counted = jnp.zeros((2, 16), jnp.int32), jnp.ones((2, 16))
    rule = QuantizationRule(weight_qtype="bdr_mx4", act_qtype="bdr_mx6")
    got = jax.grad(lambda x, w: nn.linear_cross_entropy(x, formatted(w, rule), targets, counted), argnums=(0, 1))(x, w)

    def plain(x, w):
        return nn.linear_cross_entropy(cast(x, "bdr_mx6", axis=2), cast(w, "bdr_mx4", axis=0), targets, counted)

    for a, b in zip(got, jax.grad(plain, argnums=(0, 1))(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


L, D = 3, 32


class Block(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(normal(L, D, D) / D**0.5)


def loss_of(remat, gather):
    graph, state = nnx.split(Block())

    def loss(w, x):
        block = nnx.merge(graph, nnx.State({"weight": state["weight"].replace(w)}))

        def body(layer, x, _):
            return jnp.tanh(x @ layer.weight[...]), None

        return (scan_layers(block, body, x, remat=remat, gather=gather)[0] ** 2).sum()

    return loss


def quantizations(jaxpr):
    """How often arrays are quantized, by the maxima over blocks and over pairs; a scanned body counts once."""

    def maxima(jaxpr):
        found = 0
        for equation in jaxpr.eqns:
            found += equation.primitive.name == "reduce_max"
            for value in equation.params.values():
                for inner in value if isinstance(value, (tuple, list)) else (value,):
                    inner = getattr(inner, "jaxpr", inner)
                    found += maxima(inner) if hasattr(inner, "eqns") else 0
        return found

    return maxima(jaxpr) / 2


class Drops:
    """An exchange that fetches nothing, of which gathered parameters are said to be dropped."""

    def gather(self, shards, state):
        here = SingleDeviceSharding(jax.devices()[0])
        return {path: jax.lax.with_sharding_constraint(x, here) for path, x in shards.items()}, None

    def reduce(self, gradients, state, kept):
        return gradients, state


def gather_of(kind):
    whole = nn.layers.whole if kind == "whole" else ParamGather(Drops(), "drop", ("sharding_constraint",))
    return QuantizedGather(whole, {"layers": ALL})


@pytest.mark.slow
# Forward 2, backward 4: x along examples, W along outputs, the gradient along both.
@pytest.mark.parametrize(
    ("remat", "gather", "count"),
    [
        ("none", "whole", 6),
        ("full", "whole", 6),
        ("dots", "whole", 6),
        ("full", "dropped", 7),
        ("dots", "dropped", 6),
        ("full", "without names", 8),
    ],
)
def test_rematerialisation_quantizes_nothing_twice(remat, gather, count):
    """But for weights that are fetched anew, which would otherwise be kept of all layers."""
    formatting = gather_of("whole").__call__ if gather == "without names" else gather_of(gather)
    loss = loss_of(remat, formatting)
    traced = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(normal(L, D, D), normal(16, D))
    assert quantizations(traced.jaxpr) == count


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_no_gradient(remat):
    x, w = normal(16, D), normal(L, D, D) / D**0.5
    want = jax.jit(jax.grad(loss_of("none", gather_of("whole")), argnums=(0, 1)))(w, x)
    got = jax.jit(jax.grad(loss_of(remat, gather_of("whole")), argnums=(0, 1)))(w, x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(b).max())
