"""Generation: the tokens that a model without a cache would choose, whatever the batch and the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import CASES, F32, GQA, model, tensors, tokens, write_checkpoint

from scalejax import nn
from scalejax.errors import UserError
from scalejax.inference import generate, loop, programs
from scalejax.inference.programs import DecodingState, Slots
from scalejax.inference.sampling import RowSampling, TokenSampling
from scalejax.models.llm import llama3, model_folder
from scalejax.numerics.quantize import cast
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train.state import ModelShape

PROMPTS = [tokens(GQA, 1, 40)[0, start:stop].tolist() for start, stop in ((0, 9), (3, 4), (5, 38), (20, 31))]


def engine(tmp_path, config=GQA, mesh=None, **more):
    folder = tmp_path / "theirs"
    if not folder.exists():
        write_checkpoint(folder, config)
    sizes = mesh or {"fsdp": 1}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return generate.load(model_folder.open_folder(folder), make_mesh(MeshShape(**sizes), devices), **more)


def greedy(config, prompt, count, stop=()):
    """One token at a time, each time the whole sequence anew."""
    llama, ids = model(config), list(prompt)
    forward = jax.jit(lambda m, *inputs: m(*inputs))
    for _ in range(count):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids)] = ids
        out = forward(llama, padded, np.arange(64, dtype=np.int32)[None], np.ones((1, 64), np.int32))
        new = int(np.argmax(out[0, len(ids) - 1]))
        if new in stop:
            break
        ids.append(new)
    return tuple(ids[len(prompt) :])


@pytest.fixture(scope="module")
def want():
    return [greedy(GQA, prompt, 12) for prompt in PROMPTS]


def test_greedy_tokens_are_those_of_full_forward_passes(tmp_path, want):
    got = engine(tmp_path).generate(PROMPTS, max_tokens=12)
    assert [c.tokens for c in got] == want
    assert {c.ended for c in got} == {"length"}


@pytest.mark.slow
def test_long_prompts_are_read_in_pieces(tmp_path, want, monkeypatch):
    monkeypatch.setattr(loop, "PIECE", 8)
    monkeypatch.setattr(loop, "LENGTHS", (4, 8))
    assert [c.tokens for c in engine(tmp_path).generate(PROMPTS, max_tokens=12)] == want


def test_the_company_of_a_prompt_changes_nothing(tmp_path):
    on, chosen = engine(tmp_path), TokenSampling(temperature=1.0, top_p=0.9, seed=5)
    together = on.generate(PROMPTS, max_tokens=10, sampling=chosen)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        assert on.generate([prompt], max_tokens=10, sampling=chosen) == [expected]
    backwards = on.generate(PROMPTS[::-1], max_tokens=10, sampling=chosen)
    assert backwards == together[::-1]
    assert on.generate(PROMPTS, max_tokens=10, sampling=dataclasses.replace(chosen, seed=6)) != together


def under_rules(tmp_path, plain, **formats):
    """An engine for the same model as a run under a rule has it."""
    opened = model_folder.open_folder(tmp_path / "theirs")
    return generate.load(dataclasses.replace(opened, quantization=(QuantizationRule(**formats),)), plain.mesh)


@pytest.mark.slow
def test_what_was_trained_under_rules_is_served_under_them(tmp_path):
    plain, ids = engine(tmp_path), np.asarray([PROMPTS[2]], np.int32)
    axes = {"embed/weight": 1, "layers/mlp/down": 1, "head/weight": 0}
    by_hand = {path: cast(p, "bdr_mx4", axis=axes[path]) if path in axes else p for path, p in plain.params.items()}
    want, without = (np.asarray(plain.programs.forward(params, ids)) for params in (by_hand, plain.params))
    on = under_rules(tmp_path, plain, module_path="embed|layers/mlp/down|head", weight_qtype="bdr_mx4")
    np.testing.assert_allclose(on.logits(ids), want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert np.abs(want - without).max() > 0.01 * np.abs(want).max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gqa", "mqa"])
def test_tokens_under_rules_are_those_of_full_forward_passes(tmp_path, name):
    on = under_rules(tmp_path, engine(tmp_path, CASES[name]), weight_qtype="bdr_mx6", act_qtype="bdr_mx6")
    prompt = PROMPTS[0]
    (made,) = on.generate([prompt], max_tokens=8)
    logits = np.asarray(on.logits(np.asarray([[*prompt, *made.tokens]], np.int32)))[0]
    assert made.tokens == tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist())


@pytest.mark.slow
def test_samples_of_one_prompt_differ_by_their_number(tmp_path):
    on, chosen = engine(tmp_path), TokenSampling(temperature=1.0)
    got = on.generate([PROMPTS[0]] * 3, max_tokens=10, sampling=chosen, samples=[0, 1, 0])
    assert got[0] == got[2] != got[1]


@pytest.mark.slow
def test_draws_go_by_the_place_in_the_text_and_not_in_a_block(tmp_path):
    on, options = engine(tmp_path), {"max_tokens": 12, "sampling": TokenSampling(temperature=1.0, seed=3)}
    one_by_one = on.generate(PROMPTS[:1], **options, loop=loop.make_loop(on, slots=1, kv_tokens=128, block_s=0.0))
    assert one_by_one == on.generate(PROMPTS[:1], **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 2, "tensor": 4},
        {"fsdp": 1, "tensor": 8},
        {"fsdp": 4, "tensor": 2},
    ],
)
def test_tokens_are_the_same_on_a_mesh(tmp_path, want, mesh):
    got = engine(tmp_path, mesh=mesh).generate(PROMPTS, max_tokens=12)
    assert [c.tokens for c in got] == want


@pytest.mark.slow
def test_a_row_ends_at_its_stop_token(tmp_path, want):
    stop = want[0][3]
    got = engine(tmp_path).generate(PROMPTS, max_tokens=12, stop=[stop])
    for prompt, c in zip(PROMPTS, got, strict=True):
        assert c.tokens == greedy(GQA, prompt, 12, stop=[stop])
        assert c.ended == ("stop" if len(c.tokens) < 12 else "length")
    assert got[0].ended == "stop"


@pytest.mark.slow
def test_progress_sees_each_token_and_can_end(tmp_path, want):
    seen = []

    def progress(rows):
        seen.append([list(row) for row in rows])
        return len(rows[0]) < 5

    on = engine(tmp_path)
    one_by_one = loop.make_loop(on, slots=2, kv_tokens=256, block_s=0.0)  # a block of one token, however fast steps are
    got = on.generate(PROMPTS[:2], max_tokens=12, progress=progress, loop=one_by_one)
    assert [len(rows[0]) for rows in seen] == [1, 2, 3, 4, 5]
    assert got[0].tokens == want[0][:5] == tuple(seen[-1][0])


@pytest.mark.slow
def test_prompts_of_other_lengths_need_no_other_program(tmp_path):
    on = engine(tmp_path)
    on.generate([PROMPTS[0]], max_tokens=4, sampling=TokenSampling(temperature=1.0, seed=1))
    compiled = on.programs.compiled()
    for length in (1, 5, 30):
        prompt = tokens(GQA, 1, 40)[0, :length].tolist()
        on.generate([prompt], max_tokens=20, sampling=TokenSampling(temperature=1.0, seed=length))
    assert on.programs.compiled() == compiled == 2


@pytest.mark.slow
def test_a_step_changes_the_cache_in_place():
    """Bytes beside the arguments: what one layer's attention needs, not another cache of 8 layers."""
    config = dataclasses.replace(GQA, layers=8)
    shape = ModelShape.of(nnx.eval_shape(lambda: llama3.Llama(config, nnx.Rngs(0), F32)))
    on = generate.Engine(config, shape, {}, make_mesh(MeshShape(), jax.devices()[:1]))
    cache = on.programs.cache(nn.PageShape(256))
    state = DecodingState(cache, jax.ShapeDtypeStruct((1, 96), jnp.float32))
    row = np.zeros(1, np.int32)
    slots = Slots(RowSampling.greedy(1), row, row, row[None], np.zeros((1, 256), np.int32), row, row)
    found = (
        on.programs.decode.lower(shape.params, state, slots, np.int32(1), np.bool_(False)).compile().memory_analysis()
    )
    size = cache.kv.size * 4
    assert found.alias_size_in_bytes >= size  # the cache that comes out is the one that went in
    assert found.temp_size_in_bytes < 0.3 * size


@pytest.mark.slow
def test_weights_in_the_order_of_their_products_give_the_same_tokens(tmp_path, monkeypatch):
    """As on a TPU."""
    want = engine(tmp_path).generate(PROMPTS, max_tokens=8)
    monkeypatch.setattr(programs, "_ORDERED", ("cpu",))
    on = engine(tmp_path, mesh={"fsdp": 1, "tensor": 2})
    orders = {name: p.format.layout.major_to_minor for name, p in on.params.items()}
    turned = {name for name, order in orders.items() if order != tuple(range(len(order)))}
    assert turned == {f"layers/attention/{name}" for name in ("query", "key", "value")}
    assert orders["layers/attention/query"] == (0, 2, 1, 3)
    assert on.generate(PROMPTS, max_tokens=8) == want
    assert on.held_bytes == sum(p.nbytes // (2 if "tensor" in str(p.sharding.spec) else 1) for p in on.params.values())


@pytest.mark.slow
def test_the_stored_dtype_is_the_default(tmp_path):
    write_checkpoint(tmp_path / "theirs", GQA, dtype="bfloat16")
    on = engine(tmp_path)
    assert {p.dtype for p in on.params.values()} == {jnp.dtype("bfloat16")}
    assert on.shape.merge(on.params).compute_dtype == jnp.bfloat16
    wide = engine(tmp_path, dtype="float32")
    assert {p.dtype for p in wide.params.values()} == {jnp.dtype("float32")}


@pytest.mark.default_cases(first=2)
@pytest.mark.parametrize(
    ("prompts", "more", "words"),
    [
        ([[1], []], {}, "prompt 2 is empty"),
        ([[1, 96]], {}, "prompt 1 has token 96, but the model's vocabulary is 0 to 95"),
        ([[-2, 5]], {}, "prompt 1 has token -2, but"),
        ([[1]], {"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        (
            [[1] * 60],
            {"max_tokens": 5},
            "prompt 1 has 60 tokens, and 5 more make 65: the model is meant for at most 64",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, prompts, more, words):
    on = engine(tmp_path, dataclasses.replace(GQA, max_positions=64))
    with pytest.raises(UserError, match=words):
        on.generate(prompts, **{"max_tokens": 3, **more})


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    on = engine(tmp_path)
    monkeypatch.setattr(generate.meshes, "device_memory_bytes", lambda mesh: 1000)
    with pytest.raises(UserError, match=r"the parameters need .* on each device, and it has 1000 B\. Spread the model"):
        engine(tmp_path)
    with pytest.raises(UserError, match="and a cache of 64 tokens need"):
        on.generate([[1]], max_tokens=3)


@pytest.mark.slow
def test_logits_that_are_not_finite_are_never_chosen_from(tmp_path):
    weights = tensors(GQA)
    weights["model.layers.1.mlp.down_proj.weight"] *= 1e4
    write_checkpoint(tmp_path / "theirs", GQA, weights)
    engine(tmp_path).generate(PROMPTS, max_tokens=3)
    half = engine(tmp_path, dtype="float16")
    with pytest.raises(UserError, match=r"prompt 1: the model's logits are not finite.* choose --dtype bfloat16 or fl"):
        half.generate(PROMPTS, max_tokens=3)


def test_weights_that_a_narrower_dtype_cannot_hold_are_refused(tmp_path):
    weights = tensors(GQA)
    weights["lm_head.weight"][3, 4] = 1e6
    write_checkpoint(tmp_path / "theirs", GQA, weights)
    with pytest.raises(UserError, match="head/weight as float16 holds 1 values that are NaN or infinite"):
        engine(tmp_path, dtype="float16")


def test_meshes_that_cut_layers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"not over stage=2. Give these devices to tensor: --mesh tensor=2"):
        engine(tmp_path, mesh={"fsdp": 1, "stage": 2})


def test_no_prompts_give_no_continuations(tmp_path):
    assert engine(tmp_path).generate([], max_tokens=3) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mqa", "wide heads, scaled"])
def test_other_shapes_generate_as_well(tmp_path, case):
    config = CASES[case]
    got = engine(tmp_path, config).generate(PROMPTS[:2], max_tokens=6)
    assert [c.tokens for c in got] == [greedy(config, prompt, 6) for prompt in PROMPTS[:2]]


@pytest.mark.slow
def test_ids_that_the_tokenizer_lacks_are_never_chosen(tmp_path):
    whole = engine(tmp_path)
    limit = 5
    fewer = dataclasses.replace(whole, choices=limit)
    for sampling in (TokenSampling(), TokenSampling(temperature=5.0, seed=1)):
        free = [token for row in whole.generate([[1, 2]], max_tokens=24, sampling=sampling) for token in row.tokens]
        assert max(free) >= limit, "nothing to be kept from"
        kept = [token for row in fewer.generate([[1, 2]], max_tokens=24, sampling=sampling) for token in row.tokens]
        assert max(kept) < limit
