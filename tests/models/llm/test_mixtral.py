"""Mixtral: logits and the balance loss of transformers, folders in both forms, and what is refused."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import F32, GQA, MIXTRAL, model, parameters, scenarios, tensors, tokens, write_checkpoint

from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.inference import generate
from scalejax.models.llm import families, mixtral, model_folder, safetensors
from scalejax.models.llm.experts import ExpertChoice, Experts, TopK
from scalejax.models.llm.special_tokens import SpecialTokens
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.task import Batch, whole

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "mixtral.npz")


def fused(config, weights):
    """The form that transformers has in memory, made by hand."""
    made = {name: array for name, array in weights.items() if "block_sparse_moe" not in name}
    count = config.mlp.count
    for layer in range(config.layers):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        made[f"{new}.gate.weight"] = weights[f"{old}.gate.weight"]
        one, two, three = ([weights[f"{old}.experts.{e}.w{n}.weight"] for e in range(count)] for n in (1, 2, 3))
        made[f"{new}.experts.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(one, three, strict=True)])
        made[f"{new}.experts.down_proj"] = np.stack(two)
    return made


def read(folder):
    opened = model_folder.open_folder(folder)
    entries, sizes = families.own_table(opened.config)
    found = {}
    for entry in entries:
        layers = [opened.source.read(entry.path, i if entry.stacked else None) for i in range(opened.config.layers)]
        found[entry.path] = np.stack(layers) if entry.stacked else layers[0]
        assert found[entry.path].shape[entry.stacked :] == entry.shape(sizes)
    return opened, found


def write(folder, form, config=MIXTRAL, **more):
    weights = tensors(config)
    return write_checkpoint(folder, config, weights if form == "for each expert" else fused(config, weights), **more)


@pytest.mark.slow
@pytest.mark.parametrize("name", scenarios(MIXTRAL))
def test_logits_are_those_of_transformers(name):
    ids, segments, positions = scenarios(MIXTRAL)[name]
    found = jax.jit(lambda m, *inputs: m(*inputs))(model(MIXTRAL), ids, positions, segments)
    np.testing.assert_allclose(found, GOLDEN[name], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_the_balance_loss_is_that_of_transformers():
    """Of one layer, as transformers' mixes layers."""
    config = dataclasses.replace(MIXTRAL, mlp=Experts(count=4, router=TopK(k=2, balance=1.0)))
    ids, segments, positions = scenarios(config)["plain"]
    first = model(config)
    _, _, numbers = first.hidden_with_numbers(jnp.asarray(ids), jnp.asarray(positions), jnp.asarray(segments))
    graph, state = nnx.split(first)
    one = jax.tree.map(lambda x: x[:1], state["layers"])
    config = dataclasses.replace(config, layers=1)
    task = config.task(TokenSchema(vocabulary=96, length=ids.shape[1]))
    made = task.init(nnx.Rngs(0), F32)
    graph, own = nnx.split(made)
    own["layers"], own["embed"] = one, state["embed"]
    made = nnx.merge(graph, own)
    arrays = {"tokens": ids, "targets": ids, "segment_ids": segments, "positions": positions}
    batch = Batch({**arrays, "weights": np.ones(ids.shape, np.float32)})
    loss = task.loss(made, batch, keys=None, gather=whole)
    np.testing.assert_allclose((loss.sum - loss.sums["cross_entropy"]) / ids.size, GOLDEN["balance"], rtol=1e-4)
    assert numbers["load"].shape == (2, 2, 4)


@pytest.mark.parametrize("form", ["for each expert", "fused"])
def test_a_folder_is_read_in_both_forms(tmp_path, form):
    weights = tensors(MIXTRAL)
    write(tmp_path / "theirs", form)
    opened, found = read(tmp_path / "theirs")
    assert opened.config == dataclasses.replace(MIXTRAL, mlp=opened.config.mlp)
    assert (opened.config.mlp.count, opened.config.mlp.router.k) == (4, 2)
    for path, array in parameters(MIXTRAL, weights).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    # Gate first: swapped halves would load without a word.
    old = "model.layers.1.block_sparse_moe.experts.3"
    np.testing.assert_array_equal(found["layers/mlp/gate"][1, 3], weights[f"{old}.w1.weight"].T)
    np.testing.assert_array_equal(found["layers/mlp/up"][1, 3], weights[f"{old}.w3.weight"].T)
    assert not np.array_equal(found["layers/mlp/gate"], found["layers/mlp/up"])


@pytest.mark.parametrize("form", ["for each expert", "fused"])
def test_a_slice_is_read_as_it_stands_in_the_whole(tmp_path, form):
    write(tmp_path / "theirs", form)
    opened, found = read(tmp_path / "theirs")
    index = (slice(1, 3), slice(8, 24), slice(5, 40))
    for path in ("layers/mlp/gate", "layers/mlp/up"):
        np.testing.assert_array_equal(opened.source.read(path, 1, index), found[path][1][index])
    index = (slice(2, 4), slice(5, 40), slice(8, 24))
    np.testing.assert_array_equal(opened.source.read("layers/mlp/down", 0, index), found["layers/mlp/down"][0][index])


def test_there_and_back_gives_the_same_files(tmp_path):
    weights = write(tmp_path / "theirs", "for each expert")
    opened, first = read(tmp_path / "theirs")
    model_folder.convert(opened, tmp_path / "ours", to="model")
    ours, second = read(tmp_path / "ours")
    assert ours.config == opened.config
    model_folder.convert(ours, tmp_path / "again", to="huggingface")
    found = safetensors.open_folder(tmp_path / "again")
    assert set(found) == set(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name].read(), array, err_msg=name)
    for path, array in first.items():
        np.testing.assert_array_equal(second[path], array)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "again"))
    assert before == after
    assert (before["model_type"], before["num_local_experts"], before["num_experts_per_tok"]) == ("mixtral", 4, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fused_form_is_written_to_the_bit(tmp_path, dtype):
    weights = write(tmp_path / "theirs", "for each expert", dtype=dtype)
    model_folder.convert(model_folder.open_folder(tmp_path / "theirs"), tmp_path / "ours", to="model")
    ours = model_folder.open_folder(tmp_path / "ours")
    model_folder.convert(ours, tmp_path / "fused", to="huggingface", experts="fused", shard_bytes=50_000)
    wanted, found = fused(MIXTRAL, weights), safetensors.open_folder(tmp_path / "fused")
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].read().tobytes() == array.tobytes(), name
    second = read(tmp_path / "fused")[1]
    for path, array in read(tmp_path / "theirs")[1].items():
        assert second[path].tobytes() == array.tobytes(), path


def test_forms_that_are_none_are_refused(tmp_path):
    write(tmp_path / "theirs", "fused")
    opened = model_folder.open_folder(tmp_path / "theirs")
    with pytest.raises(UserError, match="--experts packed: MixtralForCausalLM has experts in the forms separate, fus"):
        model_folder.convert(opened, tmp_path / "out", to="huggingface", experts="packed")
    write_checkpoint(tmp_path / "llama", GQA)
    with pytest.raises(UserError, match=r"--experts fused: LlamaForCausalLM has no experts. Leave it out"):
        model_folder.convert(
            model_folder.open_folder(tmp_path / "llama"), tmp_path / "out", to="huggingface", experts="fused"
        )
    assert not (tmp_path / "out").exists()


def test_halves_of_several_dtypes_are_refused(tmp_path):
    weights = tensors(MIXTRAL)
    mixed = {name: a.astype(jnp.bfloat16) if ".w3." in name else a for name, a in weights.items()}
    write_checkpoint(tmp_path / "theirs", MIXTRAL)
    plan = tuple(safetensors.Written(name, array.dtype, array.shape) for name, array in mixed.items())
    safetensors.write_folder(tmp_path / "theirs", plan, mixed.__getitem__)
    opened = model_folder.open_folder(tmp_path / "theirs")
    words = r"layers.0.mlp.experts.gate_up_proj is made of layers/mlp/gate in float32 and layers/mlp/up in bfloat16"
    for dtype in (None, np.dtype(np.float32)):
        with pytest.raises(UserError, match=words):
            model_folder.convert(opened, tmp_path / "out", to="huggingface", experts="fused", dtype=dtype)
    model_folder.convert(opened, tmp_path / "ours", to="model", dtype=np.dtype(np.float32))
    ours = model_folder.open_folder(tmp_path / "ours")
    model_folder.convert(ours, tmp_path / "out", to="huggingface", experts="fused")


@pytest.mark.slow
def test_tokens_are_those_of_full_passes(tmp_path):
    """Generated with a cache from a folder, on one device and with experts' hidden features over `tensor`."""
    write(tmp_path / "theirs", "fused")
    made = model(MIXTRAL)
    prompt = tokens(MIXTRAL, 1, 9)[0].tolist()
    wanted, full = list(prompt), jax.jit(made.__call__)
    for _ in range(6):
        ids = jnp.asarray([[*wanted, *[0] * (15 - len(wanted))]])
        logits = full(ids, jnp.arange(15)[None], jnp.ones_like(ids))
        wanted.append(int(logits[0, len(wanted) - 1].argmax()))
    opened = model_folder.open_folder(tmp_path / "theirs")
    for shape, devices in ((MeshShape(fsdp=1), 1), (MeshShape(fsdp=2, tensor=2), 4)):
        engine = generate.load(opened, make_mesh(shape, jax.devices()[:devices]))
        assert list(engine.generate([prompt], max_tokens=6)[0].tokens) == wanted[9:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be at least 1, or null; got 0"),
        ({"sliding_window": "128"}, "sliding_window must be a whole number; got '128'"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"num_local_experts": None}, "num_local_experts must be a whole number; got None"),
        ({"num_experts_per_tok": 5}, "router.k must be at most count; got 5 of 4 experts"),
        ({"router_aux_loss_coef": "much"}, "router_aux_loss_coef must be a number; got 'much'"),
        ({"num_local_experts": 5}, r"lacks model.layers.0.block_sparse_moe.experts.4"),
        ({"num_local_experts": 3}, r"also holds model.layers.0.block_sparse_moe.experts.3"),
    ],
)
def test_configs_that_are_another_model_are_refused(tmp_path, change, message):
    write(tmp_path / "theirs", "for each expert", **change)
    with pytest.raises(UserError, match=message):
        model_folder.open_folder(tmp_path / "theirs")


@pytest.mark.parametrize(("stated", "window"), [(128, 128), (MIXTRAL.max_positions, None), (None, None)])
def test_a_window_is_read_unless_it_hides_nothing(tmp_path, stated, window):
    write(tmp_path / "theirs", "fused", sliding_window=stated)
    config = model_folder.open_folder(tmp_path / "theirs").config
    assert (config.window, config.mlp.count) == (window, 4)
    content = mixtral.write_config(config, SpecialTokens(), "float32")
    assert (content["model_type"], content["sliding_window"]) == ("mixtral", window)


def test_half_a_fused_tensor_is_refused(tmp_path):
    weights = fused(MIXTRAL, tensors(MIXTRAL))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    weights[name] = weights[name][:, : MIXTRAL.ffn_dim]
    write_checkpoint(tmp_path / "theirs", MIXTRAL, weights)
    with pytest.raises(
        UserError, match=rf"{name} has shape \[4, 48, 32\], but by the config it should be \[4, 96, 32\]"
    ):
        model_folder.open_folder(tmp_path / "theirs")


def test_a_config_is_of_one_family():
    assert families.of(MIXTRAL).name == "MixtralForCausalLM"
    assert families.of(GQA).name == "LlamaForCausalLM"
    sigmoid = dataclasses.replace(MIXTRAL, mlp=Experts(count=4, router=TopK(scores="sigmoid")))
    with pytest.raises(UserError, match=r"router is TopK\(.*'sigmoid'.*which no Mixtral"):
        mixtral.MIXTRAL.entries(sigmoid)
    chosen = dataclasses.replace(MIXTRAL, mlp=Experts(count=4, router=ExpertChoice(), execution="batched"))
    with pytest.raises(UserError, match=r"router is ExpertChoice.*which no Mixtral"):
        mixtral.MIXTRAL.entries(chosen)
