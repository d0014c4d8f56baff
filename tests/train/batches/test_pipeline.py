"""What runs a step ahead changes no bit, and depends on nothing of the step that it runs beside."""

import dataclasses
import re

import jax
import numpy as np
import pytest
import segmentation_cases
import small_run
from changes import changed

from scalejax.models.vision.segmentation import SegmentationTask
from scalejax.models.vision.unet import UNetConfig
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.experiment import Checkpoints
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding
from scalejax.train.step import Program


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def experiment(rows, **changes):
    plan = ShardingPlan(
        tables=(TablePlan(table="shop", kind="table_wise"), TablePlan(table="hour", kind="data_parallel"))
    )
    return small_run.experiment(rows, tables__sharding=plan, **changes)


def records(folder):
    return [line for line in read_lines(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def plain(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    loop.train(experiment(rows, tables__pipeline="none", log_every=1), workdir=folder)
    return folder


@pytest.fixture(scope="module")
def stale(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stale")
    loop.train(experiment(rows, **STALE), workdir=folder)
    return folder


STALE = {"tables__pipeline": "stale", "log_every": 1, "checkpoints": Checkpoints(every=3)}


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_the_exchange_of_ids_a_step_ahead_changes_no_bit(rows, tmp_path):
    for pipeline in ("none", "ids"):
        loop.train(experiment(rows, tables__pipeline=pipeline, log_every=1, steps=4), workdir=tmp_path / pipeline)
    assert records(tmp_path / "none") == records(tmp_path / "ids")


@pytest.mark.slow
def test_rows_fetched_a_step_ahead_are_one_update_old(plain, stale):
    one, two = (records(folder) for folder in (plain, stale))
    assert one[0] == two[0]  # the first step has nothing to be late for
    one, two = (np.array([line["logloss"] for line in found if "learning_rate" in line]) for found in (one, two))
    assert (one[2:] != two[2:]).all()
    # One update late is not another way: over the run the loss is about the same.
    assert two.mean() == pytest.approx(one.mean(), rel=0.05)


@pytest.mark.slow
def test_a_stale_run_that_goes_on_from_a_checkpoint_equals_one_that_never_stopped(rows, stale, tmp_path):
    whole = experiment(rows, **STALE)
    assert whole.steps > 6
    loop.train(dataclasses.replace(whole, steps=6), workdir=tmp_path)
    loop.train(whole, workdir=tmp_path)

    def windows(folder):
        return {line["step"]: line for line in records(folder) if "learning_rate" in line}

    one, two = windows(stale), windows(tmp_path)
    assert one == two
    assert len(one) == whole.steps


@pytest.mark.slow
@pytest.mark.parametrize("ahead", ["none", "stale"])
def test_what_is_planned_is_what_a_run_calls(rows, ahead, tmp_path, monkeypatch):
    whole = experiment(rows, tables__pipeline=ahead, placement__mesh=MeshShape(fsdp=-1))
    called = {}

    def recorded(name):
        def get(program):
            def step(*arguments):
                called[name] = jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), arguments)
                raise KeyboardInterrupt

            return step

        return property(get)

    for name in ("train_step", "pipelined_step"):
        monkeypatch.setattr(Program, name, recorded(name))
    with pytest.raises(KeyboardInterrupt):
        loop.train(whole, workdir=tmp_path)
    monkeypatch.undo()
    program = binding.bind(whole, whole.data.schema(), make_mesh(whole.placement.mesh), abstract=True)
    step, arguments = program.repeated_step()
    ((name, real),) = called.items()
    assert step is getattr(program, name)

    def same(abstract, real):
        shape, dtype, sharding = real
        assert (abstract.shape, abstract.dtype) == (shape, dtype)
        assert abstract.sharding.is_equivalent_to(sharding, len(shape))

    jax.tree.map(same, arguments, real)


def instructions(text):
    """name -> (opcode, operands) of the entry computation of compiled HLO."""
    entry = text[text.index("\nENTRY ") :]
    found = {}
    for line in entry.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\((.*)", line)
        if match:
            found[match[1]] = (match[2], re.findall(r"%([\w.\-]+)", match[3]))
    return found


@pytest.mark.slow
def test_the_compiled_exchange_of_the_next_ids_waits_for_nothing_of_the_step(rows):
    whole = experiment(rows, tables__pipeline="ids", placement__mesh=MeshShape(fsdp=-1))
    whole = changed(whole, tables__sharding=ShardingPlan())
    data = whole.data.build()
    program = binding.bind(whole, data.schema, make_mesh(whole.placement.mesh))
    state, batch = program.abstract_state(), program.abstract_batch()
    ahead = jax.eval_shape(program.look_ahead, state, batch)
    compiled = program.pipelined_step.lower(state, batch, ahead, batch).compile()
    graph = instructions(compiled.as_text())
    exchanges = [name for name, (opcode, _) in graph.items() if opcode.startswith("all-to-all")]
    assert len(exchanges) >= 3

    def reached(name):
        seen, todo = set(), [name]
        while todo:
            here = todo.pop()
            if here not in seen and here in graph:
                seen.add(here)
                todo += graph[here][1]
        return seen

    # The ids of the next batch travel as integers: no other exchange and no matrix product lies before them, and
    # nothing of this step waits for them.
    matmuls = {name for name, (opcode, _) in graph.items() if opcode in ("dot", "while", "custom-call")}
    ids = [name for name in exchanges if compiled.as_text().split(f"%{name} = ", 1)[1].lstrip("(").startswith("s32")]
    assert ids
    for name in ids:
        assert not reached(name) & (matmuls | set(exchanges) - {name})
        assert not any(name in reached(other) for other in exchanges if other != name)


@pytest.mark.slow
def test_other_pipelines_are_refused(rows):
    with pytest.raises(ValueError, match="pipeline must be one of none, ids, stale; got 'fast'"):
        experiment(rows, tables__pipeline="fast")


@pytest.mark.slow
def test_the_work_of_batches_of_one_shape_is_counted_once(tmp_path, monkeypatch):
    """It traces the whole model, which took longer than the steps of a small U-Net."""
    calls, work = [], SegmentationTask.work
    monkeypatch.setattr(SegmentationTask, "work", lambda *args: calls.append(args) or work(*args))
    loop.train(segmentation_cases.experiment(UNetConfig(widths=(4, 8)), steps=6), workdir=tmp_path)
    assert len(calls) == 1
