"""Parameters gathered and gradients reduced as bytes of block formats, on eight devices."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import residual_stack
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.numerics.quantize import cast
from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes
from scalejax.parallel.compression import codec
from scalejax.parallel.compression.wire_formats import WIRE_FORMATS
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients import blocks
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding
from scalejax.plan.compiled import hlo

EXACT = tuple(
    name for name in WIRE_FORMATS if not name.startswith(("fp8", "int"))
)  # decoded by shifts, not by a product
FEW = ("bdr_mx9", "mxfp6_e3m2")
FORMATS = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in EXACT]
MESHES = {"fsdp8": MeshShape(fsdp=8), "replica2-fsdp4": MeshShape(replica=2, fsdp=4)}
# Sharded along the first dimension, along the last, and in shards that are no multiple of a block.
SHAPES = {"rows": (64, 48), "columns": (3, 5, 256), "ragged": (8, 3)}
SPECS = {"rows": 0, "columns": 2, "ragged": 0}


def spec_of(path, axes):
    return P(*(axes if dim == SPECS[path] else None for dim in range(SPECS[path] + 1)))


def arrays(seed=0, scale=1.0, devices=()):
    rng = np.random.default_rng(seed)
    return {
        path: (rng.standard_normal((*devices, *shape)) * 10.0 ** rng.integers(-3, 3, shape) * scale).astype(np.float32)
        for path, shape in SHAPES.items()
    }


def exchange_on(mesh, axes, **formats):
    specs = {path: spec_of(path, axes) for path in SHAPES}
    where = blocks.layouts(specs, {path: len(shape) for path, shape in SHAPES.items()}, mesh)
    return specs, Fsdp(form="explicit", **formats).exchange(where, blocks.data_axes(mesh))


def pieces(x, dim, count):
    """[count, values]: what each shard of an array holds, the sharded dimension first."""
    return np.moveaxis(np.asarray(x), dim, 0).reshape(count, -1)


def merge(rows, shape, dim):
    first = (shape[dim], *shape[:dim], *shape[dim + 1 :])
    return np.moveaxis(np.asarray(rows).reshape(first), 0, dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "axes"), [*zip(EXACT, itertools.cycle([("fsdp",), ("replica", "fsdp")]), strict=False)]
)
def test_gathered_parameters_are_the_cast_to_the_bit(format, axes):
    mesh = meshes.make_mesh(MESHES["replica2-fsdp4"])
    specs, exchange = exchange_on(mesh, axes, gather_format=format)
    count, params = math.prod(mesh.shape[a] for a in axes), arrays()
    gather = jax.shard_map(
        lambda p: jax.tree.map(lambda x: x[None], exchange.gather(p, {})[0]),
        mesh=mesh, in_specs=(specs,), out_specs=P(meshes.BATCH_AXES), check_vma=False,
    )  # fmt: skip
    for path, got in jax.jit(gather)(params).items():
        expected = cast(jnp.asarray(pieces(params[path], SPECS[path], count)), format, axis=-1, tail="pad")
        expected = merge(expected, SHAPES[path], SPECS[path]).view(np.uint32)
        for device in range(8):
            np.testing.assert_array_equal(np.asarray(got)[device].view(np.uint32), expected)


def test_full_blocks_do_not_depend_on_the_number_of_devices():
    x = arrays()["rows"]
    whole = np.asarray(cast(jnp.asarray(x.reshape(1, -1)), "bdr_mx6", axis=-1)).reshape(x.shape)
    for shape in (MeshShape(fsdp=2), MeshShape(fsdp=4), MeshShape(fsdp=8)):
        mesh = meshes.make_mesh(shape, jax.devices()[: shape.fsdp])
        where = blocks.layouts({"rows": P("fsdp")}, {"rows": 2}, mesh)
        exchange = Fsdp(form="explicit", gather_format="bdr_mx6").exchange(where, ("fsdp",))
        gather = jax.shard_map(
            lambda p, exchange=exchange: exchange.gather({"rows": p}, {})[0]["rows"],
            mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False,
        )  # fmt: skip
        np.testing.assert_array_equal(jax.jit(gather)(x), whole)


@functools.partial(jax.jit, static_argnums=1)
def decoded(x, format):
    return codec.decode(codec.encode(x, format), format, length=x.shape[-1])


def uneven(seed=0):
    """Gradients of eight devices whose sums are rounded: decoded ones have few bits, which would add up exactly."""
    by_device = 2.0 ** np.random.default_rng(seed).permutation(np.linspace(-12, 12, 8))
    return {path: (x.T * by_device.astype(np.float32)).T for path, x in arrays(seed, devices=(8,)).items()}


def one_device_sum(each, format, order=slice(None)):
    """float32[devices, values]: encoded and decoded one by one, added up in NumPy in the order of devices."""
    total = np.zeros(each.shape[1:], np.float32)
    for contribution in np.asarray(decoded(jnp.asarray(each), format))[order]:
        total = total + contribution
    return total


def reduced(mesh, axes, format, each):
    specs, exchange = exchange_on(mesh, axes, reduce_format=format)
    reduce = jax.shard_map(
        lambda g: exchange.reduce(jax.tree.map(lambda x: x[0], g), {}, None)[0],
        mesh=mesh, in_specs=P(meshes.BATCH_AXES), out_specs=specs, check_vma=False,
    )  # fmt: skip
    return jax.jit(reduce)(each)


@pytest.mark.default_cases("bdr_mx9")
@pytest.mark.parametrize("format", FORMATS)
def test_reduced_gradients_are_those_of_one_device_to_the_bit(format):
    mesh, each = meshes.make_mesh(MESHES["fsdp8"]), uneven()
    for path, got in reduced(mesh, ("fsdp",), format, each).items():
        dim = SPECS[path]
        contributions = np.stack([pieces(each[path][device], dim, 8) for device in range(8)])  # from, to, values
        rows = [one_device_sum(contributions[:, to], format) for to in range(8)]
        expected = merge(np.stack(rows), SHAPES[path], dim)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(got).view(np.uint32), expected.view(np.uint32))
        assert not np.array_equal(expected, each[path].sum(0))
        if path != "ragged":  # too few to tell
            backward = slice(None, None, -1)
            rows = [one_device_sum(contributions[:, to], format, backward) for to in range(8)]
            assert not np.array_equal(merge(np.stack(rows), SHAPES[path], dim), expected)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "int8:128", "int4:128"])
def test_scales_in_float32_are_those_of_one_device_but_for_a_rounding(format):
    mesh, each = meshes.make_mesh(MESHES["fsdp8"]), arrays(devices=(8,))
    for path, got in reduced(mesh, ("fsdp",), format, each).items():
        contributions = np.stack([pieces(each[path][device], SPECS[path], 8) for device in range(8)])
        rows = [one_device_sum(contributions[:, to], format) for to in range(8)]
        expected = merge(np.stack(rows), SHAPES[path], SPECS[path])
        # A product may be fused with the sum that follows it.
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * abs(expected).max())


@pytest.mark.slow
def test_copies_of_a_shard_are_added_up_in_float32_after_decoding():
    mesh, each = meshes.make_mesh(MESHES["replica2-fsdp4"]), uneven()
    got = reduced(mesh, ("fsdp",), "bdr_mx6", each)["rows"]
    contributions = np.stack([pieces(g, 0, 4) for g in each["rows"]])
    copies = [
        np.stack([one_device_sum(contributions[start : start + 4, to], "bdr_mx6") for to in range(4)])
        for start in (0, 4)
    ]
    np.testing.assert_array_equal(got, (copies[0] + copies[1]).reshape(64, 48))


@pytest.mark.parametrize("format", FORMATS)
def test_nan_in_a_gradient_arrives_as_nan(format):
    mesh, each = meshes.make_mesh(MESHES["fsdp8"]), arrays(devices=(8,))
    each["rows"][5, 20, 17] = np.nan
    got = np.asarray(reduced(mesh, ("fsdp",), format, each)["rows"])
    assert np.isnan(got[20, 17])
    assert 1 <= np.isnan(got).sum() <= 32  # its block
    assert np.isfinite(got[:16]).all()


LAYERS = 2


def linear(params, batch, key, gather):
    """A scanned, rematerialised loss whose gradients are sums of whole numbers: exact in any order."""
    del key
    table = gather({"table": params["table"]})["table"]

    def body(total, layer):
        layer = gather({"layers/w": layer})["layers/w"]
        return total + (layer[None] * batch["x"][:, None]).sum(), None

    body = jax.checkpoint(body, policy=gather.remat(jax.checkpoint_policies.nothing_saveable), prevent_cse=False)
    total, _ = jax.lax.scan(body, (table[None] * batch["x"]).sum(), params["layers/w"])
    return total, jnp.float32(1), {}


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate", "parts"), [("communicate", 1), ("communicate", 2), ("local", 2)])
def test_a_step_exchanges_every_block_as_its_formats_say(parts, accumulate):
    mesh = meshes.make_mesh(MESHES["fsdp8"])
    described = {"table": (("a", "b"), (64, 16)), "layers/w": (("layers", "c", "a", "b"), (LAYERS, 8, 64, 16))}
    strategy = Fsdp(form="explicit", gather_format="mxfp6_e2m3", reduce_format="bdr_mx4", accumulate=accumulate)
    specs = {p.name: p.spec for p in fsdp.place(described, strategy, mesh=mesh)}
    assert specs == {"table": P("fsdp"), "layers/w": P(None, None, "fsdp")}
    rng = np.random.default_rng(0)
    params = {path: rng.standard_normal(shape).astype(np.float32) for path, (_, shape) in described.items()}
    x = (rng.integers(-1000, 1000, (16, 64, 16)) * 2.0 ** rng.integers(-3, 3, (16, 64, 16))).astype(np.float32)
    placed = {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()}
    run = jax.jit(fsdp.gradients(linear, strategy, mesh=mesh, specs=specs, parts=parts))
    *_, grads = run(placed, {"x": jax.device_put(x, meshes.batch_sharding(mesh))})

    cuts = x.reshape(8, parts, 2 // parts, 64, 16).sum(2)  # device, part
    cuts = cuts if accumulate == "communicate" else cuts.sum(1, keepdims=True)
    table = [
        merge(
            np.stack([one_device_sum(cuts[:, part].reshape(8, 8, -1)[:, to], "bdr_mx4") for to in range(8)]),
            (64, 16),
            0,
        )
        for part in range(cuts.shape[1])
    ]
    np.testing.assert_array_equal(grads["table"], functools.reduce(np.add, table))
    # A layer's gradient is the table's for each of its 8 rows; blocks of 16 lie along the last dimension in both.
    expected = np.broadcast_to(np.asarray(grads["table"]), (LAYERS, 8, 64, 16))
    np.testing.assert_array_equal(grads["layers/w"], expected)
    assert not np.array_equal(grads["table"], x.sum(0))


@pytest.mark.slow
def test_the_model_sees_the_cast_and_the_masters_stay_exact():
    mesh = meshes.make_mesh(MESHES["fsdp8"])
    strategy = Fsdp(form="explicit", gather_format="bdr_mx6")
    specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh)}
    params, batch = residual_stack.params(np.float32), residual_stack.batch()
    placed = {path: jax.device_put(p, NamedSharding(mesh, specs[path])) for path, p in params.items()}
    run = jax.jit(fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs))
    total, _, _, grads = run(placed, jax.device_put(batch, meshes.batch_sharding(mesh)))

    def seen(path, p):
        """As each device's shard is seen, layer by layer."""
        (dim,) = (d for d, axes in enumerate(specs[path]) if axes == "fsdp")
        if not path.startswith("layers/"):
            return merge(cast(jnp.asarray(pieces(p, dim, 8)), "bdr_mx6", axis=-1, tail="pad"), p.shape, dim)
        return np.stack(
            [
                merge(cast(jnp.asarray(pieces(x, dim - 1, 8)), "bdr_mx6", axis=-1, tail="pad"), x.shape, dim - 1)
                for x in p
            ]
        )

    cut = {path: seen(path, p) for path, p in params.items()}
    expected, wanted = jax.jit(jax.value_and_grad(lambda p: residual_stack.loss(p, batch, None)[0]))(cut)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for path, g in grads.items():
        np.testing.assert_allclose(g, wanted[path], rtol=1e-4, atol=1e-5, err_msg=path)
    exact = jax.jit(lambda p: residual_stack.loss(p, batch, None)[0])(params)
    assert abs(float(exact) - float(expected)) > 1e-3  # the cast shows


DIM, HIDDEN = 32, 64
INSIDE, OUTSIDE = residual_stack.L * 2 * DIM * HIDDEN, 2 * residual_stack.V * DIM  # values, norms left whole


def compiled(strategy, mesh, layers=residual_stack.L, dim=DIM, hidden=HIDDEN, **more):
    return residual_stack.lowered(strategy, mesh, layers=layers, dim=dim, hidden=hidden, **more).compile()


def payloads(program, mesh):
    found = {}
    for c in explain_sharding(program, mesh):
        assert c.trip_count_known
        found[c.kind] = found.get(c.kind, 0) + c.bytes
    return found


def dtypes_of(program, kind):
    """Dtypes of what collectives of a kind give."""
    return {
        array.dtype
        for computation in hlo.parse(program.as_text()).computations.values()
        for instruction in computation.instructions
        if instruction.opcode.removesuffix("-start") == kind
        for array in instruction.arrays
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gather", "reduce", "gather_bytes", "reduce_bytes"),
    [
        ("mxfp8_e4m3", "bdr_mx9", 33 / 32, 1.125),
        ("bdr_mx9", None, 1.125, 4),
        (None, "mxfp4_e2m1", 4, 17 / 32),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_format(gather, reduce, gather_bytes, reduce_bytes):
    mesh = meshes.make_mesh(MESHES["fsdp8"])
    formats = Fsdp(form="explicit", gather_format=gather, reduce_format=reduce, replicate_below=DIM + 1)
    program = compiled(formats, mesh)
    found = payloads(program, mesh)
    assert found["all-gather"] == (2 * INSIDE + OUTSIDE) * gather_bytes
    assert found["all-to-all" if reduce else "reduce-scatter"] == (INSIDE + OUTSIDE) * reduce_bytes
    if gather:
        assert dtypes_of(program, "all-gather") == {"u8"}
    if reduce:
        assert dtypes_of(program, "all-to-all") == {"u8"}
        assert "reduce-scatter" not in found


def test_bytes_of_float32_are_the_negative_control():
    mesh = meshes.make_mesh(MESHES["fsdp8"])
    program = compiled(Fsdp(form="explicit", replicate_below=DIM + 1), mesh)
    found = payloads(program, mesh)
    assert found["all-gather"] == (2 * INSIDE + OUTSIDE) * 4
    assert found["reduce-scatter"] == (INSIDE + OUTSIDE) * 4
    assert dtypes_of(program, "all-gather") == {"f32"}


@pytest.mark.slow
@pytest.mark.parametrize("loss", [residual_stack.loss, residual_stack.without_remat], ids=["remat", "no remat"])
def test_decoded_layers_are_dropped_or_kept_as_the_strategy_says(loss):
    mesh = meshes.make_mesh(MESHES["fsdp8"])
    dim, hidden = 64, 512
    layer = 2 * dim * hidden * 4

    def growth(sharding):
        strategy = Fsdp(sharding=sharding, form="explicit", gather_format="bdr_mx9", reduce_format="bdr_mx9")
        sizes = [
            compiled(strategy, mesh, n, dim, hidden, rows=8, loss=loss).memory_analysis().temp_size_in_bytes
            for n in (2, 6)
        ]
        return (sizes[1] - sizes[0]) / 4

    assert growth("FULL_SHARD") < 0.5 * layer < 0.9 * layer < growth("SHARD_GRAD_OP")


def test_what_cannot_travel_encoded_is_refused_with_the_remedy():
    for field in ("gather_format", "reduce_format"):
        with pytest.raises(UserError, match=rf"{field} must be one of bdr_mx9, .*, or None; got 'mx9'"):
            Fsdp(form="explicit", **{field: "mx9"})
        with pytest.raises(UserError, match=rf"{field}='bdr_mx9' needs form='explicit'.*Set form='explicit'"):
            Fsdp(**{field: "bdr_mx9"})
        with pytest.raises(UserError, match=rf"{field}='bdr_mx9' needs parameters that are sharded.*FULL_SHARD"):
            Fsdp(sharding="NO_SHARD", form="explicit", **{field: "bdr_mx9"})
    with pytest.raises(UserError, match=r"decodes to 32 bits at most; got param_dtype='float64'"):
        Fsdp(form="explicit", gather_format="bdr_mx9", param_dtype="float64")
    with pytest.raises(UserError, match=r"is added up in float32; got reduce_dtype='bfloat16'"):
        Fsdp(form="explicit", reduce_format="bdr_mx9", reduce_dtype="bfloat16")
    Fsdp(form="explicit", gather_format="bdr_mx9", param_dtype="bfloat16", reduce_dtype="float32")


def test_blocks_that_would_straddle_devices_are_refused():
    strategy = Fsdp(form="explicit", gather_format="bdr_mx9")
    mesh = meshes.make_mesh(MeshShape(fsdp=4, tensor=2))
    with pytest.raises(UserError, match=r"'layers/mlp/up' is cut over tensor=2 as well.*mesh with tensor=1, or leave"):
        fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs={"layers/mlp/up": P(None, "fsdp", "tensor")})
    mesh = meshes.make_mesh(MESHES["replica2-fsdp4"])
    with pytest.raises(UserError, match=r"'w' is cut along dimensions 0 and 1.*Take the specs of `fsdp.place`"):
        fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs={"w": P("replica", "fsdp")})


@pytest.mark.usefixtures("x64")
def test_double_precision_is_refused_by_name():
    mesh = meshes.make_mesh(MESHES["fsdp8"])
    for field, what in (("gather_format", "parameter"), ("reduce_format", "gradient")):
        strategy = Fsdp(form="explicit", **{field: "bdr_mx9"})
        specs = {p.name: p.spec for p in fsdp.place(residual_stack.axes(), strategy, mesh=mesh)}
        run = fsdp.gradients(residual_stack.loss, strategy, mesh=mesh, specs=specs)
        with pytest.raises(UserError, match=rf"{field}='bdr_mx9' encodes float32.*the {what} '.*' is float64"):
            jax.jit(run)(residual_stack.params(), residual_stack.batch())
