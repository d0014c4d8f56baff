"""Every recipe can be built anywhere, and every smoke recipe trains."""

import io
import math
import pathlib

import numpy as np
import pytest
import rich.console

from scalejax import configs
from scalejax.configs import discovery
from scalejax.configs.recsys import logistic
from scalejax.data.text import stages
from scalejax.errors import UserError
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.runs import binding

RECIPES = {recipe.name: recipe for recipe in discovery.listing()}
LANGUAGE = [name for name, recipe in RECIPES.items() if recipe.path.parent.name == "llm"]
GRAPHS = [name for name, recipe in RECIPES.items() if recipe.path.parent.name == "graph"]
VISION = [name for name, recipe in RECIPES.items() if recipe.path.parent.name == "vision"]
OTHERS = (*LANGUAGE, *GRAPHS, *VISION)
SMOKES = [name for name in RECIPES if name.endswith(("-smoke", "-smoke_alternate")) and name not in OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_builds_without_reading_anything(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = configs.load(name)
    assert experiment.steps > 0
    assert RECIPES[name].summary
    assert not list(tmp_path.iterdir())
    if experiment.evaluation.every:
        assert experiment.evaluation.every <= experiment.total_steps


ABSENT = ("-movielens", "-table")  # need a file of the user


@pytest.mark.default_cases(first=8)
@pytest.mark.parametrize("name", [n for n in RECIPES if not n.endswith(ABSENT) and n not in OTHERS])
def test_model_fits_the_columns_of_its_data(name: str) -> None:
    experiment = configs.load(name)
    program = binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()))
    assert sum(p.size for p in program.model.params.values()) == program.task.dense_parameters()
    assert ("tpu-async-all-to-all" in experiment.xla_flags) is bool(program.collection)


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_sum_gradients_in_float32(name: str) -> None:
    strategy = configs.load(name).strategy
    if isinstance(strategy, Fsdp):  # others say of their own what travels in how many bits
        assert (strategy.form, strategy.reduce_dtype) == ("explicit", "float32")


@pytest.mark.default_cases(first=8)
@pytest.mark.parametrize("name", [n for n in LANGUAGE if "shakespeare" not in n])
def test_language_model_has_the_parameters_that_it_says(name: str) -> None:
    experiment = configs.load(name)
    schema = experiment.data.schema()
    # Rows of eight devices, whatever the machine.
    program = binding.bind(experiment, schema, make_mesh(MeshShape(fsdp=8)))
    config = experiment.model.bound(schema)
    assert sum(math.prod(p.shape) for p in program.model.params.values()) == config.parameters()


def test_batches_and_rate_of_the_405b_recipe_are_those_of_the_report() -> None:
    # arXiv 2407.21783, section 3.4.1: 4 M tokens in rows of 4,096, 8 M in rows of 8,192 after 252 M, 16 M after 2.87 T.
    experiment = configs.load("llama-pretrain-405b")
    spans = stages.plan(experiment.data.stages, 17_000_000_000_000)
    first = -(-252_000_000 // 2**22)
    second = first + -(-(2_870_000_000_000 - first * 2**22) // 2**23)
    at = {0: (1024, 4096), first - 1: (1024, 4096), first: (1024, 8192), 7_999: (1024, 8192), 8_000: (1024, 8192)}
    at |= {second - 1: (1024, 8192), second: (2048, 8192), 1_000_000: (2048, 8192)}
    for step, (rows, length) in at.items():
        (span,) = (span for span in spans if span.first_step <= step < span.stop_step)
        assert (span.data.batch_size, span.data.schema().length) == (rows, length), step
    rate = experiment.optimizer.learning_rate.build(experiment.steps)
    got = [float(rate(step)) for step in (0, 7_999, 8_000, 1_200_000)]
    np.testing.assert_allclose(got, [0.0, 8e-5 * 7_999 / 8_000, 8e-5, 8e-7], rtol=1e-5)  # float32


@pytest.mark.slow
def test_language_smoke_trains_and_sums_up(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = tmp_path / "text.py"
    text.write_text("def double(x):\n    return 2 * x\n" * 400)
    sets = [f"data.path={text}", "data.split.by=position"]
    closing = loop.train(configs.load("llama-smoke", sets), workdir=tmp_path / "run", recipe="llama-smoke")
    assert closing["steps"] == 4
    assert 0 < closing["val_loss"] < 6.5
    assert closing["val_perplexity"] == pytest.approx(math.exp(closing["val_loss"]))
    assert closing["tokens_per_s"] > 0
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny_sdp4bit", "llama-tiny_clan"])
def test_few_bits_on_the_wire_train_and_say_what_they_send(name: str, tmp_path: pathlib.Path) -> None:
    text = tmp_path / "text.py"
    text.write_text("def double(x):\n    return 2 * x\n" * 400)
    sizes = ["steps=6", "log_every=3", "data.batch_size=8", "data.length=64", "model.layers=1", "model.unroll=1"]
    sets = [f"data.path={text}", "data.split.by=position", f"data.folder={tmp_path / 'cache'}", *sizes]
    said = io.StringIO()
    console = rich.console.Console(file=said, width=200)
    closing = loop.train(configs.load(name, sets), workdir=tmp_path / "run", recipe=name, console=console)
    assert closing["steps"] == 6
    assert 0 < closing["val_loss"] < 5.5
    assert 0 < closing["exchange_error"] < 1.5
    assert "each device sends at least" in said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_smoke_trains_and_sums_up(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    closing = loop.train(configs.load(name), workdir=tmp_path / "run", recipe=name)
    assert closing["steps"] == 12
    for field in ("test_auc", "test_auc_low", "test_logloss", "test_ne", "samples_per_s"):
        assert closing[field] > 0, field
    assert 0.4 < closing["test_auc"] < 0.8
    assert closing["recipe"] == name
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in VISION if n.endswith("-smoke")])
def test_vision_smoke_trains_and_sums_up(name: str, tmp_path: pathlib.Path) -> None:
    experiment = configs.load(name)
    closing = loop.train(experiment, workdir=tmp_path / "run", recipe=name)
    assert closing["steps"] == experiment.steps
    assert closing["test_loss"] > 0
    assert closing["samples_per_s"] > 0
    assert (tmp_path / "run" / "report.html").exists()


# Each compiles a step, a score and a checkpoint: one of them by default.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [n for n in GRAPHS if n.endswith("-smoke")],
)
def test_graph_smoke_trains_and_sums_up(name: str, tmp_path: pathlib.Path) -> None:
    closing = loop.train(configs.load(name), workdir=tmp_path / "run", recipe=name)
    assert closing["steps"] == 12
    assert closing["nodes"] == 2708
    assert 1 / 7 < closing["test_accuracy"] < 0.9
    assert closing["samples_per_s"] > 0
    assert (tmp_path / "run" / "report.html").exists()


_BROUGHT = ["wukong-criteo", "dlrm-criteo", "dcnv2-criteo", "wukong-movielens", "dlrm-movielens", "dcnv2-movielens"]
_BROUGHT += ["gcn-citeseer", "gcn-proteins"]


@pytest.mark.parametrize("name", _BROUGHT)
def test_data_that_a_user_has_to_bring_is_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"(no such file or folder|is not a folder).*Set data\.path"):
        configs.load(name).data.build()


def test_rows_of_the_logistic_recipes_decay_alike() -> None:
    names = [name for name in RECIPES if name.startswith("logistic-flights")]
    found = {name: configs.load(name).tables.optimizer for name in names}
    assert len(found) == 3
    assert {optimizer.weight_decay for optimizer in found.values()} == {logistic.L2}


def test_the_bare_name_is_the_flights() -> None:
    for stem in ("wukong", "dlrm", "dcnv2", "logistic"):
        assert configs.load(stem) == configs.load(f"{stem}-flights")
