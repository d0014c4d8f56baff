"""An engine on `context`: the tokens of one device, from pages that fill evenly."""

import dataclasses
import math

import jax
import pytest
from llama_cases import GQA, tokens, write_checkpoint

from scalejax.inference import generate, loop
from scalejax.inference.requests import Request
from scalejax.inference.sampling import TokenSampling
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import MeshShape, make_mesh

IDS = tokens(GQA, 1, 1200)[0].tolist()
LONG = dataclasses.replace(GQA, max_positions=1024)
PAGE = 16

MESHES = {
    "context=2": MeshShape(fsdp=1, context=2),
    "context=4": MeshShape(fsdp=1, context=4),
    "context=8": MeshShape(fsdp=1, context=8),
    "context=2,tensor=2": MeshShape(fsdp=1, context=2, tensor=2),
    "context=2,fsdp=2": MeshShape(fsdp=2, context=2),
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


@pytest.mark.parametrize(
    ("name", "passed"), [(name, None) for name in MESHES] + [("context=4", "pass_kv"), ("context=4", "pass_q")]
)
def test_tokens_are_those_of_one_device(folder, told, name, passed):
    shape = MESHES[name]
    engine = opened(folder, make_mesh(shape, jax.devices()[: math.prod(dataclasses.astuple(shape))]))
    on = loop.make_loop(engine, slots=8, kv_tokens=256 * PAGE, page=PAGE, choose=chosen(passed))
    assert script(on) == told
