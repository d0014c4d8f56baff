"""Tower modules, their gradients and the rows of their tables are those of TorchRec's EmbeddingTowerCollection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torchrec", reason="torchrec is not installed; benchmarks/peers.sh installs it")

import torch
from embedding_cases import device_features, numpy_stack, numpy_unstack, random_logical
from flax import nnx
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection

from scalejax import nn
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.towers import DlrmTower, TowersConfig
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import Sgd
from scalejax.parallel.embedding.stored import torchrec
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.towers import Partition
from scalejax.train.state import ModelShape

# The peer warns of what it and torch will do without.
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

BATCH, RATE, WIDTH = 24, 0.25, 8
FEATURES = {"seen": 110, "liked": 90, "topic": 50, "day": 7, "hour": 24}
TOWERS = (("seen", "day", "hour"), ("topic", "liked"))
MODEL = TowersConfig(
    base=DlrmConfig(dim=WIDTH, bottom_hidden=(8,), top_hidden=(8,)),
    towers=Partition(towers=TOWERS),
    modules=(DlrmTower(dim=4, each=2, mixed=3),),
)


class Interaction(torch.nn.Module):
    """A linear map of all features of a tower, and one of each of them."""

    def __init__(self, features, params, tower):
        super().__init__()
        self.features = features
        self.mixed = torch.nn.Linear(len(features) * WIDTH, 3 * 4)
        self.each = torch.nn.Linear(WIDTH, 2 * 4)
        for name, linear in (("mixed", self.mixed), ("each", self.each)):
            kernel = params[f"modules/0/{name}/kernel"][tower][: linear.in_features]
            linear.weight.data.copy_(torch.from_numpy(kernel.T.copy()))
            linear.bias.data.copy_(torch.from_numpy(params[f"modules/0/{name}/bias"][tower].copy()))

    def forward(self, embedded):
        x = torch.stack([embedded[name] for name in self.features], dim=1)  # B F N
        return torch.cat([self.mixed(x.flatten(1)), self.each(x).flatten(1)], dim=1)


def given():
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, 5, (len(FEATURES), BATCH))
    values = np.concatenate(
        [rng.integers(rows, size=own.sum()) for own, rows in zip(lengths, FEATURES.values(), strict=True)]
    )
    return KeyedJaggedTensor.from_lengths_sync(
        keys=list(FEATURES), values=torch.from_numpy(values), lengths=torch.from_numpy(lengths.reshape(-1))
    )


def test_outputs_gradients_and_rows_after_a_step_agree():
    configs = {
        name: EmbeddingBagConfig(name=f"of {name}", embedding_dim=WIDTH, num_embeddings=rows, feature_names=[name])
        for name, rows in FEATURES.items()
    }
    schema = Schema(
        categorical=tuple(Categorical(name=n, rows=r, length=None, max_length=4) for n, r in FEATURES.items()),
        dense=("x",),
    )
    model = MODEL.build(schema, nnx.Rngs(0), nn.Dtypes(jnp.float32, jnp.float32))
    shape = ModelShape.of(model)
    params = {path: np.asarray(x) for path, x in shape.split(model).items()}
    mesh = meshes.make_mesh(MeshShape(replica=2), jax.devices()[:8])
    on = EmbeddingCollection(tables=torchrec.tables(list(configs.values()), Sgd(learning_rate=RATE)), mesh=mesh)
    logical, batch = random_logical(on), given()

    towers = []
    for t, names in enumerate(TOWERS):
        bags = EmbeddingBagCollection(tables=[configs[name] for name in names])
        for name in names:
            bags.embedding_bags[f"of {name}"].weight.data.copy_(torch.from_numpy(logical[f"of {name}"]["rows"]))
        towers.append(EmbeddingTower(bags, Interaction(names, params, t)))
    theirs = EmbeddingTowerCollection(towers)(batch)
    slopes = np.random.default_rng(2).normal(size=theirs.shape).astype(np.float32)
    theirs.backward(torch.from_numpy(slopes))

    def left(params, embedded):
        """float32[B, numbers that leave the towers], tower by tower."""
        own = shape.merge(params)
        x = own.interact(*own.gather(embedded))
        return jnp.concatenate([x[place] for _, place in own.places], axis=1)

    @jax.jit
    def step(params, state, features):
        embedded, routing = on.lookup(state, features)
        out, back = jax.vjp(left, params, embedded)
        of_params, of_embedded = back(jnp.asarray(slopes))
        return out, of_params, on.update(state, routing, of_embedded)

    features = device_features(on, KeyedJagged.from_torchrec(batch), BATCH, schema=schema)
    out, grads, state = step(params, numpy_stack(on, logical), features)
    np.testing.assert_allclose(out, theirs.detach().numpy(), rtol=1e-5, atol=1e-5)
    after = numpy_unstack(on, state)
    for t, tower in enumerate(towers):
        for name in ("mixed", "each"):
            linear, found = getattr(tower.interaction, name), grads[f"modules/0/{name}/kernel"][t]
            np.testing.assert_allclose(found[: linear.in_features].T, linear.weight.grad.numpy(), rtol=1e-4, atol=1e-4)
            assert not found[linear.in_features :].any()
        for name, bag in tower.embedding.embedding_bags.items():
            expected = logical[name]["rows"] - RATE * bag.weight.grad.numpy()
            np.testing.assert_allclose(after[name]["rows"], expected, rtol=1e-5, atol=1e-5)
            assert abs(expected - logical[name]["rows"]).max() > 0.1
