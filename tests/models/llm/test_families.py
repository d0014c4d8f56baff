"""Families of language models: what an entry says is all that folders, generation and quantization ask."""

import dataclasses
import json

import jax
import pytest
from flax import nnx
from llama_cases import CASES, F32, GQA, tensors, tokens, write_checkpoint

from scalejax.errors import UserError
from scalejax.inference import generate
from scalejax.models.llm import families, llama3, model_folder
from scalejax.models.llm.families import own_table
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class CamelConfig(llama3.LlamaConfig):
    """A Llama under another name, with tensors by other names."""


def _entries(config):
    return tuple(
        dataclasses.replace(entry, name=entry.name.replace("model.", "camel.")) for entry in _llama().entries(config)
    )


def _read_config(content, where):
    config, *rest = _llama().read_config(content, where)
    return CamelConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}), *rest


def _write_config(*args):
    named = {"architectures": ["CamelForCausalLM"], "model_type": "camel"}
    return _llama().write_config(*args) | named


def _llama():
    return families.of(GQA)


@pytest.fixture
def camel(monkeypatch):
    """A registered family."""
    monkeypatch.setattr(families, "_REGISTERED", [])
    entry = dataclasses.replace(
        _llama(),
        config=CamelConfig,
        name="CamelForCausalLM",
        model_type="camel",
        entries=_entries,
        read_config=_read_config,
        write_config=_write_config,
    )
    families.register(entry)
    return entry


def _continued(folder):
    on = generate.load(model_folder.open_folder(folder), make_mesh(MeshShape(), jax.devices()[:1]))
    return [made.tokens for made in on.generate([tokens(GQA, 1, 5)[0].tolist()], max_tokens=6)]


@pytest.mark.slow
def test_a_registered_family_is_converted_read_and_generated_with(camel, tmp_path):
    write_checkpoint(tmp_path / "llama", GQA)
    llama = model_folder.open_folder(tmp_path / "llama")
    config = CamelConfig(**{field.name: getattr(GQA, field.name) for field in dataclasses.fields(GQA)})
    model_folder.convert(dataclasses.replace(llama, config=config), tmp_path / "camel", to="huggingface")
    found = model_folder.open_folder(tmp_path / "camel")
    assert (type(found.config), found.architecture) == (CamelConfig, camel)
    model_folder.convert(found, tmp_path / "ours", to="model")
    content = json.loads((tmp_path / "ours" / "model.json").read_text())
    assert content["model"]["type"].endswith("test_families.CamelConfig")
    ours = model_folder.open_folder(tmp_path / "ours")
    assert ours.config == found.config == config
    assert _continued(tmp_path / "ours") == _continued(tmp_path / "camel") == _continued(tmp_path / "llama")


def test_what_is_no_family_is_refused(camel):
    with pytest.raises(
        UserError,
        match=r"LlamaForCausalLM of .*'llama', Mistral.*'mistral', Mixtral.*'mixtral', MoMa.*'moma', Camel.*'camel' is",
    ):
        families.of_folder({"model_type": "gemma"}, "config.json")
    with pytest.raises(UserError, match="tuple is no config of a language model that is known; LlamaConfig, Camel"):
        families.of(())
    assert families.find(()) is None


@pytest.mark.parametrize("case", CASES)
def test_the_own_table_has_every_parameter_as_the_model_has_it(case):
    config = CASES[case]
    entries, sizes = own_table(config)
    shape = ModelShape.of(nnx.eval_shape(lambda: llama3.Llama(config, nnx.Rngs(0), F32)))
    found = {e.path: ((config.layers,) if e.stacked else ()) + e.shape(sizes) for e in entries}
    assert found == {path: param.shape for path, param in shape.params.items()}
    theirs, lengths = _llama().entries(config), _llama().sizes(config)
    assert {e.path: e.shape(lengths) for e in theirs} == {e.path: e.shape(sizes) for e in entries}
    names = {entry.name for entry in entries}
    assert {"embed/weight", "layers/{layer}/attention/query", "layers/{layer}/mlp_norm/scale"} <= names
    assert all(entry.axes.split(" -> ")[0] == entry.axes.split(" -> ")[1] for entry in entries)


def test_parts_that_a_folder_holds_are_written_and_read_by_name(monkeypatch, tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Wide(llama3.GatedMlp):
        names: tuple[str, ...] = ("a", "b")

    config = dataclasses.replace(CASES["wide heads, scaled"], mlp=Wide(names=("c",)))
    entry = dataclasses.replace(_llama(), parts=(*_llama().parts, Wide))
    monkeypatch.setattr(families, "known", lambda: (entry,))
    write_checkpoint(tmp_path / "theirs", CASES["wide heads, scaled"], tensors(config=CASES["wide heads, scaled"]))
    model = dataclasses.replace(model_folder.open_folder(tmp_path / "theirs"), config=config)
    model_folder.convert(model, tmp_path / "ours", to="model")
    fields = json.loads((tmp_path / "ours" / "model.json").read_text())["model"]["fields"]
    assert fields["mlp"]["fields"] == {"names": ["c"]}
    assert "norm" not in fields  # a default part
    assert model_folder.open_folder(tmp_path / "ours").config == config
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"mlp '.*Wide' is not known; .*RopeScaling, .*GatedMlp"):
        model_folder.open_folder(tmp_path / "ours")
    with pytest.raises(UserError, match=r"model\.mlp is Wide, which no Llama of Hugging Face has; theirs is GatedMlp"):
        model_folder.convert(model, tmp_path / "out", to="huggingface")
    assert not (tmp_path / "out").exists()
