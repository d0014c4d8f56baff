"""Models of many kinds, each one file of a user and one recipe: they train, go on after a kill, and know no mesh."""

import dataclasses
import functools
import json
import math
import pathlib

import jax
import jax.numpy as jnp
import killed_run
import numpy as np
import pytest
from changes import changed

from scalejax import configs
from scalejax.configs import as_data, discovery, serialization
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.compute import Keys
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Precision
from scalejax.train.metrics.protocol import MetricBase, Value
from scalejax.train.run_folder import read_lines
from scalejax.train.runs import binding, scoring
from scalejax.train.runs.run import Run
from scalejax.train.task import Batch, whole

FOLDER = pathlib.Path(__file__).parent.parent / "outside"

LEARNS = {
    # file: (value of the summary, which side of what), beside what a trivial model has
    "segmenter": ("test_dice", "above", 0.75),  # every pixel marked: 0.32
    "detector": ("test_found", "above", 0.6),  # three cells at random: 0.05
    "diffusion": ("test_loss", "below", 0.2),  # the noisy picture times the best number of each level: 0.33
    "pair": ("test_retrieved", "above", 0.5),  # at random: 0.06
    "inversion": ("test_loss", "below", 0.4),  # the token as it begins: 0.65
    "supernet": ("test_accuracy", "above", 0.8),  # at random: 0.5
    "pruner": ("test_loss", "below", 0.45),  # the mean of the values: 0.63
    "preferences": ("test_agreement", "above", 0.7),  # at random: 0.5
    "mixer": ("test_accuracy", "above", 0.6),  # at random: 0.25
}
STRATEGIES = {"implicit": Fsdp(), "explicit": Fsdp(form="explicit"), "ddp": Ddp()}


@functools.cache
def load(name):
    """The experiment of a user's file, which is read once: it makes new classes each time."""
    return configs.load(str(FOLDER / f"{name}.py"))


def recipe(name, **changes):
    return changed(load(name), **changes)


def bound(experiment, devices=None):
    """A run on so many devices, None = all."""
    return Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:devices]))


def wide(name, devices, strategy=None, **changes):
    """A run in float64."""
    return bound(recipe(name, precision=Precision(params="float64"), strategy=strategy or Fsdp(), **changes), devices)


def host(tree):
    return jax.tree.map(np.asarray, tree)


def batches_of(run):
    return run.program.task.train_batches(run.data, run.mesh, 0)


def steps(run, state, count):
    """(State, losses) after the first steps."""
    losses = []
    for _, batch in zip(range(count), batches_of(run), strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        losses.append(float(loss))
    return state, losses


def restored(experiment, folder, step=None):
    """(Run, its state, what the host knew) of a checkpoint."""
    run = bound(experiment)
    with Checkpointer(folder / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
        return run, *run.restore(checkpoints, step)


def arrays(state):
    """The state as NumPy arrays."""
    return host(dataclasses.replace(state, key=jax.random.key_data(state.key)))


def assert_same_bits(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_close(found, wanted):
    """Losses, and whatever has parameters, of two ways to compute them in float64."""
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), found[1], wanted[1])


def loss_of(run, state, fields, *, keys=None, purpose="training"):
    """(Loss, the model after it), of a batch on no mesh."""
    model = run.program.model.merge(host(state.params), host(state.variables))
    batch = Batch(jax.tree.map(jnp.asarray, run.program.task.host_fields(fields, {})), purpose=purpose)
    return run.program.task.loss(model, batch, keys=keys, gather=whole), model


# Every model.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Name -> (experiment, run folder, summary); each model is trained once."""
    found = {}

    def run(name):
        if name not in found:
            found[name] = train(name, tmp_path_factory.mktemp(name))
        return found[name]

    return run


def train(name, folder):
    experiment = recipe(name)
    half = experiment.steps // 2
    experiment = changed(experiment, log_every=half, evaluation__every=half)
    return experiment, folder, loop.train(experiment, workdir=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNS)
def test_it_learns_more_than_is_trivial(runs, name):
    _, folder, summary = runs(name)
    value, side, limit = LEARNS[name]
    assert summary[value] > limit if side == "above" else summary[value] < limit
    lines = read_lines(folder / "metrics.jsonl")
    windows = [line["loss"] for line in lines if "loss" in line and "grad_norm" in line]
    assert windows[-1] < windows[0]
    measures = json.loads((folder / "measures.json").read_text())["values"]
    assert value.removeprefix("test_") in [measure["name"] for measure in measures]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["detector", "diffusion", "inversion", "supernet", "pruner"])
def test_a_run_in_two_halves_has_the_same_bits(runs, name, tmp_path):
    experiment, folder, summary = runs(name)
    half = experiment.steps // 2
    loop.train(changed(experiment, steps=half), workdir=tmp_path)
    (_, early, _), (_, also_early, _) = restored(experiment, folder, half), restored(experiment, tmp_path)
    assert_same_bits(arrays(early), arrays(also_early))
    again = loop.train(experiment, workdir=tmp_path, resume="must")
    (_, one, known), (_, two, also_known) = restored(experiment, folder), restored(experiment, tmp_path)
    assert_same_bits(arrays(one), arrays(two))
    assert known == also_known
    assert any((np.asarray(x) != np.asarray(early.params[path])).any() for path, x in one.params.items())
    value = LEARNS[name][0]
    assert again[value] == summary[value]


@pytest.mark.parametrize("name", LEARNS)
def test_a_file_is_one_recipe_whose_record_says_all(name):
    path = str(FOLDER / f"{name}.py")
    assert discovery.find(path).function == name
    assert discovery.find(path).summary
    experiment = configs.load(path, ["model.width=16", "optimizer.learning_rate.value=0.5"])
    assert experiment.model.width == 16
    assert experiment.optimizer.learning_rate.value == 0.5
    written = json.loads(json.dumps(serialization.record(path, ["model.width=16"], recipe(name, model__width=16))))
    assert as_data.same(serialization.reload(written, recipe=path), recipe(name, model__width=16))


@pytest.mark.default_cases(first=5)
@pytest.mark.parametrize("name", LEARNS)
def test_a_plan_knows_its_step_from_the_schema_alone(name):
    experiment = recipe(name)
    program = binding.bind(experiment, experiment.data.schema(), make_mesh(MeshShape()), abstract=True)
    planned = program.abstract_batch()
    placed = convert.to_device(next(batches_of(bound(experiment))), program)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), planned) == jax.tree.map(
        lambda x: (x.shape, x.dtype, x.sharding), placed
    )
    state, loss = jax.eval_shape(program.train_step, program.abstract_state(), planned)
    assert loss.shape == ()
    assert jax.tree.structure(state) == jax.tree.structure(program.abstract_state())


def of_devices(name, devices, strategy=None, **changes):
    """(Losses, what was learnt and is remembered) after four steps in float64."""
    run = wide(name, devices, strategy, **changes)
    state, losses = steps(run, run.program.init(), 4)
    whole_everywhere = all(x.is_fully_replicated for x in state.params.values())
    assert whole_everywhere == (devices == 1 or isinstance(strategy, Ddp))
    return losses, host({**state.params, **state.variables, "averages": state.averages, "optimizer": state.optimizer})


@pytest.fixture(scope="module")
def of_one_device():
    """What one device finds, by the name of the model."""
    found = {}

    def find(name):
        if name not in found:
            found[name] = of_devices(name, 1)
        return found[name]

    return find


FORMS = {
    # All forms where a loss has collectives or rows of its own; elsewhere at least the explicit one.
    "pair": ("implicit", "explicit", "ddp"),
    **dict.fromkeys(("segmenter", "detector", "supernet", "pictures"), ("implicit", "explicit")),
    **dict.fromkeys(("inversion", "pruner", "preferences", "mixer"), ("explicit",)),
    "diffusion": ("implicit",),  # in the explicit form each device draws its own noise, see below
}


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["segmenter", "detector", "pair", "supernet"])
def test_an_evaluation_is_the_same_on_eight_devices_and_in_batches_of_another_size(name):
    one, eight = wide(name, 1), wide(name, 8)
    state = steps(one, one.program.init(), 3)[0]

    def score(run):
        there = run.program.init()
        placed = {
            field: {
                path: jax.device_put(np.asarray(held[path]), x.sharding) if held[path].shape == x.shape else x
                for path, x in getattr(there, field).items()
            }
            for field, held in (("params", state.params), ("variables", state.variables))
        }
        averages = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), host(state.averages), there.averages)
        return run.score(dataclasses.replace(there, averages=averages, **placed), "test")

    wanted = score(one)
    others = [eight]
    if name != "pair":  # whose negatives are those of the batch
        others.append(wide(name, 8, data__batch_size=one.experiment.data.batch_size // 2))
    for run in others:
        found = score(run)
        assert found.keys() == wanted.keys()
        for value in wanted:
            np.testing.assert_allclose(found[value], wanted[value], rtol=1e-12, err_msg=value)


# A segmenter.


def dice(logits, labels, weights):
    """Of one case, pixel by pixel."""
    both = marked = labelled = 0
    for pixel in np.ndindex(labels.shape):
        if weights[pixel] > 0:
            says, is_so = logits[pixel][1] > logits[pixel][0], labels[pixel] == 1
            both, marked, labelled = both + (says and is_so), marked + says, labelled + is_so
    return 2 * both / (marked + labelled)


@pytest.mark.slow
def test_dice_is_of_each_case_and_what_fills_up_a_batch_is_no_case(runs):
    experiment, folder, summary = runs("segmenter")
    run, state, _ = restored(experiment, folder)
    cases = []
    for batch in run.data.eval_batches("test"):
        logits = np.asarray(loss_of(run, state, batch, purpose="evaluation")[0].outputs["logits"])
        counts = batch["weights"].any((1, 2))
        labels, weights = batch["labels"][counts], batch["weights"][counts]
        cases += [dice(*case) for case in zip(logits[counts], labels, weights, strict=True)]
    assert len(cases) == summary["test_cases"] == run.data.num_examples("test") == 20
    assert summary["test_dice"] == pytest.approx(np.mean(cases), rel=1e-6)
    assert summary["test_weight"] == sum(batch["weights"].sum() for batch in run.data.eval_batches("test"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cases(MetricBase):
    """How many examples a metric is given; it asks for no weights."""

    values = (Value(name="cases", title="cases", better="high"),)
    collects = ("labels",)

    def zeros(self):
        return ()

    def update(self, sums, loss, batch):
        return sums

    def compute(self, sums):
        return {}

    def exact(self, collected, *, intervals):
        return {"cases": len(collected["labels"])}


@pytest.mark.default_cases("segmenter")
@pytest.mark.parametrize("name", ["segmenter", "supernet"])
def test_what_fills_up_a_batch_is_not_collected_for_a_metric_that_asks_for_no_weights(name):
    run = bound(recipe(name))
    task = run.program.task

    class Counted(type(task)):
        def metrics(self):
            return (Cases(),)

    program = dataclasses.replace(run.program, task=Counted(**vars(task)))
    found = scoring.score(program, program.init(), run.data.eval_batches("test")).measure()
    assert found == {"cases": run.data.num_examples("test")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Looks(MetricBase):
    """Looks at pictures of the first examples, and at all labels."""

    values = (Value(name="seen", title="seen", better="high"),)
    collects = ("labels",)
    shows = ("images",)

    def exact(self, collected, *, intervals):
        return {"seen": len(collected["images"]), "all": len(collected["labels"]), "sum": collected["images"].sum()}


def test_what_a_metric_shows_is_kept_of_the_first_examples_alone():
    run = bound(recipe("shapes"))

    class Looked(type(run.program.task)):
        def metrics(self):
            return (Looks(),)

    program = dataclasses.replace(run.program, task=Looked(**vars(run.program.task)))
    found = scoring.score(program, program.init(), run.data.eval_batches("test")).measure()
    first = next(run.data.eval_batches("test"))["images"]
    assert found == {"seen": 32, "all": 64, "sum": pytest.approx(first.sum())}


def test_pixels_that_nobody_has_labelled_teach_nothing():
    run = bound(recipe("segmenter"), 1)
    batch = next(batches_of(run))
    other = batch | {"labels": np.where(batch["weights"] > 0, batch["labels"], 1 - batch["labels"])}
    assert (other["labels"] != batch["labels"]).any()
    found = [run.program.train_step(run.program.init(), convert.to_device(b, run.program)) for b in (batch, other)]
    assert_same_bits(*(arrays(state) for state, _ in found))


# A detector.


def test_boxes_that_are_not_there_teach_nothing_and_are_not_to_be_found():
    run = bound(recipe("detector"), 1)
    batch = next(batches_of(run))
    absent = batch["presence"][..., None, None] == 0
    other = batch | {"points": np.where(absent, 7 - batch["points"], batch["points"])}
    assert (other["points"] != batch["points"]).any()
    found = [run.program.train_step(run.program.init(), convert.to_device(b, run.program)) for b in (batch, other)]
    assert_same_bits(*(arrays(state) for state, _ in found))


@pytest.mark.slow
def test_lesions_are_found_by_the_three_best_cells(runs):
    experiment, folder, summary = runs("detector")
    run, state, _ = restored(experiment, folder, experiment.steps // 2)
    model, found, boxes = run.program.model.merge(host(state.params)), 0, 0
    for batch in run.data.eval_batches("test"):
        heat = np.asarray(model(jnp.asarray(batch["images"])))[:, -1]
        presence = batch["presence"] * batch["weights"][:, None]
        for picture, points, there in zip(heat, batch["points"], presence, strict=True):
            best = np.argsort(-picture, axis=None)[:3]
            centres = [y * 8 + x for y, x in points[there > 0, -1]]
            found, boxes = found + sum(centre in best for centre in centres), boxes + len(centres)
    assert run.score(state, "test")["test_found"] == pytest.approx(found / boxes)
    assert summary["test_boxes"] == boxes


# A diffusion model.


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_noise_of_an_evaluation_is_that_of_each_example():
    run = wide("diffusion", 8)
    state = run.program.init()
    first = run.score(state, "test")["test_loss"]
    assert wide("diffusion", 8).score(state, "test")["test_loss"] == first
    assert wide("diffusion", 8, seed=1).score(state, "test")["test_loss"] != first
    # In a list that begins one example later each example has another number, and other noise.
    (batch,) = wide("diffusion", 8, data__batch_size=48).data.eval_batches("test")
    batch = {name: array[:40] for name, array in batch.items()}

    def loss(rows):
        part = {name: array[rows] for name, array in batch.items()}
        return scoring.score(run.program, state, iter([part])).measure()["loss"]

    ahead, behind = np.arange(32), np.arange(8, 40)
    assert loss(ahead) == loss(ahead) != loss(behind) != loss(ahead[::-1])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["explicit", "ddp"])
def test_each_device_draws_noise_of_its_own_that_its_number_gives(form):
    run, alone = wide("diffusion", 8, STRATEGIES[form]), wide("diffusion", 1)
    batch, state = next(batches_of(run)), run.program.init()
    key = jax.random.fold_in(state.key, 0)
    parts = np.split(np.arange(len(batch["weights"])), 8)

    def by_hand(params):
        total = 0
        for device, rows in enumerate(parts):
            fields = jax.tree.map(jnp.asarray, {name: array[rows] for name, array in batch.items()})
            keys = Keys(step=key, examples=jax.random.fold_in(key, device))
            model = alone.program.model.merge(params)
            total += alone.program.task.loss(model, Batch(fields), keys=keys, gather=whole).sum
        return total / len(batch["weights"])

    wanted, gradients = jax.jit(jax.value_and_grad(by_hand))(host(state.params))
    state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
    np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-12)
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    np.testing.assert_allclose(float(state.metrics["steps"].grad_norm.value), norm, rtol=1e-9)


# A contrastive pair.


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_negatives_are_those_of_the_whole_batch(form):
    run = wide("pair", 8, STRATEGIES[form])
    batch, state = next(batches_of(run)), run.program.init()
    wanted, _ = loss_of(wide("pair", 1), state, batch)
    # One first view of one device and one second view of another: both are of all losses.
    other = batch | {"second": np.concatenate([batch["second"][:-1], 1 - batch["second"][-1:]])}
    moved, _ = loss_of(wide("pair", 1), state, other)
    for fields, value in ((batch, wanted), (other, moved)):
        _, loss = run.program.train_step(run.program.init(), convert.to_device(fields, run.program))
        np.testing.assert_allclose(float(loss), float(value.sum / value.weight), rtol=1e-12)
    assert abs(float(moved.sum - wanted.sum)) > 0.01


# Parameters that are not trained.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trained"), [("inversion", {"token"}), ("preferences", {"policy/embedding", "policy/head"})]
)
def test_what_is_frozen_keeps_its_bits_and_has_no_state(runs, name, trained):
    experiment, folder, _ = runs(name)
    run, state, _ = restored(experiment, folder)
    begun = run.program.init()
    assert set(begun.params) > trained
    for path, before in begun.params.items():
        same = np.array_equal(np.asarray(before), np.asarray(state.params[path]))
        assert same == (path not in trained), path
    leaves = jax.tree_util.tree_leaves_with_path(state.optimizer)
    with_parameters = {key.key for path, _ in leaves for key in path if isinstance(key, jax.tree_util.DictKey)}
    assert with_parameters == trained
    assert sum(leaf.size for _, leaf in leaves if leaf.ndim) == 2 * sum(begun.params[path].size for path in trained)


@pytest.mark.slow
def test_a_policy_begins_as_its_reference_and_its_average_is_scored(runs):
    experiment, folder, summary = runs("preferences")
    run, state, _ = restored(experiment, folder)
    begun = run.program.init()
    for part in ("embedding", "head"):
        for path in (f"policy/{part}", f"reference/{part}"):
            np.testing.assert_array_equal(begun.params[path], state.params[f"reference/{part}"])
        assert (np.asarray(state.averages["ema"][f"policy/{part}"]) != state.params[f"policy/{part}"]).any()
    assert set(state.averages["ema"]) == {"policy/embedding", "policy/head"}
    _, loss = run.program.train_step(begun, convert.to_device(next(batches_of(run)), run.program))
    assert float(loss) == pytest.approx(math.log(2), rel=1e-6)
    assert run.score(state, "test")["test_loss"] == summary["test_loss"]
    plain = bound(changed(experiment, evaluation__average=None))
    averaged = dataclasses.replace(state, params={**state.params, **state.averages["ema"]})
    assert plain.score(averaged, "test")["test_loss"] == summary["test_loss"]
    assert plain.score(state, "test")["test_loss"] != summary["test_loss"]


# A supernet.


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_all_devices_and_parts_take_the_same_path(of_one_device, form):
    run = wide("supernet", 8, STRATEGIES[form], gradients__microbatch=1)
    state, losses, paths = run.program.init(), [], []
    before = host(state.params)
    for _, batch in zip(range(4), batches_of(run), strict=False):
        state, _ = run.program.take_metrics(state)
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        losses.append(float(loss))
        (strays,) = [sums for sums in state.metrics.values() if isinstance(sums, dict) and "strays" in sums]
        assert float(strays["strays"].value) == 0
        paths.append(int(strays["path"].value))
        choices = [paths[-1] // 4**layer % 4 for layer in range(3)]
        after = host(state.params)
        if len(paths) == 1:  # Adam moves later what has had a gradient once
            changes = (after["layers"] != before["layers"]).any((2, 3))
            np.testing.assert_array_equal(changes, np.arange(4) == np.reshape(choices, (3, 1)))
    assert len(set(paths)) > 1
    np.testing.assert_allclose(losses, of_one_device("supernet")[0], rtol=1e-12)
    for path, value in host(state.params).items():
        np.testing.assert_allclose(value, of_one_device("supernet")[1][path], rtol=1e-9, atol=1e-12)


# Masks that an optimizer holds.


@pytest.mark.slow
def test_what_is_pruned_stays_zero_through_training_and_a_kill(runs, tmp_path):
    experiment, folder, summary = runs("pruner")
    again = killed_run.train(experiment, tmp_path, at=27)
    assert again["test_loss"] == summary["test_loss"]
    (run, state, _), (_, other, _) = restored(experiment, folder), restored(experiment, tmp_path)
    assert_same_bits(arrays(state), arrays(other))
    begun = run.program.init().params
    assert set(state.optimizer.masks) == {"experts/up", "experts/down"}
    for at in (experiment.steps // 2, experiment.steps):
        _, state, _ = restored(experiment, tmp_path, at)
        for path, mask in host(state.optimizer.masks).items():
            size = np.abs(np.asarray(begun[path]))
            np.testing.assert_array_equal(mask, size > np.median(size, (1, 2), keepdims=True))
            assert mask.sum() == mask.size / 2
            value = np.asarray(state.params[path])
            assert (value[~mask] == 0).all()
            assert (value[mask] != 0).all()
            assert (value[mask] != np.asarray(begun[path])[mask]).any()
        assert (np.asarray(state.params["router"]) != 0).all()
