"""Pairwise shape priors: cosine attention by its definition and by scikit-learn, and runs with templates."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from changes import changed
from flax import nnx
from segmentation_cases import SCHEMA, drawn, experiment

from scalejax import optim
from scalejax.data.images.augment import Augment
from scalejax.data.images.dataset import ImageDataSet
from scalejax.errors import UserError
from scalejax.models.vision import pairwise_unet
from scalejax.models.vision.inputs import standardized
from scalejax.models.vision.pairwise_unet import (
    PairwiseUNetConfig,
    Templates,
    dense_attention,
    prototype_attention,
    prototypes,
)
from scalejax.models.vision.segmentation import SegmentationSettings, averaged
from scalejax.models.vision.unet import UNetConfig
from scalejax.nn import counts
from scalejax.numerics import flops
from scalejax.numerics.dtypes import Dtypes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches import convert
from scalejax.train.experiment import Precision
from scalejax.train.runs import binding
from scalejax.train.runs.run import Run
from scalejax.train.task import Batch, whole

UNET = UNetConfig(widths=(3, 4, 6), segmentation=SegmentationSettings(deep_supervision=1))
SMALL = PairwiseUNetConfig(unet=UNET)
STRATEGIES = {"implicit": Fsdp(), "explicit": Fsdp(form="explicit"), "ddp": Ddp()}


def random_features(seed=0, batch=2, pixels=7, others=5, channels=4, classes=3):
    """F, G and soft masks, of which some are empty at some pixels."""
    rng = np.random.default_rng(seed)
    f, g = rng.normal(size=(batch, pixels, channels)), rng.normal(size=(batch, others, channels))
    s = rng.random((batch, others, classes)) * (rng.random((batch, others, classes)) < 0.7)
    s[:, 0] = 0.5  # no class is absent
    return tuple(x.astype(np.float32) for x in (f, g, s))


def literal_cosine(a, b):
    return (a @ b) / np.sqrt((a @ a + 1e-6) * (b @ b + 1e-6))


def literal(f, g, s, kind, reduce):
    """A of one example, pixel by pixel in float64."""
    f, g, s = (x.astype(np.float64) for x in (f, g, s))
    found = np.empty((len(f), s.shape[1]))
    for i, k in np.ndindex(found.shape):
        if kind == "prototype":
            mean = sum(s[j, k] * g[j] for j in range(len(g))) / sum(s[j, k] for j in range(len(g)))
            found[i, k] = literal_cosine(f[i], mean)
        else:
            products = [s[j, k] * literal_cosine(f[i], g[j]) for j in range(len(g)) if s[j, k] > 0]
            found[i, k] = max(products) if reduce == "max" else sum(products) / s[:, k].sum()
    return found


def attended(f, g, s, kind, reduce="max"):
    f, g, s = map(jnp.asarray, (f, g, s))
    if kind == "prototype":
        return np.asarray(prototype_attention(f, prototypes(g, s), s.any(1)))
    return np.asarray(dense_attention(f, g, s, reduce))


KINDS = [("prototype", "max"), ("dense", "max"), ("dense", "mean")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reduce"), KINDS)
def test_attention_is_the_literal_sum_and_bounded(kind, reduce):
    f, g, s = random_features()
    found = attended(f, g, s, kind, reduce)
    wanted = np.stack([literal(*one, kind, reduce) for one in zip(f, g, s, strict=True)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)  # eps of 1e-6 in norms of about 2
    assert np.abs(found).max() <= 1


def test_attention_is_the_cosine_of_scikit_learn():
    pairwise = pytest.importorskip("sklearn.metrics.pairwise")
    f, g, s = random_features(1)
    hard = (s > 0).astype(np.float32)
    for example in range(len(f)):
        means = np.stack([g[example][hard[example, :, k] > 0].mean(0) for k in range(s.shape[2])])
        wanted = pairwise.cosine_similarity(f[example], means)
        np.testing.assert_allclose(attended(f, g, hard, "prototype")[example], wanted, atol=1e-5)
        each = pairwise.cosine_similarity(f[example], g[example])
        of_class = [each[:, hard[example, :, k] > 0] for k in range(s.shape[2])]
        for reduce, by in (("max", np.max), ("mean", np.mean)):
            wanted = np.stack([by(x, axis=1) for x in of_class], -1)
            np.testing.assert_allclose(attended(f, g, hard, "dense", reduce)[example], wanted, atol=1e-5)


@pytest.mark.parametrize(("kind", "reduce"), KINDS)
def test_attention_does_not_see_the_scale_of_features(kind, reduce):
    f, g, s = random_features(2)
    wanted = attended(f, g, s, kind, reduce)
    np.testing.assert_allclose(attended(3 * f, g, s, kind, reduce), wanted, atol=1e-5)
    np.testing.assert_allclose(attended(f, 5 * g, s, kind, reduce), wanted, atol=1e-5)
    assert np.abs(attended(-f, g, s, kind, reduce) - wanted).max() > 0.1


@pytest.mark.parametrize(("kind", "reduce"), KINDS)
def test_the_order_of_template_pixels_means_nothing_and_that_of_classes_is_kept(kind, reduce):
    f, g, s = random_features(3)
    wanted = attended(f, g, s, kind, reduce)
    order = np.array([3, 0, 4, 1, 2])
    np.testing.assert_allclose(attended(f, g[:, order], s[:, order], kind, reduce), wanted, atol=1e-6)
    assert np.abs(attended(f, g[:, order], s, kind, reduce) - wanted).max() > 0.01
    classes = np.array([2, 0, 1])
    np.testing.assert_allclose(attended(f, g, s[..., classes], kind, reduce), wanted[..., classes], atol=1e-6)


def test_a_prototype_is_the_literal_masked_mean_and_that_of_one_pixel_the_pixel():
    _, g, s = random_features(4)
    found = np.asarray(prototypes(jnp.asarray(g), jnp.asarray(s)))
    for n, k in itertools.product(range(2), range(3)):
        wanted = sum(s[n, j, k] * g[n, j].astype(np.float64) for j in range(5)) / s[n, :, k].astype(np.float64).sum()
        np.testing.assert_allclose(found[n, k], wanted, rtol=1e-5, atol=1e-6)
    one = np.zeros_like(s)
    one[:, 2, :] = 1
    np.testing.assert_array_equal(prototypes(jnp.asarray(g), jnp.asarray(one)), g[:, [2, 2, 2]])


def test_dense_and_prototype_are_alike_where_a_class_has_one_pixel_and_only_there():
    f, g, s = random_features(5)
    one = np.zeros_like(s)
    one[:, 3, 0] = one[:, 1, 1] = one[:, 1, 2] = 1
    for reduce in ("max", "mean"):
        np.testing.assert_allclose(attended(f, g, one, "dense", reduce), attended(f, g, one, "prototype"), atol=1e-6)
        assert np.abs(attended(f, g, s, "dense", reduce) - attended(f, g, s, "prototype")).max() > 0.01


def test_a_class_attends_to_its_own_pixels_where_target_and_template_are_one():
    rng = np.random.default_rng(6)
    labels = rng.integers(0, 4, (3, 40))
    centres = rng.normal(size=(4, 6))
    f = (centres[labels] + rng.normal(0, 0.7, (3, 40, 6))).astype(np.float32)
    s = (labels[..., None] == np.arange(1, 4)).astype(np.float32)
    for kind, reduce in KINDS:
        found = attended(f, f, s, kind, reduce)
        for k in range(3):
            inside = s[..., k] > 0
            assert found[inside][:, k].mean() > found[~inside][:, k].mean() + 0.1


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reduce"), KINDS)
@pytest.mark.parametrize("empty", ["mask", "all masks", "features", "template"])
def test_absent_classes_and_features_of_nothing_have_finite_attention_and_gradients(kind, reduce, empty):
    f, g, s = random_features(7)
    if empty == "features":
        f[:] = 0
    elif empty == "template":
        g[:] = 0
    else:
        s[..., slice(1, 2) if empty == "mask" else slice(None)] = 0

    def total(f, g):
        if kind == "dense":
            return dense_attention(f, g, jnp.asarray(s), reduce).sum()
        return prototype_attention(f, prototypes(g, jnp.asarray(s)), jnp.asarray(s).any(1)).sum()

    found = attended(f, g, s, kind, reduce)
    assert np.isfinite(found).all()
    gradients = jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(f), jnp.asarray(g))
    assert all(np.abs(x).max() < 1e5 for x in gradients)
    if empty == "mask":
        assert (found[..., 1] == pairwise_unet.ABSENT).all()
        one = np.asarray(
            jax.grad(
                lambda g: (
                    prototype_attention(jnp.asarray(f), prototypes(g, jnp.asarray(s)), jnp.asarray(s).any(1))[..., 1]
                ).sum()
            )(jnp.asarray(g))
        )
        assert (one == 0).all()
    if empty == "all masks":
        assert all((np.asarray(x) == 0).all() for x in gradients)


# The model.


def built(config=SMALL, schema=SCHEMA, seed=0):
    return config.build(schema, nnx.Rngs(seed), Dtypes())


@nnx.jit
def call(model, *given):
    return model(*given)


def pictures(count, seed):
    found = drawn(count, seed)
    return jnp.asarray(found["images"]), jnp.asarray(found["masks"])


@pytest.mark.slow
def test_fusion_is_the_convolution_of_what_is_concatenated():
    config = dataclasses.replace(SMALL, attention=("prototype", "dense", "prototype"))
    model = built(config)
    (x, _), (y, masks) = pictures(2, 0), pictures(2, 1)
    template = model.read(y, masks)
    features = model.encoder(model.stem((x - 0.25) / 0.5, "evaluation"), "evaluation")
    inside = np.eye(3, dtype=np.float32)[np.asarray(masks)][..., 1:]
    regions = np.concatenate([(y - 0.25) / 0.5, (y - 0.25) / 0.5 * inside], -1)
    others = model.encoder(model.template_stem(jnp.asarray(regions), "evaluation"), "evaluation")
    for level, (f, g) in enumerate(zip(features, others, strict=True)):
        s = np.asarray(averaged(jnp.asarray(inside), 2**level)).reshape(2, -1, 2)
        f, g = (np.asarray(v).reshape(2, -1, v.shape[-1]) for v in (f, g))
        scores = np.stack([literal(*one, config.levels[level], "max") for one in zip(f, g, s, strict=True)])
        means = np.einsum("bjk,bjc->bkc", s, g) / s.sum(1)[..., None]
        likely = np.exp(scores / 0.1) / np.exp(scores / 0.1).sum(-1, keepdims=True)
        everything = np.concatenate([f, scores, likely @ means], -1)
        fusion = model.fusions[level]
        wanted = everything @ np.asarray(fusion.kernel[...]) + np.asarray(fusion.bias[...])
        found = np.asarray(model._attended(level, features[level], template)).reshape(wanted.shape)
        np.testing.assert_allclose(found, wanted, atol=2e-3)  # cosines of small features, times 10 in the softmax
        np.testing.assert_allclose(model.attention(level, features[level], template), scores, atol=2e-4)


@pytest.mark.slow
def test_masks_are_averaged_and_keep_what_is_thin():
    model = built(dataclasses.replace(SMALL, attention=("dense",) * 3))
    y, masks = pictures(1, 1)
    masks = jnp.zeros_like(masks).at[0, 5, 3].set(1)  # one pixel, which no stride of 2 or 4 meets
    template = model.read(y, masks)
    for level, (_, s) in enumerate(template.pixels):
        assert float(s[..., 0].max()) == 0.25**level
        assert float(s[..., 0].sum()) == 0.25**level
    assert template.present.tolist() == [[True, False]]


CHANGES = {
    "prototype": {"attention": ("prototype",) * 3},
    "dense": {"attention": ("dense",) * 3},
    "mean": {"dense": "mean"},
    "two encoders": {"share": "none"},
    "masks": {"reads": "masks"},
    "concatenation": {"comparison": "concatenation"},
    "early": {"comparison": "early"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prototype", "dense", "early"])
def test_classes_in_another_order_give_masks_in_another_order(name):
    config = dataclasses.replace(SMALL, **CHANGES[name])
    schema = dataclasses.replace(SCHEMA, classes=("background", "one", "two", "three"))
    model, other = built(config, schema), built(config, schema)
    order = np.array([3, 1, 2])  # class k of `other` is class order[k - 1] of `model`
    new_of_old = np.array([0, 2, 3, 1])
    for path, leaf in nnx.to_flat_state(nnx.state(other, nnx.Param)):
        value = np.array(leaf[...])
        if path[0] == "decoder" and path[1] == "heads":
            value = value[..., [0, *order]]
        early = path[:3] == ("stem", "conv", "kernel") and config.comparison == "early"
        if path[:3] == ("template_stem", "conv", "kernel") or early:
            first = 2 if early else 1  # pictures
            value = value[:, :, [*range(first), *(first + order - 1)]]
        if path[0] == "fusions" and path[-1] == "kernel" and config.comparison == "attention":
            width = value.shape[1]
            value = value[[*range(width), *(width + order - 1), *range(width + 3, 2 * width + 3)]]
        leaf[...] = jnp.asarray(value)
    (x, _), (y, masks) = pictures(2, 0), pictures(2, 1)
    masks = masks + (jnp.arange(16).reshape(1, 16, 1) > 12).astype(jnp.int32) * (masks == 0) * 3
    wanted = model(x, y, masks)[0]
    found = other(x, y, jnp.asarray(new_of_old)[masks])[0]
    np.testing.assert_allclose(found, wanted[..., [0, *order]], atol=2e-4)
    assert np.abs(np.asarray(model(x, y, jnp.asarray(new_of_old)[masks])[0] - wanted)).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prototype", "mean", "two encoders", "masks", "early"])
def test_a_template_that_is_read_once_serves_all_pictures(name):
    model = built(dataclasses.replace(SMALL, **CHANGES[name]))
    (x, _), (y, masks) = pictures(3, 0), pictures(1, 1)
    cached = model.compare(x, model.read(y, masks))
    repeated = model(x, *(z.repeat(3, 0) for z in (y, masks)))
    for one, two in zip(cached, repeated, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-4)


@pytest.mark.slow
def test_a_picture_as_its_own_template_attends_to_its_classes():
    """Behind the stems, which differ; the encoder, here untrained, is the one that both sides share."""
    wider = dataclasses.replace(SMALL, unet=dataclasses.replace(UNET, widths=(8, 12, 16)))
    model, (images, masks) = built(wider), pictures(6, 0)

    @nnx.jit
    def attentions(model):
        """(share of each class, attention) of each level and kind."""
        features = model.encoder(model.stem(standardized(images, SCHEMA, Dtypes()), "evaluation"), "evaluation")
        found, present = [], jnp.ones((6, 2), bool)
        for x in features:
            f = x.reshape(6, -1, x.shape[-1])
            inside = averaged(jax.nn.one_hot(masks, 3)[..., 1:], SCHEMA.height // x.shape[1]).reshape(6, -1, 2)
            found.append((inside, prototype_attention(f, prototypes(f, inside), present)))
            found.append((inside, dense_attention(f, f, inside, "mean")))
        return found

    found = attentions(model)
    assert len(found) == 6
    for inside, attention in found:
        for k in range(2):
            share = np.asarray(inside[..., k])
            own, other = (np.average(attention[..., k], weights=w) for w in (share, 1 - share))
            assert own > other


def test_what_is_shared_is_all_but_the_stem():
    schema = dataclasses.replace(SCHEMA, classes=("background", "a", "b"))
    size = {
        name: counts.parameters(counts.abstract(config.build, schema))
        for name, config in (
            ("plain", dataclasses.replace(SMALL, comparison="none")),
            ("early", dataclasses.replace(SMALL, comparison="early")),
            ("shared", SMALL),
            ("apart", dataclasses.replace(SMALL, share="none")),
            ("off", dataclasses.replace(SMALL, comparison="concatenation")),
        )
    }
    encoder = 9 * (3 * 3 + 3 * 4 + 4 * 4 + 4 * 6 + 6 * 6) + 2 * (3 + 4 + 4 + 6 + 6)
    assert size["apart"] - size["shared"] == encoder
    fusions = sum((2 * width + 2) * width + width for width in UNET.widths)
    assert size["shared"] - size["plain"] == 9 * 3 * 3 + 2 * 3 + fusions
    assert size["shared"] - size["off"] == sum(2 * width for width in UNET.widths)
    assert size["early"] - size["plain"] == 9 * 3 * 3
    assert size["plain"] == counts.parameters(counts.abstract(UNET.build, schema))


@pytest.mark.slow
def test_comparison_none_is_the_unet():
    model, plain = built(dataclasses.replace(SMALL, comparison="none")), built(UNET)
    state = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    for path, leaf in nnx.to_flat_state(nnx.state(plain, nnx.Param)):
        leaf[...] = state[path][...]
    x, _ = pictures(2, 0)
    for one, two in zip(model(x), plain(x), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"comparison": "off"}, "comparison must be one of attention, concatenation, early, none; got 'off'"),
        ({"share": "stem"}, "share must be one of all_but_stem, none"),
        ({"attention": ("dense",)}, "for each of the 3 levels"),
        ({"attention": ("dense", "none", "dense")}, "attention must be one of prototype, dense; got 'none'"),
        ({"temperature": 0}, "temperature must be above 0; got 0"),
    ],
)
def test_what_cannot_be_is_refused(wrong, says):
    with pytest.raises(UserError, match=says):
        dataclasses.replace(SMALL, **wrong)


def test_no_templates_to_choose_from_are_refused():
    with pytest.raises(UserError, match="alike must be at least 1; got 0"):
        Templates(alike=0)


# Runs.


def bound(config, devices=None, **changes):
    run = changed(experiment(config), **changes)
    return Run.bind(run, run.data.build(), make_mesh(MeshShape(), jax.devices()[:devices]))


@pytest.mark.slow
def test_it_learns_and_a_run_in_two_halves_has_the_same_bits(tmp_path):
    config = PairwiseUNetConfig(unet=UNetConfig(widths=(8, 16)))
    run = experiment(config, steps=40)
    summary = loop.train(run, workdir=tmp_path / "whole")
    assert summary["test_dice"] > 0.85
    loop.train(changed(run, steps=20), workdir=tmp_path / "halves")
    again = loop.train(run, workdir=tmp_path / "halves", resume="must")
    for name in ("test_dice", "test_loss", "test_hd95"):
        assert again[name] == summary[name]


def learnt(config, devices, strategy):
    """(Losses, parameters and running means) after three steps in float64."""
    plain = optim.Sgd(learning_rate=optim.Constant(value=1e-2))
    run = bound(config, devices, strategy=strategy, precision=Precision(params="float64"), optimizer=plain)
    state, losses = run.program.init(), []
    for _, batch in zip(range(3), run.program.task.train_batches(run.data, run.mesh, 0), strict=False):
        state, loss = run.program.train_step(state, convert.to_device(batch, run.program))
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, {**state.params, **state.variables})


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("comparison", "form"),
    [("attention", "explicit"), ("concatenation", "ddp")],
)
def test_eight_devices_learn_what_one_does(comparison, form):
    config = dataclasses.replace(SMALL, comparison=comparison, unet=dataclasses.replace(UNET, norm="batch"))
    found, wanted = learnt(config, 8, STRATEGIES[form]), learnt(config, 1, Fsdp())
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-11), found[1], wanted[1])


@pytest.mark.slow
@pytest.mark.parametrize("at_test", ["one", "nearest", "ensemble"])
def test_evaluations_take_the_templates_that_are_asked_for(at_test):
    config = dataclasses.replace(SMALL, templates=Templates(at_test=at_test, count=3))
    run = bound(config, 1)
    task, model = run.program.task, built(config)
    batch = next(task.eval_batches(run.data, run.mesh, "test"))
    train, weights = run.data.splits["train"], batch["template_weights"]
    fields = {name: jnp.asarray(batch[name]) for name in task.fields()}
    whole_batch = Batch(fields, constants=run.program.constants, purpose="evaluation")
    found = nnx.jit(lambda model, batch: task.segment(model, batch))(model, whole_batch)
    rows = {"one": np.zeros(8, int), "nearest": weights.argmax(1), "ensemble": None}[at_test]
    if at_test == "one":
        of_classes = [len(np.unique(mask)) for mask in train["masks"]]
        first = np.flatnonzero(np.array(of_classes) == max(of_classes))
        sizes = (train["masks"][first] > 0).sum((1, 2))
        np.testing.assert_array_equal(run.program.constants["images"][0], train["images"][first[sizes.argmax()]])
    else:
        np.testing.assert_array_equal(run.program.constants["images"], train["images"][[0, 32, 63]])
    images, masks = (run.program.constants[name] for name in ("images", "masks"))
    if rows is not None:
        assert (weights.argmax(1) == rows).all()
        wanted = call(model, fields["images"], images[rows], masks[rows])
        for one, two in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-4)
        return
    beside = nnx.jit(lambda model, x, y, masks: model.compare(x, model.read(y, masks)))
    each = [beside(model, fields["images"], images[m : m + 1], masks[m : m + 1]) for m in range(3)]
    for level in range(2):
        wanted = np.mean([jax.nn.softmax(member[level]) for member in each], 0)
        np.testing.assert_allclose(jax.nn.softmax(found[level]), wanted, atol=1e-5)


@pytest.mark.slow
def test_gradients_are_finite_where_the_template_lacks_a_class_or_all():
    task = SMALL.task(SCHEMA)
    batch = {name: jnp.asarray(x) for name, x in drawn(4, 0).items()} | {"weights": jnp.ones(4)}
    template = drawn(4, 1)
    template["masks"][0][template["masks"][0] == 2] = 0
    template["masks"][1] = 0
    batch |= {f"template_{name}": jnp.asarray(template[name]) for name in ("images", "masks")}
    for attention in ("prototype", "dense"):
        model = built(dataclasses.replace(SMALL, attention=(attention,) * 3))

        def loss(model):
            found = task.loss(model, Batch(batch), keys=None, gather=whole)
            return found.sum / found.weight

        value, gradients = nnx.jit(nnx.value_and_grad(loss))(model)
        assert np.isfinite(value)
        for leaf in jax.tree.leaves(gradients):
            assert np.isfinite(leaf).all()


@pytest.mark.slow
def test_a_plan_knows_its_step_from_the_schema_alone():
    run = experiment(SMALL)
    program = binding.bind(run, run.data.schema(), make_mesh(MeshShape()), abstract=True)
    _, loss = jax.eval_shape(program.train_step, program.abstract_state(), program.abstract_batch())
    assert loss.shape == ()
    shapes = {name: (8, *field.shape) for name, field in program.task.fields().items()}
    plain = dataclasses.replace(SMALL, comparison="none").task(SCHEMA).work(shapes).flops
    assert 1.2 * plain < program.task.work(shapes).flops < 2 * plain


def test_a_picture_beside_a_template_that_was_read_costs_little_more_than_in_a_unet():
    schema = dataclasses.replace(SCHEMA, height=256, width=256)
    one = jax.ShapeDtypeStruct((1, 256, 256, 1), jnp.float32), jax.ShapeDtypeStruct((1, 256, 256), jnp.int32)
    model = counts.abstract(PairwiseUNetConfig().build, schema)
    plain = counts.macs(counts.abstract(UNetConfig().build, schema), one[0])
    whole = counts.macs(model, one[0], *one)
    graph, state = nnx.split(model)
    read = jax.eval_shape(
        lambda state: nnx.merge(graph, state).read(*jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), one)), state
    )
    found = (
        flops.count(jax.make_jaxpr(lambda s, x, t: nnx.merge(graph, s).compare(x, t))(state, one[0], read)).total // 2
    )
    assert 1.0 < found / plain < 1.2
    assert 1.3 < whole / plain < 1.8


def test_a_target_that_could_only_be_its_own_template_is_refused():
    one = {name: x[:4] for name, x in drawn(4, 0).items()}  # four slices of a case
    data = ImageDataSet({"train": one, "validation": one}, batch_size=4, schema=SCHEMA, augment=Augment())
    task = SMALL.task(SCHEMA)
    with pytest.raises(UserError, match="All 4 training pictures are of subject 0, and a target must not be its own"):
        next(task.train_batches(data, None, 0))


def test_a_validation_picture_that_is_in_the_training_split_is_not_its_own_template():
    train = drawn(8, 0)
    copies = {name: x[:2] for name, x in train.items()}
    data = ImageDataSet({"train": train, "validation": copies}, batch_size=2, schema=SCHEMA, augment=Augment())
    for at_test in ("one", "nearest", "ensemble"):
        config = dataclasses.replace(SMALL, templates=Templates(at_test=at_test, count=8))
        weights = next(config.task(SCHEMA).eval_batches(data, None, "validation"))["template_weights"]
        subjects = config.task(SCHEMA)._candidates(data).subjects
        assert (weights[:, subjects == 0] == 0).all()
        np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
