"""Training with sequences cut over `context`: the losses and parameters of one device."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import small_language_run as small

from scalejax.parallel import context
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan.compiled import collectives, hlo
from scalejax.train.batches import convert
from scalejax.train.experiment import Precision
from scalejax.train.metrics import sums
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small.write(tmp_path_factory.mktemp("texts") / "documents")


def bind(texts, shape, *, length=32, **changes):
    model = changes.pop("model", small.MODEL)
    experiment = small.experiment(texts, model=model, precision=Precision(params="float64"), **changes)
    experiment = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, length=length))
    data = experiment.data.build()
    devices = jax.devices()[: math.prod(dataclasses.astuple(shape))]
    return Run(binding.bind(experiment, data.schema, make_mesh(shape, devices)), data)


def three_steps(run):
    state, losses = run.program.init(), []
    batches = run.data.train_batches(start_example=0)
    for _ in range(3):
        state, loss = run.program.train_step(state, convert.to_device(next(batches), run.program))
        losses.append(float(loss))
    scored = run.program.eval_step(state, convert.to_device(next(batches), run.program))
    (metric,) = run.program.metrics.values()
    evaluated = metric.compute(sums.to_host(scored.metrics)["0"])["loss"]
    return losses, evaluated, jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def one_device(texts):
    """By length of a row, what one device does."""
    with jax.enable_x64(True):
        return {n: three_steps(bind(texts, MeshShape(fsdp=1), length=n)) for n in (32, 30)}


ALL, FOUR = MeshShape(fsdp=2, context=2, tensor=2), MeshShape(fsdp=1, context=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "form", "method", "length", "microbatch"),
    [
        (ALL, "explicit", "ring", 32, 2),
        # Rows are filled up to 32.
        (FOUR, "explicit", "all_gather", 30, None),
        (ALL, "implicit", "all_gather", 32, None),
        (FOUR, "implicit", "ring", 30, None),
    ],
)
def test_cut_sequences_change_nothing_but_the_order_of_sums(
    texts, x64, one_device, shape, form, method, length, microbatch
):
    model = dataclasses.replace(small.MODEL, context_method=method)
    run = bind(texts, shape, length=length, model=model, strategy=Fsdp(form=form), gradients__microbatch=microbatch)
    losses, evaluated, params = three_steps(run)
    want_losses, want_evaluated, want_params = one_device[length]
    np.testing.assert_allclose(losses, want_losses, rtol=1e-12)
    np.testing.assert_allclose(evaluated, want_evaluated, rtol=1e-12)
    for name, value in params.items():
        np.testing.assert_allclose(value, want_params[name], rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
def test_a_window_is_that_of_one_device(texts, x64, one_device):
    method = "ring"
    model = dataclasses.replace(small.MODEL, window=5, context_method=method)
    want_losses, want_evaluated, want_params = three_steps(bind(texts, MeshShape(fsdp=1), model=model))
    losses, evaluated, params = three_steps(bind(texts, MeshShape(fsdp=1, context=2), model=model))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-12)
    np.testing.assert_allclose(evaluated, want_evaluated, rtol=1e-12)
    for name, value in params.items():
        np.testing.assert_allclose(value, want_params[name], rtol=1e-9, atol=1e-12, err_msg=name)
    assert abs(losses[0] / one_device[32][0][0] - 1) > 1e-6  # of the same parameters, all keys seen


def test_a_batch_is_laid_out_for_balance_and_abstract_batches_say_so(texts, x64):
    run = bind(texts, FOUR, length=30)
    host = next(run.data.train_batches(start_example=0))
    placed = convert.to_device(host, run.program).fields
    for name, field in host.arrays().items():
        assert placed[name].sharding.spec == jax.sharding.PartitionSpec(("replica", "fsdp", "expert"), "context")
        np.testing.assert_array_equal(context.unzigzag(np.asarray(placed[name]), 4, 30), field, err_msg=name)
        abstract = run.program.abstract_batch().fields[name]
        assert (abstract.shape, abstract.dtype, abstract.sharding) == (
            placed[name].shape, placed[name].dtype, placed[name].sharding,
        )  # fmt: skip
    assert float(placed["weights"].sum()) == host.weights.sum()


def test_modalities_go_with_their_tokens_and_what_fills_rows_up_is_of_none(texts, x64):
    run = bind(texts, FOUR, length=30)
    schema = dataclasses.replace(run.data.schema, modalities=("text", "image"))
    program = binding.bind(run.experiment, schema, run.mesh)
    host = next(run.data.train_batches(start_example=0))
    host = dataclasses.replace(host, modality=np.where(host.segment_ids, host.tokens % 2, -1).astype(np.int8))
    placed = np.asarray(convert.to_device(host, program).fields["modality"])
    assert (placed.dtype, placed.shape) == (np.int8, (8, 32))
    np.testing.assert_array_equal(context.unzigzag(placed, 4, 30), host.modality)
    np.testing.assert_array_equal(context.unzigzag(placed, 4, 32)[:, 30:], -1)
    abstract = program.abstract_batch().fields["modality"]
    assert (abstract.shape, abstract.dtype) == (placed.shape, placed.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_no_hidden_state_is_put_together_along_the_sequence(texts, x64, method):
    model = dataclasses.replace(small.MODEL, context_method=method)
    run = bind(texts, FOUR, model=model)
    compiled = run.program.train_step.lower(run.program.abstract_state(), run.program.abstract_batch()).compile()
    found = collectives.of_module(hlo.parse(compiled.as_text()), run.mesh)
    gathered = sum(c.bytes for c in found if c.kind in ("all-gather", "all-to-all") and "context" in c.axes)
    # Keys and values of all layers, forward and recomputed, and two rows of integers with each.
    c, rows, length = small.MODEL, 8, 32
    pair = 2 * rows * length * c.kv_heads * c.width * 8
    allowed = 2 * c.layers * (pair + 2 * rows * length * 4) if method == "all_gather" else 0
    assert gathered <= allowed, [c for c in found if "context" in c.axes]
