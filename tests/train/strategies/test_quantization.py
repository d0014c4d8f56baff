"""Runs with rules for number formats: models that know of none, tables, strategies, and going on from a float run."""

import dataclasses

import jax
import jax.numpy as jnp
import llama_cases
import numpy as np
import pytest
import quantized_cases
import small_language_run
import small_run

from scalejax.configs.recsys import dlrm
from scalejax.errors import UserError
from scalejax.numerics import formats
from scalejax.numerics.quantize import cast
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.metrics import sums
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding

MX9 = QuantizationRule(weight_qtype="bdr_mx9", act_qtype="bdr_mx9", bwd_qtype="bdr_mx9", tail="pad")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return small_language_run.write(tmp_path_factory.mktemp("texts") / "documents")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def language(texts, *rules, mesh=None, devices=1, **changes):
    """A bound run, its state and its first batch."""
    experiment = small_language_run.experiment(texts, quantization=rules, **changes)
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(mesh or MeshShape(), jax.devices()[:devices]))
    return built, built.init(), convert.to_device(next(data.train_batches(start_example=0)), built)


def mean_loss(built, state, batch):
    """Of an evaluation."""
    (found,) = built.metrics.values()
    return found.compute(sums.to_host(built.eval_step(state, batch).metrics)["0"])["loss"]


def logits(built, state, batch):
    return np.asarray(built.eval_step(state, batch).outputs["logits"])


def clicks(rows, *rules, devices=1, **changes):
    experiment = small_run.experiment(rows, quantization=rules, **changes)
    data = experiment.data.build()
    built = binding.bind(experiment, data.schema, make_mesh(experiment.placement.mesh, jax.devices()[:devices]))
    return built, built.init(), convert.to_device(next(data.train_batches(start_example=0)), built)


REDUCED = {"query": 1, "key": 1, "value": 1, "out": (1, 2), "gate": 1, "up": 1, "down": 1}
"""Axes of the stacked weights of a Llama that their products sum over."""


def cast_by_hand(path, value, name):
    if path == "embed/weight":
        return cast(value, name, axis=1, tail="pad")
    if path == "head/weight":
        return cast(value, name, axis=0, tail="pad")
    axes = REDUCED.get(path.split("/")[-1])
    if axes == (1, 2):
        layers, heads, width, dim = value.shape
        return cast(value.reshape(layers, heads * width, dim), name, axis=1, tail="pad").reshape(value.shape)
    return value if axes is None else cast(value, name, axis=axes, tail="pad")


@pytest.mark.slow
def test_weights_of_a_llama_are_those_cast_by_hand(texts):
    """Embedding, attention, gated MLP and head, in training and in evaluation."""
    built, state, batch = language(texts, QuantizationRule(weight_qtype="bdr_mx4", tail="pad"))
    plain = language(texts)[0]
    by_hand = {path: cast_by_hand(path, value, "bdr_mx4") for path, value in state.params.items()}
    assert sum(not np.array_equal(by_hand[path], value) for path, value in state.params.items()) == 9
    want = mean_loss(plain, dataclasses.replace(state, params=by_hand), batch)
    np.testing.assert_allclose(mean_loss(built, state, batch), want, rtol=1e-5)
    unformatted = mean_loss(plain, state, batch)
    assert abs(want - unformatted) > 1e-4 * unformatted
    loss = built.train_step(state, batch)[1]
    np.testing.assert_allclose(loss, want, rtol=1e-5)


@pytest.mark.slow
def test_the_first_rule_that_matches_makes_exceptions(texts):
    head = QuantizationRule(module_path="head|embed")
    built, state, batch = language(texts, head, QuantizationRule(weight_qtype="bdr_mx4", tail="pad"))
    by_hand = {
        path: value if path in ("head/weight", "embed/weight") else cast_by_hand(path, value, "bdr_mx4")
        for path, value in state.params.items()
    }
    want = mean_loss(language(texts)[0], dataclasses.replace(state, params=by_hand), batch)
    np.testing.assert_allclose(mean_loss(built, state, batch), want, rtol=1e-5)


@pytest.mark.slow
def test_a_quantized_checkpoint_has_the_weights_that_training_with_rules_took(texts, tmp_path):
    """After quantization-aware fine-tuning of weights a direct cast in the same format loses nothing more."""
    head = QuantizationRule(module_path="head|embed")
    built, state, batch = language(texts, head, QuantizationRule(weight_qtype="bdr_mx4", tail="pad"))
    plain = language(texts)[0]
    experiment = small_language_run.experiment(texts)
    config = experiment.model.bound(experiment.data.schema())
    weights = quantized_cases.write_model(tmp_path / "float", config)
    quantized_cases.quantize(tmp_path / "float", tmp_path / "packed", "bdr_mx4")

    def losses(program, weights):
        params = {path: jnp.asarray(value) for path, value in llama_cases.parameters(config, weights).items()}
        return mean_loss(program, dataclasses.replace(state, params=params), batch)

    aware, packed = losses(built, weights), losses(plain, quantized_cases.read_weights(tmp_path / "packed"))
    np.testing.assert_allclose(packed, aware, rtol=1e-5)
    assert abs(losses(plain, weights) - aware) > 1e-3 * aware


def test_a_rule_for_no_module_is_refused_before_anything_is_compiled(texts, rows):
    with pytest.raises(UserError, match=r"quantization.0: .* matches no module; .*layers/mlp/gate"):
        language(texts, dataclasses.replace(MX9, module_path="layers/mlp/gates"))
    with pytest.raises(UserError, match="tables/shop"):
        clicks(rows, dataclasses.replace(MX9, module_path="tables/shops"))
    with pytest.raises(UserError, match="only embedding tables, tables/hour, tables/item"):
        clicks(rows, QuantizationRule(module_path="tables/.*", act_qtype="bdr_mx9"))


def test_blocks_that_do_not_divide_are_refused_with_the_module(rows):
    built, state, batch = clicks(rows, dataclasses.replace(MX9, tail="refuse"))
    with pytest.raises(UserError, match=r"quantization of \S+/\S+: it sums over \d+ values"):
        built.train_step(state, batch)


def quantizations(jaxpr):
    """How often arrays are quantized in a program; what a scan repeats counts once."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.params.get("name") == "_quantized":
            found += bool(equation.invars)  # what has none is constants, taken out of it
            continue
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                found += quantizations(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_step_of_a_llama_quantizes_six_times_a_product(texts, remat):
    """Seven products a layer, and the head, whatever is rematerialised; rows of the embedding once."""
    model = dataclasses.replace(small_language_run.MODEL, remat=remat)
    built, state, batch = language(texts, MX9, model=model)
    assert quantizations(built.train_step.trace(state, batch).jaxpr.jaxpr) == 6 * (7 + 1) + 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["wukong", "dlrm"])
def test_weights_of_click_models_are_those_cast_by_hand(rows, model):
    changes = {} if model == "wukong" else {"model": dlrm.smoke().model}
    rule = QuantizationRule(module_path="(?!tables/).*", weight_qtype="bdr_mx4", tail="pad")
    built, state, batch = clicks(rows, rule, **changes)
    plain = clicks(rows, **changes)[0]

    def by_hand(path, value):
        if value.ndim < 2:
            return value
        # W X: a mixing matrix comes first, and Y is turned before it does; a kernel comes second.
        return cast(value, "bdr_mx4", axis=0 if path.endswith(("/kernel", "/y")) else 1, tail="pad")

    changed = {path: by_hand(path, value) for path, value in state.params.items()}
    want = logits(plain, dataclasses.replace(state, params=changed), batch)
    np.testing.assert_allclose(logits(built, state, batch), want, rtol=1e-4, atol=1e-5)
    assert np.abs(want - logits(plain, state, batch)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_tables_are_read_in_their_format_and_rest_as_they_are(rows, devices):
    shop = QuantizationRule(module_path="tables/shop", weight_qtype="bdr_mx6", tail="pad")
    item = QuantizationRule(module_path="tables/item", weight_qtype="int8", scales="rows")
    built, state, batch = clicks(rows, shop, item, devices=devices)
    plain, started, _ = clicks(rows, devices=devices)
    tables = plain.collection.to_logical(started.tables)
    np.testing.assert_array_equal(built.collection.to_logical(state.tables)["shop"]["rows"], tables["shop"]["rows"])

    dim = tables["item"]["rows"].shape[1]
    row = dataclasses.replace(formats.find("int8"), k1=dim, k2=dim)
    changed = {name: dict(leaves) for name, leaves in tables.items()}
    changed["shop"]["rows"] = cast(jnp.asarray(tables["shop"]["rows"]), "bdr_mx6", axis=1, tail="pad")
    changed["item"]["rows"] = cast(jnp.asarray(tables["item"]["rows"]), row, axis=1)
    want = logits(plain, dataclasses.replace(started, tables=plain.collection.from_logical(changed)), batch)
    np.testing.assert_allclose(logits(built, state, batch), want, rtol=0, atol=1e-6)


def trained(built, state, batch, steps=3):
    losses = []
    for _ in range(steps):
        state, loss = built.train_step(state, batch)
        losses.append(float(loss))
    return np.array(losses)


STRATEGIES = {
    "implicit": (Fsdp(), MeshShape(fsdp=8)),
    "explicit and tensor": (Fsdp(form="explicit"), MeshShape(fsdp=4, tensor=2)),
    "ddp": (Ddp(bucket_bytes=4096), MeshShape(fsdp=8)),
}
EVERYTHING = ".*"


@pytest.fixture(scope="module")
def on_one_device(texts):
    """Losses in number formats and without."""
    return trained(*language(texts, dataclasses.replace(MX9, module_path=EVERYTHING))), trained(*language(texts))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_eight_devices_train_as_one_does(texts, on_one_device, strategy):
    """Blocks along the examples lie inside rows, and no block straddles devices; sums differ by their order."""
    want, plain = on_one_device
    strategy, mesh = STRATEGIES[strategy]
    rule = dataclasses.replace(MX9, module_path=EVERYTHING)
    got = trained(*language(texts, rule, strategy=strategy, mesh=mesh, devices=8))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert np.abs(plain - want).max() > 2e-4 * want[0]


@pytest.mark.slow
def test_clicks_on_eight_devices_train_as_on_one(rows):
    rule = dataclasses.replace(MX9, module_path=EVERYTHING)
    want = trained(*clicks(rows, rule))
    got = trained(*clicks(rows, rule, devices=8))
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.slow
def test_a_run_in_float32_goes_on_in_number_formats(texts, tmp_path):
    """Quantization-aware fine-tuning: the parameters of a checkpoint, with rules and more steps."""
    floats = small_language_run.experiment(texts, steps=8)
    loop.train(floats, workdir=tmp_path / "run")
    rule = QuantizationRule(weight_qtype="bdr_mx4", act_qtype="bdr_mx6", tail="pad")
    cast_directly = dataclasses.replace(floats, quantization=(rule,))
    before = loop.evaluate(floats, workdir=tmp_path / "run", split="validation")["val_loss"]
    direct = loop.evaluate(cast_directly, workdir=tmp_path / "run", split="validation")["val_loss"]
    assert direct > before + 1e-3
    tuned = dataclasses.replace(cast_directly, steps=16)
    closing = loop.train(tuned, workdir=tmp_path / "run", resume="must")
    assert closing["val_loss"] < direct
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line][-1] == 16
