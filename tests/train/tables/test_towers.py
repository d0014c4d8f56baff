"""A model of towers, one an index of `replica`: whole steps on eight devices equal one device that holds all towers.

As in disaggregated multi-tower training: rows are looked up, each tower reads the rows of its own features alone, on
its own host, and what the towers found is put together for every example. Weights of a tower are parameters that lie
apart (`Task.apart`): neither gathered nor summed over `replica`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run
from changes import changed
from covering import covering
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax import optim
from scalejax.errors import UserError
from scalejax.models.recsys.task import CtrTask, pooled_table
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.experiment import Checkpoints, Precision
from scalejax.train.runs.run import Run

DIM, WIDTH, TOWERS = 8, 12, 2
MESH = MeshShape(replica=TOWERS, fsdp=4)
FEATURES = (("shop", "hour"), ("item", "hour"))
"""Of each tower."""


class Towers(nnx.Module):
    """Two layers a tower over the rows of its features, and a head over what all towers found and the numbers."""

    def __init__(self, numbers, rngs, dtypes):
        def normal(*shape):
            return 0.3 * jax.random.normal(rngs.params(), shape, dtypes.params)

        inputs = DIM * len(FEATURES[0])
        self.first = nnx.Param(normal(TOWERS, inputs, WIDTH), logical_axes=("towers", "input", "hidden"))
        self.second = nnx.Param(normal(TOWERS, WIDTH, WIDTH), logical_axes=("towers", "hidden", "hidden"))
        self.head = nnx.Param(normal(TOWERS * WIDTH + numbers, 1), logical_axes=("input", None))

    def __call__(self, embedded, dense, *, key=None):
        del key
        each = [jnp.concatenate([embedded[name] for name in names], axis=1) for names in FEATURES]
        x = jnp.stack(each, axis=1).astype(self.first.dtype)  # B T F
        apart = "replica" in jax.sharding.get_abstract_mesh().manual_axes
        if apart:  # the examples of all hosts, of the features of this host's tower
            x = jax.lax.all_to_all(x, "replica", split_axis=1, concat_axis=0, tiled=True)
        x = jnp.tanh(jnp.einsum("btf,tfh->bth", x, self.first[...]))
        x = jnp.tanh(jnp.einsum("bth,thg->btg", x, self.second[...]))
        if apart:
            x = jax.lax.all_to_all(x, "replica", split_axis=0, concat_axis=1, tiled=True)
        x = x.reshape(x.shape[0], TOWERS * WIDTH)
        return jnp.concatenate([x, dense.astype(x.dtype)], axis=1) @ self.head[...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Its config."""

    def tables(self, schema):
        return tuple(pooled_table(feature, DIM) for feature in schema.categorical)

    def build(self, schema, rngs, dtypes):
        return Towers(len(schema.dense), rngs, dtypes)

    def task(self, schema):
        return TowersTask(model=self, schema=schema)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowersTask(CtrTask):
    """The task of a click model, with weights of towers on their own hosts."""

    @property
    def apart(self):
        return {"first": ("replica",), "second": ("replica",)}


STRATEGIES = {
    **{s: Fsdp(sharding=s, form="explicit") for s in ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD")},
    "local FULL_SHARD": Fsdp(form="explicit", accumulate="local"),
    "ddp": Ddp(bucket_bytes=512),
}
IN_HOSTS = ShardingPlan(
    tables=(
        TablePlan(table="item", kind="table_row_wise", ranks=(4, 5, 6, 7)),
        TablePlan(table="shop", kind="table_row_wise", ranks=(0, 1, 2, 3)),
    )
)
PLANS = {"rows everywhere": ShardingPlan(), "rows in the host of the tower": IN_HOSTS}
OPTIONS = {
    "nothing": {},
    "clip": {"gradients__clip": 0.05},
    "averages": {"averages": (optim.Average(decay=0.5),)},
    "scaled": {"gradients__loss_scaling": LossScaling(initial=2.0**20, interval=2)},
    "towers frozen": {"trainable": "head"},
    "host memory": {"placement__offload": "optimizer and parameters"},
}
CASES = covering(list(itertools.product(STRATEGIES, PLANS, (1, 2), OPTIONS)), columns=[(1, 2)])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet")


def towers(rows, **changes):
    wide = {"precision": Precision(params="float64", compute="float64"), "tables__dtype": "float64"}
    whole = {"model": TowersConfig(), "placement__mesh": MESH, "strategy": Fsdp(form="explicit")}
    return small_run.experiment(rows, **{**whole, **wide, **changes})


def trained(experiment, mesh, devices, steps=4):
    run = Run.bind(experiment, experiment.data.build(), make_mesh(mesh, jax.devices()[:devices]))
    state, host = run.begin()
    losses = []
    with run.feed(host, steps) as feed:
        for _ in range(steps):
            feed.take()
            state, loss = feed.step(state)
            losses.append(float(loss))
    stored = run.to_stored(state)
    return losses, {name: jax.tree.map(np.asarray, stored[name]) for name in stored if name != "key"}, state


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    for part in ("params", "tables", "optimizer", *(["averages"] if "averages" in expected[1] else [])):
        pairs = found[1][part], expected[1][part]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), *pairs)


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("strategy", "plan", "parts", "option"), CASES)
def test_a_tower_an_index_of_replica_trains_as_all_on_one_device(rows, strategy, plan, parts, option):
    experiment = towers(rows, **OPTIONS[option])
    expected = trained(experiment, MeshShape(), 1)
    own = changed(
        experiment, strategy=STRATEGIES[strategy], tables__sharding=PLANS[plan], gradients__microbatch=8 // parts
    )
    found = trained(own, MESH, 8)
    assert_same(found, expected)
    for name in ("first", "second"):
        p = found[2].params[name]
        on_device = p.sharding.with_memory_kind("device")
        assert on_device.is_equivalent_to(NamedSharding(make_mesh(MESH), P("replica")), p.ndim)
        assert p.addressable_shards[0].data.shape[0] == 1  # one tower a device
        assert (expected[1]["params"][name][0] != expected[1]["params"][name][1]).any()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_a_checkpoint_of_towers_is_scored_on_one_device_and_goes_on_to_the_same_bits(rows, tmp_path):
    experiment = towers(rows, steps=4, checkpoints=Checkpoints(every=2), evaluation__every=0)
    whole = loop.train(experiment, workdir=tmp_path / "whole")
    loop.train(dataclasses.replace(experiment, steps=2), workdir=tmp_path / "parts")
    parts = loop.train(experiment, workdir=tmp_path / "parts", resume="must")
    assert parts["test_logloss"] == whole["test_logloss"]
    alone = changed(experiment, placement__mesh=None)
    scored = loop.evaluate(alone, workdir=tmp_path / "whole", split="test")
    assert scored["test_logloss"] == pytest.approx(whole["test_logloss"], rel=1e-6)


def test_towers_ask_for_the_explicit_form(rows):
    experiment = towers(rows, strategy=Fsdp(), precision=Precision(), tables__dtype=None)
    with pytest.raises(UserError, match=r"keeps first, second apart, which needs strategy.form='explicit'"):
        Run.bind(experiment, experiment.data.build(), make_mesh(MESH))
