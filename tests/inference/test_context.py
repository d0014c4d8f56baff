"""An engine on `context`: the tokens of one device, from pages that fill evenly."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llama_cases import GQA, tokens, write_checkpoint

from scalejax import nn
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.inference import generate, loop, programs
from scalejax.inference.pages import Places
from scalejax.inference.requests import Request
from scalejax.inference.sampling import RowSampling, TokenSampling
from scalejax.models.llm import model_folder
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import Experts, TopK
from scalejax.models.llm.llama3.parts import OutputRmsNorm
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.rules import LLM
from scalejax.train.state import ModelShape

IDS = tokens(GQA, 1, 1200)[0].tolist()
LONG = dataclasses.replace(GQA, max_positions=1024)
PAGE = 16
TEXT = TokenSchema(vocabulary=GQA.vocabulary, length=1024)

MESHES = {
    "context=2": MeshShape(fsdp=1, context=2),
    "context=4": MeshShape(fsdp=1, context=4),
    "context=2,tensor=2": MeshShape(fsdp=1, context=2, tensor=2),
}


def opened(folder, mesh):
    return generate.load(model_folder.open_folder(folder), mesh)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "theirs"
    write_checkpoint(folder, LONG)
    return folder


@pytest.fixture(scope="module")
def single(folder):
    return opened(folder, make_mesh(MeshShape(fsdp=1), jax.devices()[:1]))


def finished(on):
    found = {}
    while on.busy:
        for chunk in on.step():
            found[chunk.request, chunk.sample] = found.get((chunk.request, chunk.sample), ()) + chunk.tokens
    return found


def script(on):
    """Requests of several lengths at once, samples that share a prompt, then turns that go on."""
    prompts = [IDS[a:b] for a, b in ((0, 3), (5, 150), (50, 650), (700, 717), (720, 721))]
    for prompt, length in zip(prompts, (40, 5, 12, 33, 70), strict=True):
        on.submit(Request(prompt=tuple(prompt), max_tokens=length))
    warm = TokenSampling(temperature=1.0, seed=3)
    on.submit(Request(prompt=tuple(IDS[800:870]), max_tokens=9, samples=3, sampling=warm))
    told = finished(on)
    turn = tuple(prompts[2]) + told[2, 0] + tuple(IDS[900:905])
    on.submit(Request(prompt=turn, max_tokens=20))
    told |= finished(on)
    assert on.stats.prefix_hits > 600
    assert on.stats.kv_usage == 0
    return told


@pytest.fixture(scope="module")
def told(single):
    return script(loop.make_loop(single, slots=8, kv_tokens=256 * PAGE, page=PAGE))


def chosen(passed):
    return None if passed is None else lambda new, cached: passed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "passed"),
    [("context=4", "pass_kv"), ("context=4", "pass_q"), ("context=2,tensor=2", None)],
)
def test_tokens_are_those_of_one_device(folder, told, name, passed):
    on = loop.make_loop(opened(folder, on_mesh(name)), slots=8, kv_tokens=256 * PAGE, page=PAGE, choose=chosen(passed))
    assert script(on) == told


def test_decoded_tokens_are_read_again_on_whichever_device_they_lie(folder, single):
    """Tokens are decoded beyond a page of one device, and beyond a unit of pages of both."""
    told = []
    for engine in (single, opened(folder, on_mesh("context=2"))):
        on = loop.make_loop(engine, slots=2, kv_tokens=128, page=PAGE)
        on.submit(Request(prompt=tuple(IDS[:27]), max_tokens=12))
        told.append(finished(on))
    assert told[0] == told[1]


def on_mesh(name):
    shape = MESHES[name]
    return make_mesh(shape, jax.devices()[: math.prod(dataclasses.astuple(shape))])


def made(config, mesh, schema=TEXT):
    """An engine of a model whose weights are larger than they begin, so that layers and routers differ."""
    config = config.bound(schema)
    module = config.task(schema).init(nnx.Rngs(0), nn.Dtypes(jnp.float32, jnp.float32))
    shape = ModelShape.of(module)
    params = {name: 4 * p for name, p in shape.split(module).items()}
    return generate.Engine(config, shape, jax.device_put(params, shape.shardings(mesh, LLM)), mesh)


AUXILIARY = MixtureOfDepths(capacity=0.5, auxiliary=AuxiliaryRouter())
MODELS = {
    "window": dataclasses.replace(LONG, window=37),
    "depth": dataclasses.replace(LONG, layers=4, depth=AUXILIARY, norm=OutputRmsNorm()),
    "experts": dataclasses.replace(LONG, mlp=Experts(count=4, router=TopK(k=2))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kept", "passed"),
    [
        ("depth", "int8", "pass_q"),
        ("window", "float8", "pass_kv"),
        ("experts", "compute", "pass_kv"),
    ],
)
def test_logits_of_windows_depths_experts_and_stored_formats_are_those_of_one_device(model, kept, passed):
    found = []
    for mesh in (make_mesh(MeshShape(fsdp=1), jax.devices()[:1]), on_mesh("context=4")):
        engine = made(MODELS[model], mesh)
        on = loop.make_loop(engine, slots=4, kv_tokens=32 * PAGE, page=PAGE, kv_dtype=kept, choose=chosen(passed))
        logits = []
        # A second request takes units that the first had.
        for prompt in (IDS[:300], IDS[310:600], IDS[310:600] + IDS[:40]):
            number = on.submit(Request(prompt=tuple(prompt), max_tokens=24))
            tokens = finished(on)[number, 0]
            logits.append(np.asarray(on.steps.state.logits).max(0))
            logits.append(tokens)
        found.append(logits)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_fills_are_within_one_and_full_units_are_exact(ranks):
    rng = np.random.default_rng(ranks)
    places = Places(PAGE, ranks)
    unit = PAGE * ranks
    for _ in range(20):
        rotation, count = int(rng.integers(ranks)), 0
        taken = []
        while count < 5 * unit:
            more = int(rng.choice([1, 1, 2, 7, 40, 170]))
            new = places.next(count, more, rotation)
            if more == 1:  # what the decoding program computes
                offset = count % unit
                assert new[0] == (offset + rotation) % ranks * PAGE + offset // ranks
            taken += new.tolist()
            count += more
            columns = places.columns(new, places.width(new))
            assert len(set(columns.tolist())) == more
            assert (columns // (places.width(new) // ranks) == new // PAGE).all()
            last = np.asarray(taken[count // unit * unit :], int)
            fills = np.bincount(last // PAGE, minlength=ranks)
            assert fills.max() - fills.min() <= 1
            assert (fills == places.fills(count % unit, rotation)).all()
        for number in range(5):
            assert sorted(taken[number * unit : (number + 1) * unit]) == [*range(unit)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_causal_work_is_even_from_a_thousand_new_tokens_on_and_that_of_neighbours_is_not(ranks):
    rng = np.random.default_rng(0)
    places, most = Places(64, ranks), 0.0
    for _ in range(50):
        # With fewer tokens a device than 250, the one or two by which devices differ weigh more than that.
        cached, new = int(rng.integers(0, 3000)), int(rng.integers(max(1000, 250 * ranks), 6000))
        devices = places.next(cached, new, int(rng.integers(ranks))) // 64
        seen = np.arange(cached + 1, cached + new + 1)
        work = np.bincount(devices, weights=seen, minlength=ranks)
        most = max(most, work.max() / work.min())
    assert most <= 1.01
    neighbours = np.arange(1, 64 * ranks * 100 + 1).reshape(ranks, -1).sum(1)
    assert neighbours.max() / neighbours.min() == pytest.approx(2 * ranks - 1, rel=1e-3)


def test_rows_that_do_not_divide_are_a_mistake_of_the_caller(folder):
    engine = opened(folder, on_mesh("context=4"))
    pages = nn.PageShape(16, PAGE)
    state = engine.programs.empty(3, pages)
    row = np.zeros(3, np.int32)
    slots = programs.Slots(RowSampling.greedy(3), row, row - 1, np.full((3, 8), -1, np.int32), row[:, None], row, row)
    with pytest.raises(ValueError, match="context=4 cuts rows of one token each, or the tokens of a row; got 3 rows"):
        engine.programs.decode(engine.params, state, slots, np.int32(1), np.bool_(False))


@pytest.mark.slow
def test_scores_of_prompts_where_rows_cannot_be_cut_are_refused_at_once():
    on = loop.make_loop(made(MODELS["depth"], on_mesh("context=2")), slots=2, kv_tokens=32 * PAGE, page=PAGE)
    with pytest.raises(UserError, match="does not run on a mesh with context=2"):
        on.submit(Request(prompt=tuple(IDS[:30]), max_tokens=3, prompt_logprobs=1))
    on.submit(Request(prompt=tuple(IDS[:30]), max_tokens=3))
    assert len(finished(on)[0, 0]) == 3


@pytest.mark.slow
def test_scores_of_prompts_are_those_of_one_device(folder, single):
    found = []
    for engine in (single, opened(folder, on_mesh("context=4"))):
        on = loop.make_loop(engine, slots=4, kv_tokens=64 * PAGE, page=PAGE)
        on.submit(Request(prompt=tuple(IDS[:77]), max_tokens=0, prompt_logprobs=0))
        found.append([one.logprob for one in on.step()[0].prompt_logprobs[1:]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_compiled(folder):
    on = loop.make_loop(opened(folder, on_mesh("context=2")), slots=2, kv_tokens=128, page=32)
    on.warm_up()
    for length in (1, 31, 70):
        warm = TokenSampling(temperature=1.0, seed=1)
        on.submit(Request(prompt=tuple(IDS[:length]), max_tokens=20, samples=2, sampling=warm, logprobs=3))
        on.submit(Request(prompt=tuple(IDS[length : 2 * length]), max_tokens=3))
    finished(on)
    assert on.stats.compilations == 0
