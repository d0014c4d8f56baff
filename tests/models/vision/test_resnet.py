"""ResNet: published sizes, the network in NumPy, what BatchNorm remembers, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from scalejax import configs, nn
from scalejax.data.images.schema import ImageSchema
from scalejax.errors import UserError
from scalejax.models.vision import resnet
from scalejax.models.vision.inputs import standardized
from scalejax.models.vision.resnet import ResNetConfig
from scalejax.nn import counts
from scalejax.parallel.mesh import make_mesh
from scalejax.train.runs import binding


def schema(side, classes, channels=3):
    return ImageSchema(
        height=side,
        width=side,
        channels=channels,
        mean=(120.0, 110.0, 100.0)[:channels],
        std=(60.0, 50.0, 70.0)[:channels],
        classes=tuple(str(c) for c in range(classes)),
    )


CIFAR, IMAGENET = schema(32, 10), schema(224, 1000)
SMALL = {
    "basic": ResNetConfig(stem="cifar", block="basic", depths=(1, 2), widths=(4, 6), shortcut="padding"),
    "projected": ResNetConfig(stem="cifar", block="basic", depths=(1, 1), widths=(4, 6)),
    "bottleneck": ResNetConfig(stem="imagenet", block="bottleneck", depths=(2, 1), widths=(3, 4)),
}


def parameters(config, schema):
    return counts.parameters(counts.abstract(config.build, schema))


def multiply_adds(config, schema):
    """Of one picture forward: a step has these three times, of two FLOPs each."""
    return config.task(schema).work({"images": (1, *schema.shape)}).flops / 6


@pytest.mark.default_cases("resnet20*", "resnet110*")
@pytest.mark.parametrize(
    ("size", "published"), [("resnet20", 0.27), ("resnet32", 0.46), ("resnet56", 0.85), ("resnet110", 1.7)]
)
def test_small_nets_have_the_millions_of_parameters_of_table_6(size, published):
    assert round(parameters(resnet.SIZES[size], CIFAR) / 1e6, 1 if size == "resnet110" else 2) == published


@pytest.mark.slow
@pytest.mark.parametrize(("size", "count", "billions"), [("resnet18", 11_689_512, 1.8), ("resnet50", 25_557_032, 4.1)])
def test_nets_for_imagenet_have_the_published_parameters_and_multiply_adds(size, count, billions):
    config = resnet.SIZES[size]
    assert parameters(config, IMAGENET) == count
    assert round(multiply_adds(config, IMAGENET) / 1e9, 1) == billions


def test_multiply_adds_are_those_of_filters_at_their_places():
    config = SMALL["projected"]
    at_8, at_4 = 9 * 3 * 4 + 2 * 9 * 4 * 4, 9 * 4 * 6 + 9 * 6 * 6 + 4 * 6
    assert multiply_adds(config, schema(8, 5)) == 64 * at_8 + 16 * at_4 + 6 * 5


def literal_conv(x, conv):
    filters = np.asarray(conv.kernel[...], np.float64)
    k, stride = len(filters), conv.stride
    padded = np.pad(x, ((0, 0), (k // 2, k // 2), (k // 2, k // 2), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (k, k), axis=(1, 2))[:, ::stride, ::stride]
    return np.einsum("bhwcij,ijcd->bhwd", windows, filters)


def literal(model, images):
    """Logits in NumPy, with the running means."""

    def conv_norm(x, layer):
        norm = layer.norm
        scale, bias, mean, variance = (
            np.asarray(p[...], np.float64) for p in (norm.scale, norm.bias, norm.mean, norm.variance)
        )
        return (literal_conv(x, layer.conv) - mean) / np.sqrt(variance + 1e-5) * scale + bias

    def relu(x):
        return np.maximum(x, 0)

    x = (np.asarray(images, np.float64) - model.schema.mean) / model.schema.std
    x = relu(conv_norm(x, model.stem))
    if model.config.stem == "imagenet":
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-np.inf)
        x = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::2, ::2].max((-2, -1))
    for stage, blocks in enumerate(model.stages):
        for number, block in enumerate(blocks):
            *inner, last = block.convs
            y = x
            for layer in inner:
                y = relu(conv_norm(y, layer))
            y = conv_norm(y, last)
            if block.shortcut is not None:
                x = conv_norm(x, block.shortcut)
            elif stage and not number:
                x = np.concatenate([x[:, ::2, ::2], np.zeros((*y.shape[:3], y.shape[3] - x.shape[3]))], 3)
            x = relu(y + x)
    return x.mean((1, 2)) @ np.asarray(model.head.kernel[...], np.float64) + np.asarray(model.head.bias[...])


def remembering(config, schema, dtypes=nn.FLOAT32):
    """A model whose norms are not as they begin."""
    model = config.build(schema, nnx.Rngs(0), dtypes)
    rng = np.random.default_rng(1)
    for _, norm in nnx.iter_modules(model):
        if isinstance(norm, nn.BatchNorm):
            for variable in (norm.scale, norm.bias, norm.mean, norm.variance):
                variable[...] = jnp.asarray(rng.uniform(0.5, 1.5, variable.shape), variable[...].dtype)
    return model


def pictures(schema, count=3):
    return np.random.default_rng(2).integers(0, 256, (count, *schema.shape), np.uint8)


@nnx.jit(static_argnums=2)
def call(model, images, purpose):
    return model(images, purpose)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_is_the_network_in_numpy(name, x64):
    side = 9  # which strides of 2 do not divide
    known = schema(side, 5)
    model = remembering(SMALL[name], known, nn.Dtypes(jnp.float64, jnp.float64))
    images = pictures(known)
    found = call(model, jnp.asarray(images), "evaluation")
    assert found.dtype == jnp.float64
    np.testing.assert_allclose(found, literal(model, images), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_logits_are_wide_where_products_are_narrow():
    known = schema(8, 5)
    model = remembering(SMALL["basic"], known, nn.Dtypes(compute=jnp.bfloat16))
    found = call(model, jnp.asarray(pictures(known)), "training")
    assert found.dtype == jnp.float32
    assert np.isfinite(found).all()


@pytest.mark.slow
def test_statistics_are_those_of_the_purpose():
    known = schema(8, 5)
    model = SMALL["basic"].build(known, nnx.Rngs(0), nn.FLOAT32)
    x = jnp.asarray(pictures(known, 8))
    at_first = jax.tree.map(np.asarray, nnx.state(model, nnx.BatchStat))
    call(model, x, "evaluation")
    for a, b in zip(jax.tree.leaves(at_first), jax.tree.leaves(nnx.state(model, nnx.BatchStat)), strict=True):
        np.testing.assert_array_equal(a, b)
    in_training = call(model, x, "training")
    mean = np.asarray(model.stem.norm.mean[...])
    call(model, x, "statistics")
    np.testing.assert_allclose(mean, 0.1 * np.asarray(model.stem.norm.mean[...]), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(call(model, x, "evaluation"), in_training, rtol=1e-3, atol=1e-5)


def test_starts_as_the_code_of_smc_has_it():
    model = resnet.SIZES["resnet20"].build(schema(32, 100), nnx.Rngs(0), nn.FLOAT32)
    assert np.std(model.head.kernel[...]) == pytest.approx(0.01, rel=0.05)
    filters = model.stages[2][1].convs[0].conv.kernel[...]
    assert np.std(filters) == pytest.approx((2 / (9 * 64)) ** 0.5, rel=0.05)


def test_stored_pixels_are_standardized_by_the_schema():
    known = schema(4, 2)
    x = pictures(known)
    wanted = (x - np.array(known.mean)) / np.array(known.std)
    for images in (x, x.astype(np.float32)):
        np.testing.assert_allclose(standardized(jnp.asarray(images), known, nn.FLOAT32), wanted, rtol=1e-5, atol=1e-6)
    assert standardized(jnp.asarray(x), known, nn.Dtypes(compute=jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stem": "mnist"}, "stem must be cifar or imagenet; got 'mnist'"),
        ({"block": "wide"}, "block must be basic or bottleneck; got 'wide'"),
        ({"shortcut": "none"}, "shortcut must be projection or padding; got 'none'"),
        ({"depths": (1,)}, "depths and widths must have a positive number a stage each"),
        ({"widths": (4, 0)}, r"got \(1, 2\) and \(4, 0\)"),
    ],
)
def test_refuses_what_is_no_net(change, message):
    given = {"stem": "cifar", "block": "basic", "depths": (1, 2), "widths": (4, 6)}
    with pytest.raises(UserError, match=message):
        ResNetConfig(**(given | change))


def test_refuses_one_class():
    with pytest.raises(UserError, match="a classifier needs two classes or more; the labels have only"):
        resnet.cifar(8).task(dataclasses.replace(CIFAR, classes=("only",)))


@pytest.mark.default_cases("resnet-smoke")
@pytest.mark.parametrize("recipe", ["resnet-smoke", "recist-smoke"])
def test_a_batch_of_one_is_refused_in_training(recipe):
    run = configs.load(recipe, ["data.batch_size=1"])
    program = binding.bind(run, run.data.schema(), make_mesh(None, jax.devices()[:1]), abstract=True)
    with pytest.raises(UserError, match=r"BatchNorm in training normalises over the examples of a batch, and"):
        jax.eval_shape(program.train_step, program.abstract_state(), program.abstract_batch())


def test_refuses_a_number_of_layers_that_no_small_net_has():
    assert resnet.cifar(29, "bottleneck").depths == (3, 3, 3)
    with pytest.raises(UserError, match=r"6 n \+ 2 layers; got 21. Take 20"):
        resnet.cifar(21)
    with pytest.raises(UserError, match=r"9 n \+ 2 layers; got 21. Take 20"):
        resnet.cifar(21, "bottleneck")
