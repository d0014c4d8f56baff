"""torch-pruning finds the hidden units of a DLRM in its graph, and chooses the same ones of them."""

import pytest

pytest.importorskip("torch", reason="torch is not installed; benchmarks/peers.sh installs it")
pytest.importorskip("torch_pruning", reason="torch-pruning is not installed; benchmarks/peers.sh installs it")

import jax
import numpy as np
import optax
import torch
import torch_pruning as pruning
from flax import nnx

from scalejax import nn
from scalejax.bench.cases import dlrm_step
from scalejax.bench.peers import torch_training
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.surgery import units
from scalejax.surgery.alternation import narrowed
from scalejax.train.state import ModelShape

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

SCHEMA = Schema(
    categorical=tuple(Categorical(name=name, rows=50) for name in "abcd"), dense=("x", "y", "z"), labels=("label",)
)
CONFIG = DlrmConfig(dim=8, bottom_hidden=(24,), top_hidden=(48, 32))


def both():
    """Our model and theirs with equal weights, and a batch."""
    rng = np.random.default_rng(0)
    shape = ModelShape.of(nnx.eval_shape(lambda: CONFIG.build(SCHEMA, nnx.Rngs(0), nn.FLOAT32)))
    params = {path: rng.normal(size=x.shape).astype(np.float32) / 4 for path, x in shape.params.items()}
    theirs = dlrm_step.torch_module(CONFIG, SCHEMA)
    torch_training.set_parameters(theirs, torch_training.from_jax(params))
    embedded = rng.normal(size=(64, 4, 8)).astype(np.float32)
    dense, labels = rng.normal(size=(64, 3)).astype(np.float32), rng.integers(2, size=64).astype(np.float32)
    return shape, params, theirs, (embedded, dense, labels)


def logits(shape, params, batch):
    embedded, dense, _ = batch
    return shape.merge(params)({name: embedded[:, n] for n, name in enumerate("abcd")}, dense)[:, 0]


def groups(theirs, batch):
    """By the names of our hidden layers: what torch-pruning removes together with all of their units."""
    tensors = tuple(torch.from_numpy(x) for x in batch[:2])
    graph = pruning.DependencyGraph().build_dependency(theirs, example_inputs=tensors)
    found = {}
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            group = graph.get_pruning_group(module, pruning.prune_linear_out_channels, list(range(module.out_features)))
            found[name.replace(".", "/")] = group
    return graph, found


SCORES = {
    "norm": pruning.importance.GroupMagnitudeImportance(p=2, group_reduction="prod", normalizer=None),
    # It calls the squares of first-order terms a Hessian, whose diagonal they stand for.
    "taylor": pruning.importance.GroupHessianImportance(group_reduction="sum", normalizer=None, bias=True),
}


@pytest.mark.parametrize("score", SCORES)
def test_chooses_the_same_units(score):
    shape, params, theirs, batch = both()
    loss = torch.nn.functional.binary_cross_entropy_with_logits
    loss(theirs(*map(torch.from_numpy, batch[:2])), torch.from_numpy(batch[2])).backward()
    SCORES["taylor"].accumulate_grad(theirs)
    slopes = jax.grad(lambda p: optax.sigmoid_binary_cross_entropy(logits(shape, p, batch), batch[2]).mean())(params)
    own = {
        "norm": lambda layer: units.norm_scores(params, layer) ** 2,
        "taylor": lambda layer: units.taylor_scores(params, {p: np.square(x) for p, x in slopes.items()}, layer),
    }[score]
    _, found = groups(theirs, batch)
    layers = units.hidden_layers(params)
    assert {layer.name for layer in layers} == {"bottom/layers/0", "top/layers/0", "top/layers/1"}
    for layer in layers:
        scores = SCORES[score](found[layer.name]).numpy()
        np.testing.assert_allclose(own(layer), scores, rtol=1e-4, atol=1e-7)
        for count in (4, layer.width // 2):
            np.testing.assert_array_equal(
                units.best(own(layer), count), np.sort(np.argsort(-scores, kind="stable")[:count])
            )


def test_what_it_removes_with_a_unit_is_what_we_cut():
    _, params, theirs, batch = both()
    graph, _ = groups(theirs, batch)
    half = narrowed(CONFIG, 0.5)
    kept = {
        layer.name: units.best(units.norm_scores(params, layer), layer.width // 2)
        for layer in units.hidden_layers(params)
    }
    for name, mine in kept.items():
        module = theirs.get_submodule(name.replace("/", "."))
        gone = sorted(set(range(module.out_features)) - set(mine.tolist()))
        graph.get_pruning_group(module, pruning.prune_linear_out_channels, gone).prune()
    narrow = units.cut(params, kept)
    for name, array in torch_training.from_jax(narrow).items():
        np.testing.assert_array_equal(dict(theirs.named_parameters())[name].detach().numpy(), array, err_msg=name)
    small = ModelShape.of(nnx.eval_shape(lambda: half.build(SCHEMA, nnx.Rngs(0), nn.FLOAT32)))
    with torch.no_grad():
        wanted = theirs(*map(torch.from_numpy, batch[:2])).numpy()
    np.testing.assert_allclose(logits(small, narrow, batch), wanted, rtol=1e-4, atol=1e-5)
