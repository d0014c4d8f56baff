import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import residual_stack
import stablehlo
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import fsdp, pipeline
from scalejax.parallel import mesh as meshes
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import Rules

LAYERS, DIM, HIDDEN, ROWS = 8, 8, 16, 16


def layer(params, x):
    """A residual MLP; the second part of x travels along and is not touched."""
    stream, scale = x
    hidden = jnp.tanh(residual_stack.norm(stream, params["norm"]) @ params["up"])
    return stream + (hidden * scale[:, None, None]) @ params["down"], scale


def arguments():
    rng = np.random.default_rng(0)
    params = {
        "norm": 1 + 0.1 * rng.normal(size=(LAYERS, DIM)),
        "up": 0.3 * rng.normal(size=(LAYERS, DIM, HIDDEN)),
        "down": 0.3 * rng.normal(size=(LAYERS, HIDDEN, DIM)),
    }
    return params, (rng.normal(size=(ROWS, 3, DIM)), rng.random(ROWS))


def stack(params, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def gradients(run):
    """Value, result and gradients of a function of the result that weighs every number differently."""

    def value(params, x):
        y, scale = run(params, x)
        weights = jnp.arange(y.size, dtype=y.dtype).reshape(y.shape) / y.size
        return (jnp.sin(y) * weights).sum() + (scale**2).sum(), y

    return jax.jit(jax.value_and_grad(value, argnums=(0, 1), has_aux=True))


def placed(mesh, params, x, spec=None):
    spec = spec or {"norm": P("stage"), "up": P("stage"), "down": P("stage")}
    return (
        {name: jax.device_put(p, NamedSharding(mesh, spec[name])) for name, p in params.items()},
        jax.device_put(x, meshes.batch_sharding(mesh)),
    )


SHAPES = {
    "stage4": MeshShape(stage=4, fsdp=2),
    "stage8": MeshShape(stage=8, fsdp=1),
    "stage2-tensor2": MeshShape(stage=2, fsdp=2, tensor=2),
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "parts", "remat"),
    [("stage4", 4, True), ("stage4", 8, False), ("stage8", 2, True), ("stage2-tensor2", 1, False)],
)
def test_equals_the_stack_on_one_device(shape, parts, remat):
    mesh = meshes.make_mesh(SHAPES[shape])
    params, x = arguments()
    (value, y), (dp, dx) = gradients(stack)(params, x)
    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer
    spec = {"norm": P("stage"), "up": P("stage", None, "tensor"), "down": P("stage", "tensor")}
    run = gradients(pipeline.pipelined(body, mesh=mesh, parts=parts))
    (piped_value, piped), (piped_dp, piped_dx) = run(*placed(mesh, params, x, spec))
    np.testing.assert_allclose(piped_value, value, rtol=1e-13)
    np.testing.assert_allclose(piped, y, rtol=1e-13, atol=1e-14)
    for ours, whole in zip(jax.tree.leaves((piped_dp, piped_dx)), jax.tree.leaves((dp, dx)), strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("parts", "stages"), [(1, 4), (4, 4), (8, 2)])
def test_a_pass_takes_as_many_ticks_as_the_formula_says(parts, stages):
    mesh = meshes.make_mesh(MeshShape(stage=stages, fsdp=8 // stages))
    params, x = arguments()
    assert pipeline.ticks(parts, stages) == parts + stages - 1
    x = (np.tile(x[0], (2, 1, 1)), np.tile(x[1], 2)) if parts * 8 // stages > ROWS else x
    run = pipeline.pipelined(layer, mesh=mesh, parts=parts)
    lowered = jax.jit(run).lower(*placed(mesh, params, x))
    found = [c for c in stablehlo.stated_collectives(lowered, mesh) if c.kind == "collective-permute"]
    assert {(c.count, c.axes) for c in found} == {(parts + stages - 1, ("stage",))}
    assert all(c.trip_count_known for c in found)
    # The stream is one part of the rows; what is manual over `stage` alone states the bytes of all other devices.
    assert max(c.bytes for c in found) == (parts + stages - 1) * (len(x[0]) // parts) * 3 * DIM * 4


@pytest.mark.slow
def test_parameters_stay_on_their_stage():
    mesh = meshes.make_mesh(MeshShape(stage=4, fsdp=2))
    params, x = jax.tree.map(np.float32, arguments())
    compiled = gradients(pipeline.pipelined(layer, mesh=mesh, parts=4)).lower(*placed(mesh, params, x)).compile()
    (_, (dp, _)) = compiled.output_shardings
    assert {s.spec[0] for s in jax.tree.leaves(dp)} == {"stage"}
    whole = sum(p.nbytes for p in params.values())
    batch = sum(part.nbytes for part in x) // 2
    assert compiled.memory_analysis().argument_size_in_bytes == whole // 4 + batch


def test_a_pipeline_with_a_broken_link_shows(monkeypatch):
    mesh = meshes.make_mesh(MeshShape(stage=4, fsdp=2))
    params, x = jax.tree.map(np.float32, arguments())
    monkeypatch.setattr(jax.lax, "ppermute", lambda y, axis, perm: y)
    y, _ = jax.jit(pipeline.pipelined(layer, mesh=mesh, parts=4))(*placed(mesh, params, x))
    assert np.abs(np.asarray(y) - np.asarray(stack(params, x)[0])).max() > 0.1


def test_refuses_what_does_not_divide():
    mesh = meshes.make_mesh(MeshShape(stage=4, fsdp=2))
    params, x = arguments()
    with pytest.raises(UserError, match="parts must be at least 1; got 0"):
        pipeline.pipelined(layer, mesh=mesh, parts=0)
    with pytest.raises(UserError, match=r"a batch of 16 does not divide into 3 parts on 2 devices.* multiple of 6"):
        pipeline.pipelined(layer, mesh=mesh, parts=3)(params, x)
    with pytest.raises(UserError, match=r"6 layers do not divide over stage=4. Use 4 or 8 layers"):
        pipeline.pipelined(layer, mesh=mesh, parts=2)(jax.tree.map(lambda p: p[:6], params), x)


def stages_by_hand(step, x, stacked):
    """In place of `jax.lax.scan` over layers: the pipeline, inside a shard_map in which `stage` is manual."""
    cut = x.reshape(2, x.shape[0] // 2, *x.shape[1:])
    return pipeline.run_stages(lambda block, x: step(x, block)[0], stacked, cut).reshape(x.shape), None


def explicit_loss(params, batch, key, gather):
    return pipeline.on_last_stage(residual_stack.loss(params, batch, key, gather, scan=stages_by_hand))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("strategy", "shape"),
    [
        (Fsdp(sharding="FULL_SHARD", form="explicit"), MeshShape(fsdp=2, replica=2, stage=2)),
        (Fsdp(sharding="HYBRID_SHARD", form="explicit", accumulate="local"), MeshShape(replica=2, stage=4, fsdp=1)),
        (Fsdp(sharding="SHARD_GRAD_OP"), MeshShape(fsdp=2, stage=2, tensor=2)),
    ],
    ids=lambda value: f"{value.sharding}-{value.form}" if isinstance(value, Fsdp) else "",
)  # fmt: skip
def test_composes_with_strategies_of_sharding(strategy, shape):
    mesh = meshes.make_mesh(shape)
    rules = Rules(axes=(("layers", ("stage",)), ("hidden", ("tensor",))))
    described, params = residual_stack.axes(layers=4), residual_stack.params(layers=4)
    specs = {p.name: p.spec for p in fsdp.place(described, strategy, mesh=mesh, rules=rules)}
    assert specs["layers/mlp/up"][0] == "stage"

    def by_the_compiler(step, x, stacked):
        return pipeline.pipelined(lambda block, x: step(x, block)[0], mesh=mesh, parts=2)(stacked, x), None

    if strategy.form == "explicit":
        loss, handled = explicit_loss, ("stage",)
    else:
        loss, handled = functools.partial(residual_stack.loss, scan=by_the_compiler), ()
    run = jax.jit(fsdp.gradients(loss, strategy, mesh=mesh, specs=specs, parts=2, handled=handled))
    batch = residual_stack.batch(rows=32)
    total, weight, aux, grads = run(
        {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()},
        jax.device_put(batch, meshes.batch_sharding(mesh)),
    )
    (expected, (count, correct)), whole = jax.value_and_grad(
        lambda p: (lambda s, w, a: (s, (w, a)))(*residual_stack.loss(p, batch, None)), has_aux=True
    )(params)
    np.testing.assert_allclose(total, expected, rtol=1e-13)
    assert (weight, aux["correct"]) == (count, correct["correct"])
    for path, g in grads.items():
        assert g.sharding.is_equivalent_to(NamedSharding(mesh, specs[path]), g.ndim)
        np.testing.assert_allclose(g, whole[path], rtol=1e-10, atol=1e-12, err_msg=path)


def test_an_explicit_step_refuses_stages_that_its_loss_does_not_run_over():
    mesh = meshes.make_mesh(MeshShape(fsdp=4, stage=2))
    specs = {"layers/w": P("stage", "fsdp")}
    with pytest.raises(UserError, match=r"'layers/w' is sharded over stage=2.* pass handled=\('stage',\)"):
        fsdp.gradients(residual_stack.loss, Fsdp(form="explicit"), mesh=mesh, specs=specs)
    with pytest.raises(UserError, match=r"handled=\('stage',\) needs form='explicit'"):
        fsdp.gradients(residual_stack.loss, Fsdp(), mesh=mesh, specs=specs, handled=("stage",))
