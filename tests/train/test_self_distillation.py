"""SMC and its rivals against their definitions: losses, what waits, running means, alignment, devices, resuming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
from flax import nnx

from scalejax import optim
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.vision.cnn import CnnConfig
from scalejax.numerics.dtypes import FLOAT32
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop, self_distillation
from scalejax.train.batch import Batch
from scalejax.train.batches import convert
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints, Evaluation, Experiment, Gradients, Precision
from scalejax.train.metrics import evaluation
from scalejax.train.runs.run import Run
from scalejax.train.self_distillation import CrossEntropy, Dlb, Sam, Smc

SIDE, CLASSES, ROWS = 6, 3, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blots:
    """Bright blots in one of three places; 27 training pictures in batches of 8, so that batches cross epochs."""

    batch_size: int = ROWS
    seed: int = 0

    def schema(self):
        sizes = {"height": SIDE, "width": SIDE, "channels": 1, "dtype": "float32", "batch_size": self.batch_size}
        return ImageSchema(mean=(0.2,), std=(1.0,), classes=("left", "middle", "right"), **sizes)

    def build(self):
        rng = np.random.default_rng(0)

        def split(count):
            labels = rng.integers(0, CLASSES, count).astype(np.int32)
            images = rng.normal(0, 1, (count, SIDE, SIDE, 1)).astype(np.float32)
            for image, label in zip(images, labels, strict=True):
                image[2:5, 2 * label : 2 * label + 2] += 1
            return {"images": images, "labels": labels, "number": np.arange(count, dtype=np.int32)}

        splits = {"train": split(27), "validation": split(12), "test": split(12)}
        augment = Augment(crop=1)
        return ImageDataSet(splits, batch_size=self.batch_size, schema=self.schema(), augment=augment, seed=self.seed)


def recipe(learning, **changes):
    return dataclasses.replace(
        Experiment(
            model=CnnConfig(widths=(4,), hidden=8, learning=learning),
            data=Blots(),
            steps=8,
            optimizer=optim.Sgd(learning_rate=optim.Constant(value=0.1), momentum=0.9),
            checkpoints=Checkpoints(every=4),
            evaluation=Evaluation(every=4),
        ),
        **changes,
    )


def bound(experiment, devices=1):
    return Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:devices]))


def train(run, state, count):
    losses = []
    batches = run.program.task.train_batches(run.data, run.mesh, int(state.step) * ROWS)
    for _, batch in zip(range(count), batches, strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        losses.append(float(loss))
    return losses, state


class Table(nnx.Module):
    """A network whose picture [1, 1, C] holds the logits; it counts how often and with what it moved its means."""

    def __init__(self, learning):
        self.seen = nnx.BatchStat(jnp.zeros(()))
        self.passes = nnx.BatchStat(jnp.zeros(()))
        self_distillation.attach(self, learning, rows=ROWS, classes=CLASSES, dtype=jnp.float32)

    def __call__(self, images, purpose):
        self.seen[...] = images.sum()
        self.passes[...] = self.passes[...] + 1
        return images[:, 0, 0]


def table_batch(learning, progress, seed=0):
    """A batch whose pictures are logits, of it and of the other views."""
    rng = np.random.default_rng(seed)
    fields = {"labels": rng.integers(0, CLASSES, ROWS), "weights": np.ones(ROWS, np.float32)}
    for prefix in ("", *(view.prefix for view in learning.views)):
        fields[prefix + "images"] = rng.normal(0, 2, (ROWS, 1, 1, CLASSES)).astype(np.float32)
        fields[prefix + "labels"] = rng.integers(0, CLASSES, ROWS)
    return Batch(jax.tree.map(jnp.asarray, fields), progress=jnp.float32(progress))


def softmax(logits, temperature=1.0):
    return scipy.special.softmax(np.asarray(logits, np.float64) / temperature, axis=-1)


def cross_entropy(logits, labels):
    return -np.log(softmax(logits)[np.arange(len(labels)), np.asarray(labels)])


def test_the_weight_of_soft_labels_grows_as_a_cosine():
    at = np.linspace(0, 1, 101, dtype=np.float32)
    found = np.array([self_distillation.weight(jnp.float32(t), 0.9) for t in at])
    np.testing.assert_allclose(found[[0, 50, 100]], [0, 0.45, 0.9], atol=1e-6)
    assert (np.diff(found) > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("channels", [2, 3])
def test_smc_is_cross_entropy_and_the_distance_to_what_waits(channels):
    learning = Smc(channels=channels, alpha=0.8, temperature=1.7)
    network, batch = Table(learning), table_batch(learning, 0.25)
    waiting = np.random.default_rng(1).normal(0, 2, (ROWS, channels - 1, CLASSES)).astype(np.float32)
    network.soft_labels[...] = jnp.asarray(waiting)
    losses, logits = learning.losses(network, batch)
    a = 0.8 * (1 - (1 + np.cos(np.pi * 0.25)) / 2)
    p, q = softmax(waiting, 1.7).mean(1), softmax(batch["images"][:, 0, 0], 1.7)
    soft = scipy.special.rel_entr(p, q).sum(1)
    np.testing.assert_allclose(losses, (1 - a) * cross_entropy(logits, batch["labels"]) + a * soft, atol=1e-6)
    # What waits from now on is what the teacher says of the next batch, view by view.
    views = [batch[f"ahead{n}_images"][:, 0, 0] for n in range(1, channels)]
    np.testing.assert_array_equal(network.soft_labels[...], np.stack(views, 1))
    # Only the pass over the other views has moved the means, once.
    assert network.passes[...] == 1
    np.testing.assert_allclose(network.seen[...], sum(view.sum() for view in views), rtol=1e-5)


def test_smc_without_weight_is_cross_entropy():
    for learning, progress in ((Smc(alpha=0.0), 0.7), (Smc(), 0.0)):
        batch = table_batch(learning, progress)
        wanted, _ = CrossEntropy().losses(Table(CrossEntropy()), batch)
        np.testing.assert_array_equal(learning.losses(Table(learning), batch)[0], wanted)


def test_the_gradient_is_the_closed_one_and_none_reaches_what_waits():
    temperature, a = 1.5, 0.3
    rng = np.random.default_rng(0)
    z, q = (jnp.asarray(rng.normal(0, 2, shape).astype(np.float32)) for shape in ((ROWS, CLASSES), (ROWS, 1, CLASSES)))
    labels = jnp.asarray(rng.integers(0, CLASSES, ROWS))

    def mean(z, q):
        soft = self_distillation.distance(q, z, temperature)
        return ((1 - a) * CrossEntropy().of(z, labels) + a * soft).mean()

    of_z, of_q = jax.grad(mean, (0, 1))(z, q)
    hard = softmax(z) - np.eye(CLASSES)[np.asarray(labels)]
    soft = (softmax(z, temperature) - softmax(q, temperature)[:, 0]) / temperature
    np.testing.assert_allclose(of_z, ((1 - a) * hard + a * soft) / ROWS, atol=1e-6)
    assert not of_q.any()


def test_smoothed_labels_are_those_of_optax():
    rng = np.random.default_rng(0)
    logits, labels = jnp.asarray(rng.normal(0, 2, (ROWS, CLASSES)), jnp.float32), jnp.asarray(rng.integers(0, 3, ROWS))
    smooth = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), 0.2)
    wanted = optax.softmax_cross_entropy(logits, smooth)
    np.testing.assert_allclose(CrossEntropy(smoothing=0.2).of(logits, labels), wanted, rtol=1e-5)


def test_dlb_has_both_cross_entropies_and_the_distance_to_the_last_batch():
    learning = Dlb(alpha=0.5, temperature=3.0)
    network, batch = Table(learning), table_batch(learning, 0.5)
    waiting = np.random.default_rng(1).normal(0, 2, (ROWS, 1, CLASSES)).astype(np.float32)
    network.soft_labels[...] = jnp.asarray(waiting)
    losses, logits = learning.losses(network, batch)
    again = batch["before_images"][:, 0, 0]
    hard = (cross_entropy(logits, batch["labels"]) + cross_entropy(again, batch["before_labels"])) / 2
    soft = scipy.special.rel_entr(softmax(waiting[:, 0], 3.0), softmax(again, 3.0)).sum(1)
    np.testing.assert_allclose(losses, hard + 0.5 * 9 * soft, rtol=1e-5)
    np.testing.assert_array_equal(network.soft_labels[...][:, 0], logits)
    first = table_batch(learning, 0.0)
    losses, logits = learning.losses(Table(learning), first)
    np.testing.assert_allclose(losses, cross_entropy(logits, first["labels"]), rtol=1e-5)


@pytest.mark.parametrize("learning", [Smc(), Smc(channels=3), Dlb()], ids=["smc-2", "smc-3", "dlb"])
def test_what_waits_is_of_the_examples_that_come(learning):
    """With a network that says which example it sees: over four epochs, whose batches are not whole."""
    run = bound(recipe(learning))
    before, network = None, Table(learning)
    for step, batch in zip(range(14), run.program.task.train_batches(run.data, run.mesh, 0), strict=False):
        if isinstance(learning, Smc):
            views = [batch[f"ahead{n}_number"] for n in range(1, learning.channels)]
            fields = {"labels": batch["labels"], "weights": batch["weights"]}
            for prefix in ("", *(view.prefix for view in learning.views)):
                logits = batch[prefix + "number"][:, None] * np.float32([1, 0, -1])
                fields[prefix + "images"], fields[prefix + "labels"] = logits[:, None, None], batch[prefix + "labels"]
            if before is not None:
                for n, view in enumerate(before):
                    np.testing.assert_array_equal(view, batch["number"])
                    waiting = np.asarray(getattr(network, self_distillation.QUEUE)[...])[:, n, 0]
                    np.testing.assert_array_equal(waiting, batch["number"])
            learning.losses(network, Batch(jax.tree.map(jnp.asarray, fields), progress=jnp.float32(0.5)))
            before = views
        else:
            if step:
                np.testing.assert_array_equal(batch["before_number"], before)
                np.testing.assert_array_equal(batch["before_labels"], run.data.splits["train"]["labels"][before])
            before = batch["number"]


@pytest.mark.slow
def test_compiled_steps_are_those_taken_one_operation_at_a_time():
    run = bound(recipe(Smc()))
    compiled, _ = train(run, run.program.init(), 4)
    state = run.program.init()
    with jax.disable_jit():
        literal, _ = train(run, state, 4)
    np.testing.assert_allclose(literal, compiled, rtol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
def test_the_teacher_sees_another_view_unless_they_are_shared(shared):
    run = bound(recipe(Smc(shared_views=shared)))
    batches = run.program.task.train_batches(run.data, run.mesh, 0)
    first, second = next(batches), next(batches)
    assert (first["ahead1_images"] == second["images"]).all() == shared


class LinearNetwork(nnx.Module):
    """Logits from a matrix, and a count of passes that moved the means."""

    def __init__(self):
        self.matrix = nnx.Param(jnp.asarray(np.random.default_rng(5).normal(size=(4, CLASSES)), jnp.float32))
        self.passes = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, images, purpose):
        self.passes[...] = self.passes[...] + 1
        return images.reshape(len(images), -1) @ self.matrix[...]


def test_sam_takes_the_gradient_where_the_loss_is_steeper():
    rng = np.random.default_rng(0)
    images, labels = rng.normal(size=(ROWS, 4, 1, 1)).astype(np.float32), rng.integers(0, CLASSES, ROWS)
    weights = rng.uniform(0.5, 1, ROWS).astype(np.float32)
    batch = Batch({"images": jnp.asarray(images), "labels": jnp.asarray(labels), "weights": jnp.asarray(weights)})

    def gradient(matrix):
        slope = (softmax(images.reshape(ROWS, 4) @ matrix) - np.eye(CLASSES)[labels]) * weights[:, None]
        return images.reshape(ROWS, 4).T.astype(np.float64) @ slope

    network = LinearNetwork()
    matrix = np.asarray(network.matrix[...], np.float64)
    there = matrix + 0.3 * gradient(matrix) / np.linalg.norm(gradient(matrix))
    structure, params, rest = nnx.split(network, nnx.Param, ...)

    def total(params):
        model = nnx.merge(structure, params, rest, copy=True)
        return (Sam(radius=0.3).losses(model, batch)[0] * weights).sum(), model.passes[...]

    found, passes = jax.grad(total, has_aux=True)(params)
    np.testing.assert_allclose(found["matrix"][...], gradient(there), atol=1e-5)
    assert np.abs(gradient(there) - gradient(matrix)).max() > 0.05
    assert passes == 1


FORMS = {"implicit": Fsdp(), "explicit": Fsdp(form="explicit")}
LEARNINGS = {"smc": Smc(), "smc-3": Smc(channels=3), "dlb": Dlb(), "sam": Sam(radius=0.2)}


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"), [("smc", "implicit"), ("smc-3", "explicit"), ("dlb", "explicit"), ("sam", "explicit")]
)
def test_eight_devices_learn_what_one_does(name, form):
    experiment = recipe(LEARNINGS[name], precision=Precision(params="float64"), strategy=FORMS[form])
    found = []
    for devices in (1, 8):
        run = bound(experiment, devices)
        losses, state = train(run, run.program.init(), 4)
        found.append((losses, jax.tree.map(np.asarray, (state.params, state.variables))))
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), found[1][1], found[0][1])


@pytest.mark.slow
def test_what_waits_lies_where_its_examples_lie_and_is_not_gathered():
    run = bound(recipe(Smc(), strategy=Fsdp(form="explicit")), 8)
    state = run.program.init()
    waiting = state.variables["soft_labels"]
    assert {shard.data.shape for shard in waiting.addressable_shards} == {(1, 1, CLASSES)}
    step, arguments = run.program.repeated_step()
    text = step.trace(*arguments).lower().compile().as_text()
    gathered = [line for line in text.splitlines() if " all-gather" in line and f"[{ROWS},1,{CLASSES}]" in line]
    assert not gathered


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smc", "dlb", "sam"])
def test_a_run_that_is_resumed_has_the_same_bits(name, tmp_path):
    experiment = recipe(LEARNINGS[name])
    loop.train(experiment, workdir=tmp_path / "whole")
    # The weight of soft labels follows the steps of the whole run: a run is cut, and not made shorter.
    stopped = bound(experiment, None)
    with Checkpointer(tmp_path / "whole" / "checkpoints", experiment.checkpoints, stopped.identity()) as checkpoints:
        state, _ = stopped.restore(checkpoints, 4)
        wanted, _ = stopped.restore(checkpoints, 8)
    _, found = train(stopped, state, 4)
    for field in ("params", "variables", "optimizer"):
        jax.tree.map(
            np.testing.assert_array_equal, *(jax.tree.map(np.asarray, getattr(s, field)) for s in (found, wanted))
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*microbatch")
def test_parts_of_a_batch_keep_the_soft_labels_of_their_own_examples():
    run = bound(recipe(Smc(), gradients=Gradients(microbatch=3)))  # 8 examples in parts of 2
    state = run.program.init()
    batch = next(run.program.task.train_batches(run.data, run.mesh, 0))
    model = run.program.model.merge(*(jax.tree.map(jnp.asarray, x) for x in (state.params, state.variables)))
    wanted = [model(jnp.asarray(batch["ahead1_images"][i : i + 2]), "training") for i in range(0, ROWS, 2)]
    _, state = train(run, state, 1)
    np.testing.assert_allclose(state.variables["soft_labels"][:, 0], np.concatenate(wanted), atol=1e-5)


@pytest.mark.slow
def test_the_means_that_evaluation_reads_are_those_of_the_teacher():
    run = bound(recipe(Smc()))
    state = run.program.init()
    batch = next(run.program.task.train_batches(run.data, run.mesh, 0))
    model = run.program.model.merge(*(jax.tree.map(jnp.asarray, x) for x in (state.params, state.variables)))
    before = np.asarray(model.norms[0].mean[...])
    x = model.convolutions[0](jnp.asarray(batch["ahead1_images"]) - 0.2)
    wanted = 0.9 * before + 0.1 * np.asarray(x).mean((0, 1, 2))
    _, state = train(run, state, 1)
    np.testing.assert_allclose(state.variables["norms/0/mean"], wanted, atol=1e-6)


@pytest.mark.slow
def test_the_weight_of_soft_labels_begins_anew_in_a_phase():
    """Whose schedules begin at its first step: there soft labels weigh nothing."""
    run = bound(recipe(Smc()))
    _, state = train(run, run.program.init(), 4)
    batch = next(run.program.task.train_batches(run.data, run.mesh, 4 * ROWS))

    def loss_of(program):
        copy = jax.tree.map(jnp.copy, state)  # steps take the state that they are given
        return float(program.train_step(copy, convert.to_device(batch, program))[1])

    later = loss_of(dataclasses.replace(run.program, schedules_from=4))
    assert later == loss_of(bound(recipe(Smc(alpha=0.0))).program) != loss_of(run.program)


@pytest.mark.slow
def test_a_report_shows_pictures_with_their_classes(tmp_path):
    summary = loop.train(recipe(CrossEntropy()), workdir=tmp_path)
    (picture,) = [one for one in evaluation.read_pictures(tmp_path) if one.split == "test"]
    assert picture.svg.count("<image") == 12
    assert picture.svg.count(", not<") == round(12 * (1 - summary["test_accuracy"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Smc(channels=1), "channels must be at least 2"),
        (lambda: Smc(alpha=1.5), r"alpha must be in \[0, 1\]"),
        (lambda: Smc(temperature=0.0), "temperature must be above 0; got 0"),
        (lambda: Dlb(alpha=-1.0), "alpha must be at least 0"),
        (lambda: Sam(radius=0.0), "radius must be above 0"),
        (lambda: CrossEntropy(smoothing=1.0), r"smoothing must be in \[0, 1\)"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_soft_labels_need_to_know_the_size_of_a_batch():
    schema = dataclasses.replace(Blots().schema(), batch_size=None)
    task = CnnConfig(widths=(4,), learning=Smc()).task(schema)
    with pytest.raises(UserError, match="batch_size of the ImageSchema"):
        task.init(nnx.Rngs(0), FLOAT32)
