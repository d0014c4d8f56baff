"""Quantized weights in memory: as few bytes as on disk, and the same numbers as decoded ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llama_cases import tokens
from paged_cases import Rows
from quantized_cases import EXPERTS, MATRICES, SMALL, quantize, write_model

from scalejax.inference import generate
from scalejax.inference.packed_params import PackedWeight
from scalejax.models.llm import model_folder
from scalejax.models.llm.mapping import Entry
from scalejax.numerics import formats, packing
from scalejax.numerics.quantize import dequantize
from scalejax.parallel.mesh import MeshShape, make_mesh

ROWS = tokens(SMALL, 2, 24)
PROMPTS = [ROWS[0, :9].tolist(), ROWS[1, :4].tolist()]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("theirs")
    write_model(folder / "float32")
    write_model(folder / "bfloat16", dtype="bfloat16")
    return folder


def engine(folder, mesh=None, **more):
    sizes = mesh or {"fsdp": 1}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return generate.load(model_folder.open_folder(folder), make_mesh(MeshShape(**sizes), devices), **more)


def packed(on):
    return {name: value for name, value in on.params.items() if isinstance(value, PackedWeight)}


def test_a_decoded_weight_is_one_of_the_stored_dtype_with_the_axes_of_the_parameter():
    draw, format = np.random.default_rng(0), formats.find("int4:32")
    codes, scales = draw.integers(0, 256, (6, 16), np.uint8), draw.normal(size=(6, 1)).astype(np.float32)
    arrays = {"codes": codes, "scales": scales, "sub_scales": None, "tensor_scale": None}
    packed = packing.Packed(**arrays, format=format, axis=-1, length=32)
    entry, sizes = Entry("w", "w", "(H D) E -> E H D"), (("E", 32), ("H", 3), ("D", 2))
    weight = PackedWeight(packed, entry, sizes, np.dtype(jnp.bfloat16), np.dtype("float32"))
    want = np.asarray(dequantize(packing.unpack(packed)).astype(jnp.bfloat16), np.float32).T.reshape(32, 3, 2)
    assert weight.decode().dtype == np.float32
    np.testing.assert_array_equal(weight.decode(), want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "each"),
    [
        ("bdr_mx9", 1.125),
        ("mxfp6_e3m2", 25 / 32),
        ("bdr_mx4", 0.5),
        ("mxfp4_e2m1", 17 / 32),
    ],
)
def test_bytes_of_a_number_in_memory(theirs, tmp_path, format, each):
    quantize(theirs / "float32", tmp_path / "out", format)
    on = engine(tmp_path / "out")
    held = packed(on)
    assert len(held) == MATRICES // SMALL.layers
    numbers = sum(p.size for name, p in on.shape.params.items() if name in held)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(held)) == each * numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "dtype"),
    [("nvfp4", "float32"), ("mxfp6_e3m2", None), ("int4:32", None)],
)
def test_packed_weights_give_the_logits_of_decoded_ones(theirs, tmp_path, format, dtype):
    quantize(theirs / "bfloat16", tmp_path / format, format)
    ons = [engine(tmp_path / format, dtype=dtype, weights=w) for w in ("packed", "decoded")]
    assert [bool(packed(on)) for on in ons] == [True, False]
    for name, value in packed(ons[0]).items():
        for layer in range(SMALL.layers):
            one = jax.tree.map(lambda a, layer=layer: a[layer], value).decode()
            np.testing.assert_array_equal(one, ons[1].params[name][layer])
            assert one.dtype == (dtype or jnp.bfloat16)
    logits = [np.asarray(on.logits(ROWS)) for on in ons]
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-2, atol=1e-2 * np.abs(logits[1]).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 1, "tensor": 2},
        {"fsdp": 2, "tensor": 1},
    ],
)
def test_packed_weights_generate_the_same_tokens(theirs, tmp_path, mesh):
    quantize(theirs / "float32", tmp_path / "out", "bdr_mx6")
    want = engine(tmp_path / "out", weights="decoded").generate(PROMPTS, max_tokens=6)
    on = engine(tmp_path / "out", mesh=mesh)
    assert on.generate(PROMPTS, max_tokens=6) == want
    if mesh:
        # 64 columns are 4 blocks, so halves of them are whole blocks; a device has half of the codes.
        up = packed(on)["layers/mlp/up"].packed.codes
        assert up.sharding.shard_shape(up.shape) in {(2, 48, 40), (2, 96, 20)}


@pytest.mark.slow
def test_blocks_that_a_mesh_cuts_are_decoded(theirs, tmp_path):
    quantize(theirs / "float32", tmp_path / "out", "mxfp4_e2m1")
    on = engine(tmp_path / "out", mesh={"fsdp": 1, "tensor": 4})
    # 96 columns are 3 blocks of 32, and 4 devices share them.
    assert "layers/mlp/down" not in packed(on)
    assert "layers/mlp/up" in packed(on)
    # A device has the columns of 4 heads' parts: a quarter of 64 is half a block.
    assert "layers/attention/out" not in packed(on)


@pytest.mark.slow
def test_layers_of_several_formats_are_decoded(theirs, tmp_path):
    quantize(theirs / "float32", tmp_path / "out", "mxfp4_e2m1", given=[("layers/0/mlp/.*", "bdr_mx9")])
    assert not any("mlp" in name for name in packed(engine(tmp_path / "out")))
    assert len(packed(engine(tmp_path / "out"))) == 4


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    """Folders of one Mixtral: a tensor of codes for each expert, and one for all."""
    folder = tmp_path_factory.mktemp("mixtral")
    write_model(folder / "theirs", EXPERTS)
    quantize(folder / "theirs", folder / "many", "nvfp4")
    quantize(folder / "theirs", folder / "one", "mxfp4_e2m1", layout="gpt-oss")
    return folder


MATRICES_OF_EXPERTS = {"layers/mlp/gate", "layers/mlp/up", "layers/mlp/down"}


@pytest.mark.slow
@pytest.mark.parametrize(("form", "each"), [("many", 9 / 16), ("one", 17 / 32)])
def test_experts_stay_packed(mixtral, form, each):
    held, decoded = packed(engine(mixtral / form)), engine(mixtral / form, weights="decoded").params
    assert held.keys() > MATRICES_OF_EXPERTS
    for name in MATRICES_OF_EXPERTS:
        for layer in range(EXPERTS.layers):
            one = jax.tree.map(lambda a, layer=layer: a[layer], held[name])
            np.testing.assert_array_equal(one.decode(), decoded[name][layer], err_msg=name)
        scales = 4 * 4 * EXPERTS.layers if form == "many" else 0  # a float32 for each expert and layer
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(held[name])) == each * decoded[name].size + scales


@pytest.mark.slow
@pytest.mark.parametrize("form", ["many", "one"])
def test_packed_experts_generate_the_same_tokens(mixtral, form):
    want = engine(mixtral / form, weights="decoded").generate(PROMPTS, max_tokens=6)
    for mesh in (None, {"fsdp": 2, "tensor": 1}, {"fsdp": 1, "tensor": 2}):
        on = engine(mixtral / form, mesh=mesh)
        assert on.generate(PROMPTS, max_tokens=6) == want
        up = packed(on)["layers/mlp/up"].packed.codes
        # 64 columns are whole blocks in halves; of 96 hidden features half are rows of their own.
        assert up.sharding.shard_shape(up.shape)[2:] in ({(96, 32)} if mesh is None else {(48, 32), (96, 16)})


@pytest.mark.slow
def test_a_layer_is_decoded_at_a_time(theirs, tmp_path):
    """Bytes beside the arguments: less than the decoded stack of all layers would take."""
    import dataclasses

    config = dataclasses.replace(SMALL, layers=12)
    write_model(tmp_path / "theirs", config)
    quantize(tmp_path / "theirs", tmp_path / "out", "bdr_mx6")
    on = engine(tmp_path / "out")
    read, own = Rows(1, 128), on.programs
    given = ROWS[:1], read.reading([24], 24), np.zeros(1, np.int32), own.empty(1, read.pages)
    found = own.read.lower(on.params, *given).compile().memory_analysis()
    decoded = sum(p.size * 4 for name, p in on.shape.params.items() if name in packed(on))
    assert found.temp_size_in_bytes < 0.6 * decoded
