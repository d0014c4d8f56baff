"""A window: its definition, logits of transformers' Mistral, documents, the cache, and folders of Mistral."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import F64, GQA, MISTRAL, model, rows, scenarios, tokens, write_checkpoint
from paged_cases import Rows

from scalejax import nn
from scalejax.errors import UserError
from scalejax.inference import generate
from scalejax.kernels.flash_attention import flash_attention
from scalejax.models.llm import families, model_folder
from scalejax.models.llm.special_tokens import SpecialTokens
from scalejax.parallel.mesh import MeshShape, make_mesh

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "mistral.npz")


def run(llama, ids, positions, segments):
    return jax.jit(lambda m, *inputs: m(*inputs))(llama, ids, positions, segments)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3, 11, 40])
def test_a_query_sees_itself_and_those_just_before_it(x64, window):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 11, heads, 4)) for heads in (6, 2, 2))
    segments = np.array([[1] * 11, [1] * 4 + [2] * 7], np.int32)
    got = jax.jit(lambda *given: nn.attend(*given, segment_ids=jnp.asarray(segments), window=window))(q, k, v)
    want = np.zeros((2, 11, 6, 4))
    for b, i, head in np.ndindex(2, 11, 6):
        seen = [j for j in range(max(0, i - window + 1), i + 1) if segments[b, j] == segments[b, i]]
        scores = np.array([q[b, i, head] @ k[b, j, head // 3] / 2 for j in seen])
        weights = np.exp(scores - scores.max())
        want[b, i, head] = weights / weights.sum() @ np.array([v[b, j, head // 3] for j in seen])
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    options = {"segment_ids": jnp.asarray(segments), "window": window, "implementation": "reference"}
    reference = jax.jit(lambda *given: flash_attention(*given, **options)[0])(q, k, v)
    np.testing.assert_allclose(got, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "beyond 8192"])
def test_logits_are_those_of_transformers(name, strict_promotion):
    ids, segments, positions = scenarios(MISTRAL)[name]
    np.testing.assert_allclose(run(model(MISTRAL), ids, positions, segments), GOLDEN[name], atol=1e-4, rtol=0)
    assert np.abs(run(model(GQA), ids, positions, segments) - GOLDEN[name]).max() > 0.1


@pytest.mark.slow
def test_a_packed_row_equals_its_documents_one_by_one(x64):
    lengths = (7, 4, 9)
    segments, positions = rows(*lengths)
    ids = tokens(MISTRAL, 1, sum(lengths))
    llama = model(MISTRAL, dtypes=F64)
    got = run(llama, ids, positions, segments)
    starts = np.cumsum(lengths) - lengths
    for own in (slice(at, at + n) for at, n in zip(starts, lengths, strict=True)):
        want = run(llama, ids[:, own], positions[:, own], np.ones_like(ids[:, own]))
        np.testing.assert_allclose(got[:, own], want, atol=1e-6)  # rotary angles are float32


@pytest.mark.slow
def test_the_cache_gives_what_the_full_pass_gives():
    ids, length = tokens(MISTRAL, 2, 14), 14
    llama = model(MISTRAL)
    whole = run(llama, ids, np.broadcast_to(np.arange(length), ids.shape), np.ones_like(ids))
    extend = jax.jit(lambda m, *rest: m.extend(*rest))
    read = Rows(2, 24)
    cache, at = llama.cache(read.pages), np.zeros(2, np.int32)
    # Pieces longer than the window and shorter, rows of unequal progress, then one by one.
    for size, counts in ((6, (6, 2)), (3, (3, 3)), (1, (1, 1)), (1, (1, 1)), (1, (1, 0)), (1, (0, 1))):
        piece = ids[np.arange(2)[:, None], np.minimum(at[:, None] + np.arange(size), length - 1)]
        logits, cache = extend(llama, piece, read.reading(counts, size), cache)
        at += counts
        for row in np.flatnonzero(counts):
            np.testing.assert_allclose(logits[row], whole[row, at[row] - 1], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=2, tensor=2)], ids=["one", "four"])
def test_an_engine_generates_what_full_passes_choose(tmp_path, shape):
    write_checkpoint(tmp_path / "theirs", MISTRAL)
    prompt = tokens(MISTRAL, 1, 9)[0].tolist()
    llama, wanted, length = model(MISTRAL), list(prompt), 15
    for _ in range(6):
        ids = np.array([wanted + [0] * (length - len(wanted))], np.int32)
        logits = run(llama, ids, np.arange(length)[None], np.ones_like(ids))
        wanted.append(int(logits[0, len(wanted) - 1].argmax()))
    devices = jax.devices()[: shape.fsdp * shape.tensor]
    engine = generate.load(model_folder.open_folder(tmp_path / "theirs"), make_mesh(shape, devices))
    assert list(engine.generate([prompt], max_tokens=6)[0].tokens) == wanted[9:]


@pytest.mark.slow
def test_gradients_do_not_go_beyond_the_window(x64):
    ids, segments, positions = scenarios(MISTRAL)["plain"]
    graph, state = nnx.split(model(dataclasses.replace(MISTRAL, layers=1), dtypes=F64))

    @jax.jit
    @jax.grad
    def last(table):
        state["embed"]["weight"] = state["embed"]["weight"].replace(table)
        return nnx.merge(graph, state)(ids, positions, segments)[0, 9].sum()

    table = state["embed"]["weight"][...]
    own = np.flatnonzero(np.abs(last(table)).max(-1))
    assert set(own) == set(ids[0, 6:10].tolist())


# Folders.


def test_there_and_back_gives_the_same_files(tmp_path):
    weights = write_checkpoint(tmp_path / "theirs", MISTRAL)
    opened = model_folder.open_folder(tmp_path / "theirs")
    assert (opened.config, opened.remarks) == (MISTRAL, ())
    assert opened.architecture.describe(opened.config)["window"] == "a token sees 4, itself and those before it"
    model_folder.convert(opened, tmp_path / "ours", to="model")
    ours = model_folder.open_folder(tmp_path / "ours")
    assert ours.config == MISTRAL
    model_folder.convert(ours, tmp_path / "again", to="huggingface")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "again"))
    assert before == after
    assert (before["architectures"], before["model_type"]) == (["MistralForCausalLM"], "mistral")
    assert before["sliding_window"] == 4
    assert not before.keys() & {"attention_bias", "mlp_bias", "pretraining_tp"}
    found = model_folder.open_folder(tmp_path / "again").source
    np.testing.assert_array_equal(
        found.read("layers/attention/query", 1).reshape(32, 32),
        weights["model.layers.1.self_attn.q_proj.weight"].T,
    )


@pytest.mark.parametrize(
    ("stated", "window"), [({"sliding_window": None}, None), ({"sliding_window": 16_384}, None), ({}, 4096)]
)
def test_windows_that_are_null_or_hide_nothing_or_are_not_named(stated, window):
    content = families.of(MISTRAL).write_config(MISTRAL, SpecialTokens(), "float32")
    content = {key: value for key, value in content.items() if key != "sliding_window"} | stated
    family = families.of_folder(content, "config.json")
    config, _, unknown = family.read_config(content, "config.json")
    assert (family.name, config, unknown) == ("MistralForCausalLM", dataclasses.replace(GQA, window=window), ())
    # Without a window it is a Llama, and written as one.
    assert families.of(config).name == ("LlamaForCausalLM" if window is None else "MistralForCausalLM")


@pytest.mark.parametrize("stated", [0, -1, 2.5, "4", True])
def test_windows_that_cannot_be_are_refused(stated):
    content = families.of(MISTRAL).write_config(MISTRAL, SpecialTokens(), "float32")
    with pytest.raises(UserError, match=r"config\.json: sliding_window must be "):
        families.of_folder(content, "x").read_config(content | {"sliding_window": stated}, "config.json")
