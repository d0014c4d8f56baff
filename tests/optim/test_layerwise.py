"""LAMB and LANS against optax, their equations in NumPy and numbers of NVIDIA's reference."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax import optim
from scalejax.errors import UserError
from scalejax.optim import layerwise

RATE = optim.Constant(value=0.05)
SHAPES = {"mlp/kernel": (4, 3), "mlp/bias": (3,), "norm/scale": (2, 3), "zero/kernel": (2, 3), "still/kernel": (3, 2)}
DECAYED = {"mlp/kernel", "zero/kernel", "still/kernel"}
NO_BOUNDS = (0.0, np.inf, "ratio")


def inputs(steps=4):
    """Parameters, one of them zero, and their gradients step by step, those of another being zero."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape) * (name != "zero/kernel") for name, shape in SHAPES.items()}
    grads = [
        {name: 3 * rng.normal(size=shape) * (name != "still/kernel") for name, shape in SHAPES.items()}
        for _ in range(steps)
    ]
    return params, grads


def run(optimizer, params, grads, dtype, **extra):
    """The parameters after as many steps as there are gradients."""
    built = optax.with_extra_args_support(optimizer.build(len(grads)))
    step = jax.jit(lambda g, state, p: built.update(g, state, p, **extra))
    now = {name: jnp.asarray(p, dtype) for name, p in params.items()}
    state = built.init(now)
    for grad in grads:
        updates, state = step({name: jnp.asarray(g, dtype) for name, g in grad.items()}, state, now)
        now = optax.apply_updates(now, updates)
    return now


def phi(x, u, bounds):
    lower, upper, of = bounds
    length, step = np.linalg.norm(x.ravel()), np.linalg.norm(u.ravel())
    if of == "norm":
        length = min(max(length, lower), upper)
    ratio = 1.0 if length == 0 or step == 0 else length / step
    return min(max(ratio, lower), upper) if of == "ratio" else ratio


def literal(kind, x, grads, decay, *, normalization="none", bounds=NO_BOUNDS, b1=0.9, b2=0.999, eps=1e-6, rate=0.05):
    """One tensor after all steps, in float64."""
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, g in enumerate(grads, 1):
        length = np.linalg.norm(g.ravel())
        if normalization == "block" and length > 0:
            g = g / (length + eps)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        d = np.sqrt(v / (1 - b2**t)) + eps
        r, c = (m / (1 - b1**t)) / d + decay * x, g / d + decay * x
        if kind is optim.Lamb:
            x = x - rate * phi(x, r, bounds) * r
        else:
            x = x - rate * b1 * phi(x, r, bounds) * r - rate * (1 - b1) * phi(x, c, bounds) * c
    return x


CASES = [
    (optim.Lans, {}, NO_BOUNDS),
    (optim.Lans, {"normalization": "block"}, NO_BOUNDS),
    (optim.Lans, {"normalization": "block", "b1": 0.0, "b2": 0.0}, NO_BOUNDS),
    (optim.Lans, {"normalization": "block"}, (0.4, 0.8, "ratio")),
    (optim.Lans, {}, (0.5, 1.5, "norm")),
    (optim.Lamb, {}, NO_BOUNDS),
    (optim.Lamb, {}, (0.4, 0.8, "ratio")),
    (optim.Lamb, {}, (0.5, 1.5, "norm")),
]


@pytest.mark.default_cases(first=2)
@pytest.mark.parametrize(("kind", "changes", "bounds"), CASES)
def test_they_equal_their_equations_in_float64(kind, changes, bounds, x64):
    params, grads = inputs()
    lower, upper, of = bounds
    trust = None if bounds == NO_BOUNDS else optim.TrustBounds(lower=lower, upper=upper, of=of)
    got = run(kind(learning_rate=RATE, weight_decay=0.1, trust=trust, **changes), params, grads, np.float64)
    for name, x in params.items():
        want = literal(kind, x, [g[name] for g in grads], 0.1 * (name in DECAYED), bounds=bounds, **changes)
        np.testing.assert_allclose(got[name], want, rtol=1e-11, err_msg=name)
    # What is held by bounds is another step.
    free = run(kind(learning_rate=RATE, weight_decay=0.1, **changes), params, grads, np.float64)
    assert np.array_equal(free["mlp/kernel"], got["mlp/kernel"]) == (trust is None)


@pytest.mark.parametrize("normalization", ["none", "block"])
def test_first_steps_in_float32_are_those_of_float64(normalization):
    params, grads = inputs(2)
    got = run(optim.Lans(learning_rate=RATE, normalization=normalization), params, grads, np.float32)
    for name, x in params.items():
        decay = 0.01 * (name in DECAYED)
        want = literal(optim.Lans, x, [g[name] for g in grads], decay, normalization=normalization)
        np.testing.assert_allclose(got[name], want, rtol=2e-6, atol=1e-7, err_msg=name)


def test_norms_of_half_precision_do_not_overflow():
    # |x| of two layers, of squares of which the first add up to more than float16 holds.
    x, r = np.full((2, 4096), [[8], [4]], np.float16), np.ones((2, 4096), np.float16)
    found = jax.jit(lambda x, r: layerwise._phi(x, r, 1, None))(x, r)
    assert (found.dtype, found.tolist()) == (np.float16, [[8], [4]])


def test_lamb_is_that_of_optax_to_the_bit():
    params, grads = inputs(6)
    params["cube/kernel"] = params["mlp/kernel"].reshape(2, 3, 2)
    grads = [{**g, "cube/kernel": g["mlp/kernel"].reshape(2, 3, 2)} for g in grads]
    mine = optim.Lamb(learning_rate=optim.WarmupCosine(peak=0.1, warmup=0.5), b1=0.8, b2=0.95, weight_decay=0.1)

    class Theirs:
        def build(self, steps):
            mask = {name: name in DECAYED | {"cube/kernel"} for name in params}
            return optax.lamb(mine.learning_rate.build(steps), b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, mask=mask)

    ours, theirs = (run(optimizer, params, grads, np.float32) for optimizer in (mine, Theirs()))
    for name in params:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


# Made with the class LANS of tests/L0/run_optimizers/test_lans.py of NVIDIA/apex (commit b04d2d19, BSD-3) and torch
# 2.13.0 in float64: lr=0.05, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, four steps on what `reference_inputs`
# makes. It always normalises gradients, the second moment included; both of its parts are of x before the step.
REFERENCE = {
    "matrix": [
        *(0.171842370405058, -0.0788113990000911, 0.651337842078),
        *(0.073145060016276, -0.480022905768571, 0.295958008227341),
    ],
    "zero": [-0.0538959973848412, 0.0569525670777803, -0.0609847490277283, 0.0462066875462412],
    "still": [1.06211618675878, 0.771403363724787, -0.573196747910019, -1.0306936970512],
    "tiny": [-0.324091814093298, 0.0521554900160858, -2.48093226260607],
}


def reference_inputs():
    rng = np.random.default_rng(0)
    params = {
        "matrix": rng.normal(size=(3, 2)),
        "zero": np.zeros((2, 2)),
        "still": rng.normal(size=(2, 2)),
        "tiny": rng.normal(size=(1, 3)),
    }
    sizes = {"matrix": 1.0, "zero": 3.0, "still": 0.0, "tiny": 1e-8}
    return params, [{k: s * rng.normal(size=params[k].shape) for k, s in sizes.items()} for _ in range(4)]


@pytest.mark.parametrize(("dtype", "rtol"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_lans_with_normalised_gradients_is_that_of_apex(dtype, rtol, x64):
    params, grads = reference_inputs()
    got = run(optim.Lans(learning_rate=RATE, weight_decay=0.1, normalization="block"), params, grads, dtype)
    for name, want in REFERENCE.items():
        np.testing.assert_allclose(np.ravel(got[name]), want, rtol=rtol, err_msg=name)


STACKED = {"layers/mlp": 1, "layers/scale": 1, "layers/sinks": 1, "towers/layers/up": 2}


def layers(steps=3):
    """Arrays of three layers of very different norms, some of them of two towers, and one of no layer."""
    rng = np.random.default_rng(1)
    shapes = {
        "layers/mlp": (3, 8, 4),
        "layers/scale": (3, 8),
        "layers/sinks": (3, 8),
        "towers/layers/up": (2, 3, 8, 8),
        "head": (8, 4),
    }
    size = np.array([0.1, 1.0, 10.0])

    def drawn():
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        for name in STACKED:
            axis = STACKED[name] - 1
            arrays[name] *= size.reshape(-1, *(1,) * (arrays[name].ndim - axis - 1))
        return arrays

    return drawn(), [drawn() for _ in range(steps)]


def apart(arrays):
    """The tensors of the layers by themselves: {path and index: tensor}."""
    found = {}
    for name, x in arrays.items():
        for index in np.ndindex(x.shape[: STACKED.get(name, 0)]):
            # What comes before a path changes nothing about which paths are decayed.
            found["/".join([*map(str, index), name])] = x[index]
    return found


BY_PATH = optim.ByPath(
    rules=(
        optim.For(paths="(.*/)?head", optimizer=optim.Sgd()),
        optim.For(paths=".*", optimizer=optim.Lans(learning_rate=RATE, weight_decay=0.1)),
    )
)
OPTIMIZERS = [
    optim.Lamb(learning_rate=RATE, weight_decay=0.1),
    optim.Lans(learning_rate=RATE, weight_decay=0.1),
    optim.Lans(learning_rate=RATE, weight_decay=0.1, normalization="block", trust=optim.TrustBounds(upper=1.0)),
    BY_PATH,
]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_layers_in_one_array_step_as_layers_by_themselves(optimizer):
    params, grads = layers()
    got = run(optimizer, params, grads, np.float32, stacked=STACKED)
    want = run(optimizer, apart(params), [apart(g) for g in grads], np.float32)
    for name, x in apart(got).items():
        np.testing.assert_allclose(x, want[name], rtol=1e-6, atol=1e-7, err_msg=name)
    # One array as one tensor is another step.
    whole = run(optimizer, params, grads, np.float32)
    assert np.abs(whole["layers/mlp"] / got["layers/mlp"] - 1).max() > 0.01


@pytest.mark.parametrize("optimizer", [optim.Adam(), optim.AdamW(), optim.Sgd(momentum=0.9), optim.AdamL2()])
def test_other_optimizers_do_not_care_what_is_stacked(optimizer):
    params, grads = layers()
    got, want = (run(optimizer, params, grads, np.float32, **extra) for extra in ({"stacked": STACKED}, {}))
    for name in params:
        np.testing.assert_array_equal(got[name], want[name])


@pytest.mark.parametrize("optimizer", [OPTIMIZERS[0], OPTIMIZERS[2]])
def test_sharded_parameters_step_as_on_one_device(optimizer, x64):
    params, grads = layers(1)
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), ("replica", "fsdp"))
    specs = {
        "layers/mlp": P(None, ("replica", "fsdp")),
        "layers/scale": P(None, "fsdp"),
        "layers/sinks": P(),
        "towers/layers/up": P("replica", None, None, "fsdp"),
        "head": P("fsdp"),
    }
    built = optimizer.build(1)

    def step(grads, params):
        return built.update(grads, built.init(params), params, stacked=STACKED)[0]

    alone = jax.jit(step)(*({name: jnp.asarray(x) for name, x in tree.items()} for tree in (grads[0], params)))
    placed = [
        {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in tree.items()}
        for tree in (grads[0], params)
    ]
    sharded = jax.jit(step)(*placed)
    for name, want in alone.items():
        np.testing.assert_allclose(sharded[name], want, rtol=1e-12, err_msg=name)


def test_paths_that_are_not_decayed_are_those_that_a_pattern_names():
    params = {"head/kernel": jnp.ones((2, 2)), "embed/table": jnp.ones((2, 2)), "head/bias": jnp.ones((2, 2))}
    zero = {name: jnp.zeros_like(p) for name, p in params.items()}
    for kind in (optim.Lamb, optim.Lans):
        for undecayed, spared in (("embed/.*", {"embed/table"}), (optim.Lans.undecayed, {"head/bias"})):
            got = run(kind(learning_rate=RATE, weight_decay=0.5, undecayed=undecayed), params, [zero], np.float32)
            assert {name for name in params if np.array_equal(got[name], params[name])} == spared


@pytest.mark.parametrize("kind", [optim.Lamb, optim.Lans])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b1": 1.0}, "b1 must lie in [0, 1); got 1.0"),
        ({"b2": -0.1}, "b2 must lie in [0, 1); got -0.1"),
        ({"eps": 0.0}, "eps must be above 0, or a gradient of 0 is divided by 0; got 0.0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0.0; got -1.0"),
        ({"undecayed": "norm("}, "undecayed must be a regular expression; got 'norm('"),
    ],
)
def test_what_makes_no_step_is_refused(kind, changes, message):
    with pytest.raises(UserError, match=re.escape(f"{kind.__name__}: {message}")):
        kind(**changes)


def test_bounds_and_choices_that_mean_nothing_are_refused():
    with pytest.raises(UserError, match=r"TrustBounds: lower must be at least 0\.0; got -1"):
        optim.TrustBounds(lower=-1)
    with pytest.raises(UserError, match=r"upper must be above 0 and at least lower \(2\); got 1"):
        optim.TrustBounds(lower=2.0, upper=1.0)
    with pytest.raises(UserError, match="TrustBounds: of must be one of ratio, norm; got 'step'"):
        optim.TrustBounds(of="step")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="Lans: normalization must be one of none, block; got 'all'"):
        dataclasses.replace(optim.Lans(), normalization="all")
    built = optim.Lans().build(1)
    with pytest.raises(UserError, match="Lans: update must get the parameters"):
        built.update({"w": jnp.ones(1)}, built.init({"w": jnp.ones(1)}))
