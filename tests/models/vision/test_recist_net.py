"""RECIST-Net: its loss in NumPy, lesions out of perfect and of mirrored maps, devices, resume, what is refused."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import killed_run
import numpy as np
import pytest
from changes import changed
from flax import nnx

from scalejax import configs, nn, optim
from scalejax.data.images import recist
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.vision import keypoints, recist_net
from scalejax.models.vision.hourglass import STRIDE, HourglassConfig
from scalejax.models.vision.keypoints import Grouping
from scalejax.models.vision.recist_net import RecistNetConfig
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.experiment import Precision
from scalejax.train.runs.run import Run
from scalejax.train.task import Batch, whole

SIDE = 64
SCHEMA = ImageSchema(height=SIDE, width=SIDE, channels=1, mean=(30.0,), std=(20.0,))
TINY = HourglassConfig(stacks=2, widths=(4, 6), blocks=(1, 1), stem=4, features=4)
CONFIG = RecistNetConfig(backbone=TINY, head=4, objects=4, grouping=Grouping(peaks=12, boxes=20))


def crosses(*places, long=20.0, short=12.0, angle=0.3):
    """Ends of diameters about some points, float32[n, 4, 2]."""
    along, across = np.array([np.cos(angle), np.sin(angle)]), np.array([-np.sin(angle), np.cos(angle)])
    steps = np.stack([along * long, -along * long, across * short, -across * short]) / 2
    return (np.array(places, np.float32)[:, None] + steps).astype(np.float32)


drawn = jax.jit(keypoints.targets, static_argnums=(1, 2, 3))
found_in = jax.jit(recist_net.found_in, static_argnums=(0, 2, 3))


def maps_of(ends, height=SIDE, width=SIDE):
    """Maps [1, h, w, ...] that say of these lesions all there is to say, and Targets."""
    rows, columns = height // STRIDE, width // STRIDE
    wanted = jax.tree.map(np.asarray, drawn(jnp.asarray(ends[None]), rows, columns, STRIDE))
    p = np.clip(wanted.heat, 1e-6, 1 - 1e-6)
    offsets, regressed = np.zeros((1, rows, columns, 4, 2), np.float32), np.zeros((1, rows, columns, 4, 2), np.float32)
    for n, one in enumerate(ends):
        for k in range(4):
            x, y = wanted.cells[0, n, k]
            offsets[0, y, x, k] = wanted.extremes[0, n, k] / STRIDE - (x, y)
        x, y = wanted.cells[0, n, 4]
        regressed[0, y, x] = one / STRIDE - (x, y)
    heat = np.log(p / (1 - p)).astype(np.float32)
    flat = (1, rows, columns, 8)
    return {"heat": heat, "offsets": offsets.reshape(flat), "ends": regressed.reshape(flat)}


def read(maps, config=CONFIG, height=SIDE, width=SIDE):
    """What is found, best first, as NumPy arrays of the first picture; only scores above .5."""
    found = jax.tree.map(lambda x: np.asarray(x)[0], found_in(config, maps, height, width))
    best = np.argsort(-found.scores, kind="stable")
    best = best[found.scores[best] > 0.5]
    return jax.tree.map(lambda x: x[best], found)


def box(ends):
    return np.concatenate([ends.min(-2), ends.max(-2)], -1)


def same_crosses(found, true):
    """The largest distance between the ends of the diameters of crosses [4, 2], in whichever order ends are."""
    total = 0.0
    for k in (0, 2):
        a, b = found[k : k + 2], true[k : k + 2]
        total = max(total, min(abs(a - b).max(), abs(a - b[::-1]).max()))
    return total


@pytest.mark.slow
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("aggregation", [0.0, 0.1])
def test_perfect_maps_give_the_exact_points_whatever_the_order(order, aggregation):
    ends = crosses((16, 14), (47.3, 18.6), (30, 48.9))[order]
    config = changed(CONFIG, grouping__aggregation=aggregation)
    found = read(maps_of(ends), config)
    assert len(found.scores) == 3
    for one in ends:
        n = abs(found.boxes - box(one)).max(-1).argmin()
        np.testing.assert_allclose(found.boxes[n], box(one), atol=1e-4)
        assert same_crosses(found.diameters[n], one) < 1e-4
        assert not found.regressed[n]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_perfect_maps_of_lesions_drawn_at_random_give_the_exact_points(seed):
    """Three of any angle and size, in quarters of their own; extremes of some coincide."""
    rng = np.random.default_rng(seed)
    ends = [
        crosses(
            middle + rng.uniform(-3, 3, 2),
            long=rng.uniform(14, 22),
            short=rng.uniform(6, 13),
            angle=rng.uniform(0, 3.1),
        )
        for middle in np.float32([[17, 17], [47, 17], [17, 47]])
    ]
    found = read(maps_of(np.concatenate(ends)))
    assert len(found.scores) == 3
    for (one,) in ends:
        n = abs(found.boxes - box(one)).max(-1).argmin()
        np.testing.assert_allclose(found.boxes[n], box(one), atol=1e-4)
        assert same_crosses(found.diameters[n], one) < 1e-3


def test_where_extremes_coincide_the_box_is_exact_and_the_short_diameter_is_the_regressed_one():
    oblique = crosses((32, 32), long=44, short=14, angle=0.8)
    outermost = np.asarray(keypoints.extremes(oblique[0]))
    assert len(np.unique(outermost, axis=0)) == 2
    found = read(maps_of(oblique))
    assert found.regressed.tolist() == [True]
    np.testing.assert_allclose(found.boxes[0], box(oblique[0]), atol=1e-4)
    assert same_crosses(found.diameters[0], oblique[0]) < 1e-4
    np.testing.assert_allclose(recist.lengths(found.diameters[0]), [44, 14], atol=1e-4)


def test_a_lesion_under_one_cell_is_found():
    tiny = crosses((33.9, 33.7), long=1.6, short=1.1)
    found = read(maps_of(tiny))
    assert len(found.scores) == 1
    np.testing.assert_allclose(found.boxes[0], box(tiny[0]), atol=1e-4)
    assert found.regressed.all()


def test_boxes_end_with_the_picture_which_may_be_no_square():
    """Pixels of 48 x 64 lie from -.5 to 63.5 across and to 47.5 down."""
    boxes = jnp.asarray([[[-9.0, -7.0, 20.0, 20.0], [40.0, 40.0, 90.0, 90.0], [50.0, 10.0, 60.0, 45.0]]])
    scores, ends = jnp.asarray([[0.9, 0.8, 0.7]]), jnp.zeros((1, 3, 4, 2))
    config = changed(CONFIG, padding=1.0, grouping__overlap=0.99, grouping__ghosts=None)
    told = jax.jit(lambda *found: recist_net._told(config, *found, height=48, width=64))
    found = told(boxes, scores, ends, jnp.zeros((1, 3), bool))
    wanted = [[-1.5, -1.5, 21, 21], [39, 39, 64.5, 48.5], [49, 9, 61, 46]]
    np.testing.assert_array_equal(found.boxes[0], wanted)


@pytest.mark.slow
def test_boxes_have_their_padding():
    ends = crosses((32, 32))
    found = read(maps_of(ends), changed(CONFIG, padding=5.0))
    np.testing.assert_allclose(found.boxes[0], box(ends[0]) + np.array([-5, -5, 5, 5]), atol=1e-4)


@pytest.mark.slow
def test_mirrored_maps_give_the_mirrored_lesions():
    """The middle of two cells is rounded down; with extremes in even columns alone there is nothing to round."""
    rng = np.random.default_rng(0)
    rows, columns = 12, 16
    heat = np.full((1, rows, columns, 5), -6.0, np.float32)
    heat[..., 4] = rng.normal(0, 2, (1, rows, columns))
    even = rng.uniform(-2, 3, (1, rows, columns // 2, 4)).astype(np.float32)
    heat[:, :, ::2, :4] = even
    offsets, ends = (rng.uniform(0, 1, (1, rows, columns, 4, 2)).astype(np.float32) for _ in range(2))
    offsets[..., :2, :], offsets[..., 2:, :] = offsets[..., :2, :] / 2, offsets[..., 2:, :] / 2 + 0.5  # no box is empty
    maps = {"heat": heat, "offsets": offsets, "ends": ends * 6 - 3}
    swapped = [0, 3, 2, 1]
    mirrored = {"heat": heat[:, :, ::-1][..., [*swapped, 4]], "offsets": offsets[:, :, ::-1, swapped].copy()}
    mirrored["ends"] = maps["ends"][:, :, ::-1] * np.float32([-1, 1])
    mirrored["offsets"][..., 0] *= -1
    flat = [{name: x.reshape(*x.shape[:3], -1) for name, x in of.items()} for of in (maps, mirrored)]
    config = changed(CONFIG, grouping__peaks=20, grouping__boxes=400, grouping__aggregation=0.1)
    one, other = (
        jax.tree.map(lambda x: np.asarray(x)[0], found_in(config, of, rows * STRIDE, columns * STRIDE)) for of in flat
    )
    # Column c becomes columns - 1 - c, and so x becomes (columns - 1) * STRIDE - x.
    real, also = one.scores > 0.05, other.scores > 0.05
    assert real.sum() == also.sum() > 10
    turned = (columns - 1) * STRIDE - one.boxes[real][:, [2, 1, 0, 3]]
    turned[:, [1, 3]] = one.boxes[real][:, [1, 3]]
    for wanted, score in zip(turned, one.scores[real], strict=True):
        near = abs(other.boxes[also] - wanted).max(-1) + abs(other.scores[also] - score)
        assert near.min() < 1e-3
    for n in np.flatnonzero(real):
        cross = one.diameters[n] * np.float32([-1, 1]) + np.float32([(columns - 1) * STRIDE, 0])
        alike = [
            same_crosses(other.diameters[m], cross)
            for m in np.flatnonzero(also)
            if other.regressed[m] == one.regressed[n] and abs(other.scores[m] - one.scores[n]) < 1e-3
        ]
        assert min(alike) < 1e-3


def literal_loss(maps, ends, weight):
    """The loss of one picture and one stack, object by object."""
    heat, cells = np.asarray(drawn(jnp.asarray(ends[None]), *maps["heat"].shape[:2], STRIDE).heat)[0], []
    p = np.clip(1 / (1 + np.exp(-maps["heat"])), 1e-4, 1 - 1e-4)
    each = np.where(heat == 1, (1 - p) ** 2 * np.log(p), (1 - heat) ** 4 * p**2 * np.log(1 - p))
    total = -each.sum()

    def smooth(x):
        return np.where(abs(x) < 1, x * x / 2, abs(x) - 0.5).sum()

    for one in ends[np.isfinite(ends).all((1, 2))]:
        x, y = one.T
        outermost = one[[y.argmin(), x.argmin(), y.argmax(), x.argmax()]]
        cells = np.clip(np.floor(outermost / STRIDE).astype(int), 0, np.array(maps["heat"].shape[1::-1]) - 1)
        for k, (cx, cy) in enumerate(cells):
            total += smooth(maps["offsets"][cy, cx, 2 * k : 2 * k + 2] - (outermost[k] / STRIDE - (cx, cy)))
        centre = np.array([(cells[1, 0] + cells[3, 0]) // 2, (cells[0, 1] + cells[2, 1]) // 2])
        said = maps["ends"][centre[1], centre[0]].reshape(4, 2)
        true = one / STRIDE - centre
        ways = [[a, b, c, d] for a, b in ((0, 1), (1, 0)) for c, d in ((2, 3), (3, 2))]
        ways += [[c, d, a, b] for a, b, c, d in ways]
        total += weight * min(smooth(said - true[way]) for way in ways)
    return total


def batch_of(ends, images=None, weights=None, purpose="training"):
    count = len(ends)
    fields = {
        "images": np.zeros((count, *SCHEMA.shape), np.uint8) if images is None else images,
        "ends": ends,
        "weights": np.ones(count, np.float32) if weights is None else weights,
    }
    return Batch(jax.tree.map(jnp.asarray, fields), purpose=purpose)


def padded(*pictures, objects=4):
    return recist.filled(list(pictures), objects, "objects")


class Fixed(nnx.Module):
    """A model whose maps are given."""

    def __init__(self, stacks):
        self.stacks = nnx.data(stacks)

    def __call__(self, images, purpose):
        return tuple(self.stacks)


@functools.partial(jax.jit, static_argnums=0)
def loss_of_maps(task, stacks, batch):
    return task.loss(Fixed(stacks), batch, keys=None, gather=whole)


def test_the_loss_equals_its_definition():
    rng = np.random.default_rng(0)
    ends = padded(crosses((16, 14), (47, 18)), crosses((30, 40), angle=0.8, long=30), np.zeros((0, 4, 2)))
    side = SIDE // STRIDE
    sizes = {"heat": 5, "offsets": 8, "ends": 8}
    stacks = [{name: rng.normal(0, 2, (3, side, side, n)) for name, n in sizes.items()} for _ in range(2)]
    with jax.enable_x64(True):
        task = CONFIG.task(SCHEMA)
        weights = np.array([1, 1, 0], np.float32)
        loss = loss_of_maps(task, stacks, batch_of(ends, weights=weights))
        wanted = [
            literal_loss({name: x[n] for name, x in maps.items()}, ends[n].astype(np.float64), 0.1)
            for maps in stacks
            for n in (0, 1)
        ]
        assert float(loss.sum) == pytest.approx(sum(wanted) / 2, rel=1e-10)
        assert float(loss.weight) == 3 == float(task.weight(batch_of(ends, weights=weights)))


def test_the_loss_counts_objects_and_a_picture_without_any_as_one():
    task = CONFIG.task(SCHEMA)
    one, none = crosses((16, 14), (47, 18), (30, 48)), np.zeros((0, 4, 2))
    assert float(task.weight(batch_of(padded(one, none)))) == 4
    assert float(task.weight(batch_of(padded(none, none)))) == 2


@pytest.mark.slow
def test_a_batch_without_a_lesion_has_finite_loss_and_gradients():
    task = changed(CONFIG, backbone__stacks=1).task(SCHEMA)
    model = task.init(nnx.Rngs(0), nn.FLOAT32)
    images = np.random.default_rng(0).integers(0, 99, (2, *SCHEMA.shape)).astype(np.uint8)
    batch = batch_of(padded(np.zeros((0, 4, 2)), np.zeros((0, 4, 2))), images)

    @nnx.jit
    @nnx.value_and_grad
    def value(model):
        loss = task.loss(model, batch, keys=None, gather=whole)
        return loss.sum / loss.weight

    loss, slopes = value(model)
    assert np.isfinite(loss)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_a_task_refuses_what_its_maps_do_not_have():
    with pytest.raises(UserError, match=r"model.grouping.peaks=300 must be from 1 to the 256 cells of a map of 16"):
        changed(CONFIG, grouping__peaks=300).task(SCHEMA)
    with pytest.raises(UserError, match=r"model.grouping.boxes=0"):
        changed(CONFIG, grouping__boxes=0).task(SCHEMA)
    with pytest.raises(UserError, match=r"cannot halve"):
        CONFIG.task(dataclasses.replace(SCHEMA, height=60))


@pytest.mark.slow
def test_work_is_counted_from_the_network():
    one, two = (CONFIG.task(SCHEMA).work({"images": (n, *SCHEMA.shape)}) for n in (1, 2))
    assert two.flops == 2 * one.flops
    # The stem alone: 7 x 7 filters of one channel to 4 at 32 x 32 places, 3 passes of 2 FLOPs.
    assert one.flops > 6 * 49 * 4 * 32 * 32


SMOKE = changed(configs.load("recist-smoke"), data__batch_size=8, model__grouping=CONFIG.grouping)


def run_of(experiment, devices):
    return Run.bind(experiment, experiment.data.build(), make_mesh(MeshShape(), jax.devices()[:devices]))


def trained(devices, strategy, read="key-points"):
    """(Losses, parameters and running means) of three steps in float64."""
    small = changed(SMOKE, model__backbone=dataclasses.replace(TINY, stacks=1), model__head=4, model__read=read)
    small = changed(small, optimizer=optim.Sgd(learning_rate=optim.Constant(value=1e-3)))
    run = run_of(changed(small, precision=Precision(params="float64"), strategy=strategy), devices)
    state, losses = run.program.init(), []
    batches = run.program.task.train_batches(run.data, run.mesh, 0)
    for _, batch in zip(range(3), batches, strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, {**state.params, **state.variables})


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_eight_devices_learn_what_one_does():
    """In the explicit form, where a sum over devices can be missing."""
    (losses, learnt), (wanted, of_one_device) = trained(8, Fsdp(form="explicit")), trained(1, Fsdp())
    np.testing.assert_allclose(losses, wanted, rtol=1e-11)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-10), learnt, of_one_device)


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_a_killed_run_goes_on_to_the_same_bits_and_shows_what_it_found(tmp_path):
    summary = loop.train(SMOKE, workdir=tmp_path / "whole")
    again = killed_run.train(SMOKE, tmp_path / "killed", at=5)
    for key in ("test_loss", "test_froc", "test_sensitivity_4", "test_lesions"):
        assert summary[key] == again[key], key
    assert summary["test_lesions"] == 29
    drawn = sorted((tmp_path / "whole" / "evaluation" / "pictures").glob("test-*.json"))
    assert [path.stem for path in drawn] == ["test-froc", "test-lesions"]
    assert json.loads(drawn[1].read_text())["svg"].count("<image") == 4


@pytest.mark.slow
@pytest.mark.parametrize("read", ["key-points", "centre-and-size"])
def test_it_learns_to_find_nuclei(read, tmp_path):
    """A tenth of the recipe: a box drawn at random hits next to nothing."""
    run = changed(configs.load("recist-nuclei"), steps=120, evaluation__every=120, checkpoints__every=120)
    run = changed(run, model__read=read, data__batch_size=8)  # one of each device of tests
    summary = loop.train(run, workdir=tmp_path)
    assert summary["test_sensitivity_8"] > 0.3


def test_a_centre_and_a_size_give_the_box():
    config = changed(CONFIG, read="centre-and-size")
    side = SIDE // STRIDE
    maps = {name: np.zeros((1, side, side, n), np.float32) for name, n in (("heat", 1), ("offsets", 2), ("size", 2))}
    maps["heat"] -= 6
    maps["heat"][0, 7, 9], maps["offsets"][0, 7, 9], maps["size"][0, 7, 9] = 3, (0.25, 0.5), (5, 3)
    found = read(maps, config)
    np.testing.assert_allclose(found.boxes, [[27, 24, 47, 36]], atol=1e-4)
    np.testing.assert_allclose(recist.lengths(found.diameters[0]), [20, 12], atol=1e-4)


def test_the_loss_of_centre_and_size_vanishes_where_the_maps_are_right():
    task = changed(CONFIG, read="centre-and-size").task(SCHEMA)
    ends = padded(crosses((16, 14), (47, 18)))
    wanted = drawn(jnp.asarray(ends), 16, 16, STRIDE)
    heat = np.asarray(wanted.heat[..., 4:])
    maps = {"heat": np.where(heat == 1, 20.0, np.where(heat > 0, -2.0, -20.0)).astype(np.float32)}
    maps |= {name: np.zeros((1, 16, 16, 2), np.float32) for name in ("offsets", "size")}
    for n in range(2):
        x, y = np.asarray(wanted.cells[0, n, 4])
        around = box(ends[0, n]) / STRIDE
        maps["offsets"][0, y, x] = (around[:2] + around[2:]) / 2 - (x, y)
        maps["size"][0, y, x] = around[2:] - around[:2]

    def loss(maps):
        return float(loss_of_maps(task, [maps], batch_of(ends)).sum)

    right = loss(maps)
    assert right < 0.5  # the slopes of bumps
    maps["size"] += 1
    assert loss(maps) == pytest.approx(right + 0.1 * 2 * 2 * 0.5, rel=1e-4)
