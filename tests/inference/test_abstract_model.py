"""What is planned of a served model is what an engine has on its devices."""

import dataclasses

import jax
import pytest
from llama_cases import GQA, write_checkpoint

from scalejax import nn
from scalejax.inference import abstract_model, generate
from scalejax.models.llm import model_folder
from scalejax.parallel.mesh import make_mesh, parse_mesh
from scalejax.plan import serving
from scalejax.plan.serving import PlannedModel


@pytest.mark.default_cases("context=2,tensor=2-int8")
@pytest.mark.parametrize("kv_dtype", ["compute", "int8"])
@pytest.mark.parametrize("mesh", ["tensor=2", "context=2", "context=2,tensor=2", "tensor=4"])
def test_parameters_and_pages_are_as_large_as_those_of_an_engine(tmp_path, mesh, kv_dtype):
    config = dataclasses.replace(GQA, heads=8, kv_heads=2, head_dim=8)  # two heads do not divide over tensor=4
    folder = tmp_path / "model"
    write_checkpoint(folder, config)
    shape = parse_mesh(mesh)
    devices = shape.context * shape.tensor
    engine = generate.load(model_folder.open_folder(folder), make_mesh(shape, jax.devices()[:devices]))
    machine = serving.parse_machine(f"h100:1x{devices}")
    laid_out = serving.serving_mesh(machine, mesh, config.kv_heads)
    arrays = abstract_model.arrays_of(config, laid_out, dtype="float32", page=16, kv_dtype=kv_dtype)
    length = 5 * 16 * shape.context
    found = serving.plan_serving(
        PlannedModel(config, *arrays, 16), machine, laid_out, slots=3, context=length - 1, piece=64
    )
    assert found.memory["parameters"] == engine.held_bytes
    pages = nn.PageShape(3 * 5 * shape.context, 16, kv_dtype)
    cache = engine.programs.cache(pages)
    held = jax.tree.map(engine.device_bytes, cache, engine.programs.cache_shardings(cache))
    assert found.memory["keys and values"] == sum(jax.tree.leaves(held))
