"""The step of a run that exchanges ids ahead, scheduled by the compiler for TPUs: what runs beside its exchanges."""

import dataclasses

import pytest
from embedding_cases import six_widths

from scalejax.configs.recsys import dlrm, wukong
from scalejax.plan import topology
from scalejax.plan.compiled import hlo
from scalejax.train.runs import binding

pytestmark = pytest.mark.aot


def scheduled(name, recipe=None, **changes):
    """The entry computation of what a run calls in every step, and the module it is in."""
    recipe = recipe or dlrm.smoke()
    whole = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, batch_size=16_384),
        tables=dataclasses.replace(recipe.tables, pipeline="ids"),
        **changes,
    )
    mesh, _ = topology.make_mesh(topology.parse(name), None)
    step, arguments = binding.bind(whole, whole.data.schema(), mesh, abstract=True).repeated_step()
    text = step.trace(*arguments).lower().compile().as_text()
    assert "is_scheduled=true" in text.splitlines()[0]
    module = hlo.parse(text)
    return module, module.computations[module.entry].instructions


def multiplies(module, instruction):
    inner = [i for name in instruction.called("calls") for i in module.computations[name].instructions]
    return any(i.opcode in ("dot", "convolution") for i in inner)


@pytest.mark.parametrize("name", ["v5p:2x2x1", "v6e:2x2"])
def test_exchanges_of_a_recipe_run_beside_other_work(name):
    module, order = scheduled(name)
    assert not [i.name for i in order if i.opcode == "all-to-all"]
    beside = {}
    for first, start in enumerate(order):
        if start.opcode == "all-to-all-start":
            last = next(n for n, i in enumerate(order) if i.opcode == "all-to-all-done" and start.name in i.operands)
            fusions = [i for i in order[first + 1 : last] if i.opcode == "fusion"]
            beside[order[last].arrays[0].dtype] = [multiplies(module, fusion) for fusion in fusions]
    # Rows of this step, gradients of rows, ids of the next step.
    assert set(beside) == {"bf16", "f32", "s32"}
    assert all(beside.values())
    assert sum(beside["bf16"]) >= 2  # the layers that need no rows


@pytest.mark.slow
def test_exchanges_that_tables_of_six_widths_share_run_beside_other_work():
    _, order = scheduled("v5p:2x2x1", six_widths(wukong.smoke()))
    assert not [i.name for i in order if i.opcode == "all-to-all"]
    beside = {}
    for first, start in enumerate(order):
        if start.opcode == "all-to-all-start":
            last = next(n for n, i in enumerate(order) if i.opcode == "all-to-all-done" and start.name in i.operands)
            assert order[last].arrays[0].dtype not in beside
            beside[order[last].arrays[0].dtype] = [i for i in order[first + 1 : last] if i.opcode == "fusion"]
    assert set(beside) == {"bf16", "f32", "s32"}
    assert all(beside.values())


def test_without_the_option_nothing_runs_beside_them():
    _, order = scheduled("v5p:2x2x1", xla_flags=())
    assert [i.arrays[0].dtype for i in order if i.opcode == "all-to-all"] == ["bf16", "f32", "s32"]
    assert not [i.name for i in order if i.opcode == "all-to-all-start"]
