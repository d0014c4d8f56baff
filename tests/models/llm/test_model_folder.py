"""Folders of Hugging Face and of scalejax: round trips to the bit, and what is refused."""

import dataclasses
import errno
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from llama_cases import CASES, F32, GQA, parameters, tensors, write_checkpoint

from scalejax.errors import UserError
from scalejax.models.llm import llama3, loading, model_folder, safetensors
from scalejax.models.llm.llama3 import huggingface
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.rules import LLM
from scalejax.train.state import ModelShape


def read_all(folder):
    return {name: tensor.read() for name, tensor in safetensors.open_folder(folder).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_import_and_export_give_the_same_bits(tmp_path, case, dtype):
    config = CASES[case]
    written = write_checkpoint(tmp_path / "theirs", config, dtype=dtype, shard_bytes=10_000)
    (tmp_path / "theirs" / "tokenizer_config.json").write_text('{"a": 1}')
    model = model_folder.open_folder(tmp_path / "theirs")
    assert (model.kind, len(model.shards) > 2, str(model.dtype)) == ("huggingface", True, dtype)
    model_folder.convert(model, tmp_path / "ours", to="model", shard_bytes=30_000)
    ours = model_folder.open_folder(tmp_path / "ours")
    assert (ours.config, ours.tokens) == (model.config, model.tokens)
    assert ours.config == config
    model_folder.convert(ours, tmp_path / "back", to="huggingface")
    back = read_all(tmp_path / "back")
    assert back.keys() == written.keys()
    for name, array in written.items():
        assert back[name].dtype == array.dtype
        assert back[name].tobytes() == array.tobytes(), name
    assert (tmp_path / "back" / "tokenizer_config.json").read_text() == '{"a": 1}'
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == dtype


def test_a_model_folder_has_parameters_by_our_paths(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    model_folder.convert(model_folder.open_folder(tmp_path / "theirs"), tmp_path / "ours", to="model")
    found, want = read_all(tmp_path / "ours"), parameters(GQA, tensors(GQA))
    np.testing.assert_array_equal(found["layers/1/attention/query"], want["layers/attention/query"][1])
    np.testing.assert_array_equal(found["head/weight"], want["head/weight"])
    content = json.loads((tmp_path / "ours" / "model.json").read_text())
    assert content["model"]["type"] == "scalejax.models.llm.llama3.config.LlamaConfig"
    assert content["model"]["fields"]["kv_heads"] == 2


@pytest.mark.default_cases("wide heads, scaled-mesh1")
@pytest.mark.parametrize("mesh", [{"fsdp": 1}, {"fsdp": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}])
@pytest.mark.parametrize("case", ["gqa", "wide heads, scaled"])
def test_devices_hold_the_slices_that_their_mesh_wants(tmp_path, case, mesh):
    config = CASES[case]
    write_checkpoint(tmp_path / "theirs", config, shard_bytes=20_000)
    made = make_mesh(MeshShape(**mesh), jax.devices()[: np.prod(list(mesh.values()))])
    shape = ModelShape.of(nnx.eval_shape(lambda: llama3.Llama(config, nnx.Rngs(0), F32)))
    shardings = shape.shardings(made, LLM)
    targets = {
        name: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16, sharding=shardings[name]) for name, p in shape.params.items()
    }
    seen = []
    source = model_folder.open_folder(tmp_path / "theirs").source
    got = loading.load(source, targets, loaded=seen.append)
    want = parameters(config, tensors(config))
    assert got.keys() == want.keys()
    for name, array in got.items():
        assert isinstance(array.sharding, NamedSharding)
        assert array.sharding.is_equivalent_to(shardings[name], array.ndim)
        np.testing.assert_array_equal(np.asarray(array), want[name].astype(jnp.bfloat16))
    assert sum(seen) == 2 * config.parameters()


def test_a_cast_rounds_to_nearest_and_says_when_it_overflows(tmp_path):
    weights = tensors(GQA)
    write_checkpoint(tmp_path / "theirs", GQA, weights)
    model_folder.convert(
        model_folder.open_folder(tmp_path / "theirs"), tmp_path / "a", to="model", dtype=jnp.dtype("bfloat16")
    )
    found = read_all(tmp_path / "a")["embed/weight"]
    np.testing.assert_array_equal(found, weights["model.embed_tokens.weight"].astype(jnp.bfloat16))
    weights["lm_head.weight"][3, 4] = 1e6
    write_checkpoint(tmp_path / "large", GQA, weights)
    model = model_folder.open_folder(tmp_path / "large")
    with pytest.raises(UserError, match="head/weight as float16 holds 1 values that are NaN or infinite"):
        model_folder.convert(model, tmp_path / "b", to="model", dtype=np.dtype("float16"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "large", "theirs"]  # nothing half done is left


# Refusals.


def refuses(folder, words):
    with pytest.raises(UserError, match=words):
        model = model_folder.open_folder(folder)
        model_folder.convert(model, folder.parent / "out", to="model")
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: w.pop("model.layers.1.mlp.up_proj.weight"),
            "lacks model.layers.1.mlp.up_proj.weight, which its config",
        ),
        (
            lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}),
            "also holds model.layers.0.self_attn.q_proj.bias.* Biases are not part of this architecture",
        ),
        (
            lambda w: w.update({"model.layers.2.input_layernorm.weight": np.zeros(32, np.float32)}),
            "also holds model.layers.2.input_layernorm.weight",
        ),
        (
            lambda w: w.update({"model.norm.weight": np.zeros(31, np.float32)}),
            r"model.safetensors: tensor model.norm.weight has shape \[31\], but by the config it should be \[32\]",
        ),
        (
            lambda w: w["model.layers.1.self_attn.k_proj.weight"].__setitem__((3, 2), np.nan),
            "model.safetensors: tensor model.layers.1.self_attn.k_proj.weight holds 1 values that are NaN or infinite",
        ),
        (
            lambda w: w.update(
                {"model.layers.1.mlp.up_proj.weight": w["model.layers.1.mlp.up_proj.weight"].astype("f2")}
            ),
            "the layers of .* have different dtypes, F16, F32",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused(tmp_path, change, words):
    weights = tensors(GQA)
    change(weights)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(huggingface.write_config(GQA, huggingface.SpecialTokens(), "float32"))
    )
    plan = tuple(safetensors.Written(name, a.dtype, a.shape) for name, a in weights.items())
    safetensors.write_folder(folder, plan, weights.__getitem__)
    refuses(folder, words)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            "architecture MistralForCausalLM of model_type 'llama' is not known",
        ),
        ({"architectures": None, "model_type": None}, "architecture None of model_type None is not known"),
        ({"num_hidden_layers": 10**9}, "lacks model.layers.2.input_layernorm.weight"),
        ({"head_dim": 0}, "head_dim must be a whole number of at least 1"),
        ({"model_type": "mixtral"}, "of model_type 'mixtral' is not known"),
        ({"attention_bias": True}, "attention_bias is True: biases in the attention is not known here"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers must be a whole number; got 'two'"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0}}, "rope_type 'yarn' is not known"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear' is not known"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number; got None"),
        ({"rope_theta": 10_000.0}, "Remove the one that is wrong"),
        (
            {"rope_parameters": None, "rope_scaling": {"rope_type": "default", "rope_theta": 1e6}},
            r"rope_theta is 500000.0 but 1000000.0 in rope_scaling",
        ),
        ({"rope_parameters": None, "rope_theta": 0}, "rope_theta must be above 0 and finite; got 0.0"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number; got None"),
        ({"initializer_range": None}, "initializer_range must be a number; got None"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false; got 'false'"),
        ({"eos_token_id": True}, "eos_token_id must be a token id or a list of them; got True"),
        ({"eos_token_id": [2, 96]}, "the eos token is 96, but the vocabulary ends at 95"),
        ({"vocab_size": 97}, r"has shape \[96, 32\], but by the config it should be \[97, 32\]"),
    ],
)
def test_configs_that_are_not_understood_are_refused(tmp_path, fields, words):
    write_checkpoint(tmp_path / "theirs", GQA, **fields)
    refuses(tmp_path / "theirs", words)


def test_both_schemas_of_rotary_positions_are_read_and_written():
    for case in ("gqa", "wide heads, scaled"):
        config = CASES[case]
        both = huggingface.write_config(config, huggingface.SpecialTokens(), "float32")
        assert both["rope_theta"] == both["rope_parameters"]["rope_theta"] == config.rope_theta
        older = {name: value for name, value in both.items() if name != "rope_parameters"}
        newer = {name: value for name, value in both.items() if name not in ("rope_scaling", "rope_theta")}
        for content in (both, older, newer):
            assert huggingface.read_config(content, "config.json")[0] == config
    nothing = {name: value for name, value in older.items() if not name.startswith("rope")}
    assert huggingface.read_config(nothing, "config.json")[0].rope_theta == 10_000  # what transformers 4 takes


def test_a_theta_inside_of_the_older_schema_counts():
    content = huggingface.write_config(GQA, huggingface.SpecialTokens(), "float32")
    inside = {"rope_scaling": {"rope_type": "default", "rope_theta": 7e5}}
    bare = {name: value for name, value in content.items() if not name.startswith("rope")}
    assert huggingface.read_config(bare | inside, "config.json")[0].rope_theta == 7e5


def test_keys_without_a_meaning_here_are_named(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA, made_with="another tool")
    assert "also says made_with" in model_folder.open_folder(tmp_path / "theirs").remarks[0]


def test_a_tied_head_may_be_repeated_but_not_differ(tmp_path):
    config = CASES["mqa"]
    weights = tensors(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    write_checkpoint(tmp_path / "same", config, weights)
    assert "lm_head.weight repeats" in model_folder.open_folder(tmp_path / "same").remarks[0]
    weights["lm_head.weight"][5, 6] += 1
    write_checkpoint(tmp_path / "theirs", config, weights)
    refuses(tmp_path / "theirs", "lm_head.weight differs from model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"vocab": {"a": 0}, "added": 95}, None),
        ({"vocab": {"a": 0}, "added": 96}, "the token '<end>' has id 96, but the model's ids are 0 to 95"),
        ({"vocab": {"a": 0, "b": 2**31}}, f"the token 'b' has id {2**31}, but the model's ids are 0 to 95"),
        ({"vocab": {"a": -1}}, "the token 'a' has id -1"),
        ({"vocab": {"a": 1.5}}, "the token 'a' has id 1.5"),
        ({"vocab": {"a": float("inf")}}, "the token 'a' has id inf"),
        ({"vocab": [["a", 0.5]] * 96}, None),
        ({"vocab": [["a", 0.5]] * 96 + [["b", 0.5]]}, "the token 'b' has id 96"),
        ({"vocab": None}, "has no vocabulary that can be read"),
    ],
)
def test_ids_of_a_tokenizer_outside_of_the_table_are_refused_with_their_token(tmp_path, content, words):
    write_checkpoint(tmp_path / "theirs", GQA)
    added = [{"id": content["added"], "content": "<end>"}] if "added" in content else []
    path = tmp_path / "theirs" / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": content["vocab"]}, "added_tokens": added}))
    if words is None:
        model_folder.open_folder(tmp_path / "theirs")
    else:
        refuses(tmp_path / "theirs", f"{path}: {words}")


def test_ids_of_the_generation_config_are_compared_with_the_vocabulary(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    path = tmp_path / "theirs" / "generation_config.json"
    for content, words in (
        ('{"eos_token_id": [2, 96]}', "generation_config.json: the eos token is 96, but the vocabulary ends at 95"),
        ('{"eos_token_id": "</s>"}', "generation_config.json: eos_token_id must be a token id"),
        ("{", "generation_config.json: cannot be read as JSON"),
    ):
        path.write_text(content)
        refuses(tmp_path / "theirs", words)


@pytest.mark.parametrize("change", [{"dtype": "F8_E5M2"}, {"shape": [96 * 32]}])
def test_a_repeated_head_of_a_kind_that_is_not_known_is_refused_as_its_table_is(tmp_path, change):
    config = CASES["mqa"]
    weights = tensors(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    write_checkpoint(tmp_path / "theirs", config, weights)
    path = tmp_path / "theirs" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        header[name].update(change)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    refuses(tmp_path / "theirs", "tensor model.embed_tokens.weight has (dtype F8_E5M2|shape .3072.)")


def test_pickles_are_not_loaded(tmp_path):
    class Trap:
        def __reduce__(self):
            return (print, ("loaded",))

    folder = tmp_path / "theirs"
    write_checkpoint(folder, GQA)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refuses(folder, "has its weights in pytorch_model.bin, and pickle files are never loaded")


def test_model_json_of_another_kind_is_refused(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    model_folder.convert(model_folder.open_folder(tmp_path / "theirs"), tmp_path / "ours", to="model")
    path = tmp_path / "ours" / "model.json"
    content = json.loads(path.read_text())
    for change, words in (
        ({"format": 3}, "has format 3, and this scalejax reads up to 2"),
        (
            {"format": 2, "tokens": {"bos": 3, "eos": [], "pad": None}},
            r"model.json: is damaged. Restore it from a copy",
        ),
        ({"model": {"type": "os.system", "fields": {}}}, "architecture 'os.system' is not known"),
        ({"model": {**content["model"], "fields": {**content["model"]["fields"], "wheels": 4}}}, "wheels"),
        ({"model": {**content["model"], "fields": {**content["model"]["fields"], "layers": 2.0}}}, "layers must be"),
        ({"model": {**content["model"], "fields": {**content["model"]["fields"], "remat": "x"}}}, "remat must be one"),
        ({"tokens": {"bos": 1, "eos": ["a"], "pad": None}}, "eos_token_id must be a token id"),
    ):
        path.write_text(json.dumps(content | {"format": 1} | change))
        with pytest.raises(UserError, match=words):
            model_folder.open_folder(tmp_path / "ours")


def test_a_flipped_bit_in_any_file_of_a_model_folder_is_one_message(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages }}")
    model_folder.convert(model_folder.open_folder(tmp_path / "theirs"), tmp_path / "ours", to="model")
    files = sorted((tmp_path / "ours").iterdir())
    assert "chat_template.jinja" in {file.name for file in files}
    for file in files:
        source = file.read_bytes()
        file.write_bytes(source[:-9] + bytes([source[-9] ^ 1]) + source[-8:])
        with pytest.raises(UserError, match=rf"{file.name}: (is damaged|cannot be read as JSON)"):
            model_folder.open_folder(tmp_path / "ours")
        file.write_bytes(source)
    model_folder.open_folder(tmp_path / "ours")


def test_a_target_that_is_there_is_refused(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA)
    model = model_folder.open_folder(tmp_path / "theirs")
    with pytest.raises(UserError, match="theirs is there already"):
        model_folder.convert(model, tmp_path / "theirs", to="model")
    (tmp_path / "empty").mkdir()
    model_folder.convert(model, tmp_path / "empty", to="model")
    assert model_folder.kind_of(tmp_path / "empty") == "model"


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path, monkeypatch):
    def refuse(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_checkpoint(tmp_path / "theirs", GQA)
    monkeypatch.setattr(model_folder, "write_json", refuse)
    with pytest.raises(UserError, match=r"ours: cannot be written \(No space left on device\)"):
        model_folder.convert(model_folder.open_folder(tmp_path / "theirs"), tmp_path / "ours", to="model")
    assert [p.name for p in tmp_path.iterdir()] == ["theirs"]


def test_folders_that_are_nothing_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no model\.json"):
        model_folder.kind_of(tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        model_folder.kind_of(tmp_path / "missing")


def test_configs_of_every_published_size_survive(tmp_path):
    for config in llama3.SIZES.values():
        tokens = huggingface.SpecialTokens(bos=128_000, eos=(128_001, 128_008, 128_009))
        content = json.loads(json.dumps(huggingface.write_config(config, tokens, "bfloat16")))
        assert huggingface.read_config(content, "config.json") == (config, tokens, ())
        again = json.loads(json.dumps(model_folder.model_json(dataclasses.replace(config, remat="dots"), tokens)))
        assert again["model"]["fields"]["remat"] == "dots"
