"""Parts of a user's own in a Llama: trained, generated with, kept in a run, and refused where nothing knows them."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import F32, F64, GQA, rows, tokens
from llama_cases import model as plain
from paged_cases import Rows

from scalejax import nn
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.inference import generate
from scalejax.models.llm import families, llama3, model_folder
from scalejax.models.llm.special_tokens import SpecialTokens
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape
from scalejax.train.task import Batch, whole


@dataclasses.dataclass(frozen=True)
class GeluMlp:
    """W_out gelu(W_in x), `ratio` times as wide as the stream."""

    ratio: int = 4

    def build(self, config, rngs, dtypes):
        return GeluMlpLayers(config, self.ratio * config.dim, llama3.StackedNormal(config, rngs, dtypes.params))


class GeluMlpLayers(nnx.Module):
    def __init__(self, config, width, normal):
        self.inner = normal((config.dim, width), ("embed", "hidden"))
        self.outer = normal.to_stream((width, config.dim), ("hidden", "embed"))

    def __call__(self, x):
        return nn.project(jax.nn.gelu(nn.project(x, self.inner[...].astype(x.dtype))), self.outer[...].astype(x.dtype))


@dataclasses.dataclass(frozen=True)
class OwnLayerNorm:
    """LayerNorm, under parameters that no RMSNorm has."""

    def build(self, config, rngs, dtypes, *, layers):
        return OwnLayerNormLayers((config.dim,) if layers is None else (layers, config.dim), dtypes)


class OwnLayerNormLayers(nnx.Module):
    def __init__(self, shape, dtypes):
        axes = ("layers", "norm")[-len(shape) :]
        self.gain = nnx.Param(jnp.ones(shape, dtypes.params), logical_axes=axes)
        self.shift = nnx.Param(jnp.zeros(shape, dtypes.params), logical_axes=axes)
        self.compute_dtype = dtypes.compute

    def __call__(self, x):
        centred = x - x.mean(-1, keepdims=True)
        normal = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return (normal * self.gain[...][None, None] + self.shift[...][None, None]).astype(self.compute_dtype)


OWN = dataclasses.replace(GQA, mlp=GeluMlp(ratio=2), norm=OwnLayerNorm())


def loss_of(config, dtypes):
    """(function of parameters, parameters) on one packed row."""
    task = config.task(TokenSchema(vocabulary=90, length=16))
    segments, positions = rows(5, 7, 4)
    ids = tokens(config, 1, 16)
    weights = np.ones(ids.shape, np.float32)
    batch = {"tokens": ids, "targets": ids, "segment_ids": segments, "positions": positions, "weights": weights}
    graph, state = nnx.split(task.init(nnx.Rngs(0), dtypes))
    loss = functools.partial(task.loss, batch=Batch(batch), keys=None, gather=whole)
    return lambda state: loss(nnx.merge(graph, state)).sum, state


@pytest.mark.slow
def test_a_config_with_parts_of_its_own_trains_and_all_its_parameters_move():
    loss, state = loss_of(OWN, F32)
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    assert {"layers/mlp/inner", "layers/mlp/outer", "layers/mlp_norm/shift", "final_norm/gain"} <= names
    assert not {"layers/mlp/gate", "final_norm/scale"} & names
    value, gradient = jax.jit(jax.value_and_grad(loss))(state)
    for path, g in nnx.to_flat_state(gradient):
        assert np.abs(g[...]).max() > 0, path
    moved = jax.tree.map(lambda p, g: p - 0.01 * g, state, gradient)
    assert jax.jit(loss)(moved) < value


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "full"])
def test_its_stack_equals_its_layers_one_by_one(remat, x64):
    config = dataclasses.replace(OWN, remat=remat)
    model = llama3.Llama(config, nnx.Rngs(0), F64)
    segments, positions = rows(5, 7, 4)
    ids = tokens(config, 1, 16)
    x = model.embed.weight[...][ids]
    for number in range(config.layers):
        graph, state = nnx.split(model.layers)
        block = nnx.merge(graph, jax.tree.map(lambda p, number=number: p[number], state))
        x = block(x, model._cos_sin(jnp.asarray(positions)), segments, positions)
    want = model.final_norm(x) @ model.head.weight[...]
    np.testing.assert_allclose(model(ids, positions, segments), want, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_its_cache_gives_the_logits_of_the_whole_row():
    model = llama3.Llama(OWN, nnx.Rngs(0), F32)
    ids = tokens(OWN, 2, 9)
    along = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    whole = jax.jit(lambda m: m(ids, along, np.ones_like(ids)))(model)
    extend, read = jax.jit(lambda m, *rest: m.extend(*rest)), Rows(2, 12)
    logits, cache = extend(model, ids[:, :6], read.reading([6, 6], 6), model.cache(read.pages))
    np.testing.assert_allclose(logits, whole[:, 5], atol=1e-5)
    logits, _ = extend(model, ids[:, 6:], read.reading([3, 3], 3), cache)
    np.testing.assert_allclose(logits, whole[:, 8], atol=1e-5)


def test_the_default_parts_are_those_of_llama_3():
    assert (GQA.mlp, GQA.norm, GQA.self_attention) == (
        llama3.GatedMlp(),
        llama3.RmsNorm(),
        llama3.GroupedQueryAttention(),
    )
    block = plain(GQA).layers
    assert block.stages == (
        ("attention/query", "attention/key", "attention/value"),
        ("attention/out",),
        ("mlp/gate", "mlp/up"),
        ("mlp/down",),
    )


@pytest.mark.parametrize("part", [None, "gelu", GeluMlp, 4])
def test_what_is_no_part_is_refused(part):
    with pytest.raises(ValueError, match="mlp must be a part"):
        dataclasses.replace(GQA, mlp=part)


def test_folders_refuse_parts_that_they_cannot_name():
    with pytest.raises(UserError, match=r"model\.mlp is GeluMlp, which a model folder cannot name"):
        model_folder.model_json(OWN, SpecialTokens())
    with pytest.raises(UserError, match=r"model\.mlp is GeluMlp, which no Llama of Hugging Face has"):
        families.of(OWN).entries(OWN)


@pytest.mark.slow
def test_it_is_generated_with():
    params = ModelShape.of(nnx.eval_shape(lambda: llama3.Llama(OWN, nnx.Rngs(0), F32))).split(
        llama3.Llama(OWN, nnx.Rngs(0), F32)
    )

    class InMemory:
        def dtype(self, path):
            return np.dtype(params[path].dtype)

        def read(self, path, layer, index=None):
            array = np.asarray(params[path])
            array = array if layer is None else array[layer]
            return array if index is None else array[index]

    model = model_folder.LanguageModel(
        path=pathlib.Path("run"),
        kind="run",
        config=OWN,
        tokens=SpecialTokens(),
        source=InMemory(),
        tokenizer=None,
        files=(),
        shards=(),
    )
    on = generate.load(model, make_mesh(MeshShape(fsdp=2, tensor=2), jax.devices()[:4]))
    prompt = tokens(OWN, 1, 5)[0].tolist()
    (made,) = on.generate([prompt], max_tokens=4)
    whole = np.asarray([prompt + list(made.tokens)], np.int32)
    greedy = np.asarray(on.logits(whole)).argmax(-1)[0, 4:-1]
    assert greedy.tolist() == list(made.tokens)
    assert model_folder.parameter_bytes(model) == 4 * sum(p.size for p in params.values())
