"""Modules of towers on the hosts of their features (`tables.exchange.route=towers`): the steps of one device.

A host, an index of `replica`, looks up the features of its own towers for the examples of all hosts, runs their modules
on them, and sends on what these return. Gradients of a module are summed over the devices of its host: a mean over them
would be wrong by exactly their number, which Adam hides. So steps are those of SGD, and a first step is its gradient.
"""

import functools
import itertools

import jax
import numpy as np
import pyarrow as pa
import pytest
import small_run
from covering import covering

from scalejax import optim
from scalejax.data import Categorical
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import FactorizationMachine, FeatureCross, LinearCompression
from scalejax.models.recsys.towers import DcnTower, DlrmTower, TowersConfig
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.config import Sgd
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.towers import Partition
from scalejax.train.experiment import Precision
from scalejax.train.runs.run import Run

FEATURES = tuple(
    Categorical(name=f"c{i}", rows=13 + 10 * i, **({"length": None, "capacity": 3} if i in (2, 7) else {}))
    for i in range(11)
)
"""Two have any number of ids, up to three in the mean."""
TOWERS = {
    2: (("c3", "c0", "c7", "c8", "c9"), ("c4", "c1", "c2", "c5", "c6", "c10")),
    4: (("c3", "c0"), ("c7", "c8", "c9", "c4"), ("c1",), ("c2", "c5", "c6", "c10")),
    8: (("c3", "c0"), ("c7",), ("c8", "c9"), ("c4",), ("c1",), ("c2",), ("c5", "c6"), ("c10",)),
}
"""Unequal."""
N = 4
MODULES = {
    "none": (),
    "DLRM": (DlrmTower(dim=2, each=1, mixed=2),),
    "DCN": (DcnTower(dim=4, cross_layers=2),),
    "linear": (LinearCompression(outputs=2),),
    "FM": (FactorizationMachine(outputs=2, rank=2, hidden=(6,)),),
}
BASES = {
    "DLRM": DlrmConfig(dim=N, bottom_hidden=(6,), top_hidden=(7,)),
    "DCNv2": DcnV2Config(dim=N, bottom_hidden=(6,), deep_hidden=(7,)),
    "Wukong": WukongConfig(
        dim=2, feature_vectors=2, fm_outputs=3, lcb_outputs=3, rank=2, fmb_hidden=(5,), head_hidden=(4,),
        bottom_hidden=(4,),
    ),
    "DHEN": DhenConfig(
        dim=N, layers=(EnsembleLayer(modules=(FeatureCross(outputs=3),)),), head_hidden=(4,), bottom_hidden=(4,)
    ),
}  # fmt: skip
STRATEGIES = {
    "implicit": Fsdp(sharding="NO_SHARD"),
    "implicit FULL_SHARD": Fsdp(replicate_below=0),
    "explicit": Fsdp(sharding="NO_SHARD", form="explicit"),
    "explicit FULL_SHARD": Fsdp(form="explicit", replicate_below=0),
    "explicit HYBRID_SHARD": Fsdp(sharding="HYBRID_SHARD", form="explicit", replicate_below=0),
    "ddp": Ddp(bucket_bytes=512),
}
OPTIONS = {
    "nothing": {},
    "parts": {"gradients__microbatch": 4},
    "clip": {"gradients__clip": 0.01},
    "ids ahead": {"tables__pipeline": "ids"},
    "stale": {"tables__pipeline": "stale"},
    "mean": {"model__base__pooling": "mean"},
}
HOSTS = ((2, 2), (2, 4), (4, 4), (8, 8))
"""Indices of `replica`, and towers."""
RATE = 0.5


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    rng = np.random.default_rng(3)
    more = {}
    for f in FEATURES:
        counts = rng.integers(0, 4, small_run.ROWS) if f.length is None else np.ones(small_run.ROWS, int)
        ids = rng.integers(f.rows, size=counts.sum()).astype(np.int32)
        more[f.name] = ids if f.length else pa.array(np.split(ids, np.cumsum(counts)[:-1]))
    return small_run.write(tmp_path_factory.mktemp("rows") / "rows.parquet", more)


def over_towers(rows, count, modules="DLRM", base="DLRM", **changes):
    model = TowersConfig(base=BASES[base], towers=Partition(towers=TOWERS[count]), modules=MODULES[modules])
    whole = {
        "model": model,
        "data__categorical": FEATURES,
        "data__group": "c0",
        "precision": Precision(params="float64", compute="float64"),
        "tables__dtype": "float64",
        "tables__optimizer": Sgd(learning_rate=RATE),
        "tables__exchange__route": "towers",
        "optimizer": optim.Sgd(learning_rate=optim.Constant(value=RATE)),
    }
    return small_run.experiment(rows, **{**whole, **changes})


def trained(experiment, mesh, devices, steps):
    """(losses, what is stored at first, after the first step and after the last, the state)."""
    run = Run.bind(experiment, experiment.data.build(), make_mesh(mesh, jax.devices()[:devices]))
    state, host = run.begin()
    losses, stored = [], []

    def keep(state):
        whole = run.to_stored(state)
        stored.append({part: jax.tree.map(np.asarray, whole[part]) for part in ("params", "tables")})

    keep(state)
    with run.feed(host, steps) as feed:
        for step in range(steps):
            feed.take()
            state, loss = feed.step(state)
            losses.append(float(loss))
            if step in (0, steps - 1):
                keep(state)
    return losses, stored, state


@functools.cache
def on_one_device(rows, count, modules, base, option):
    options = {name: value for name, value in OPTIONS[option].items() if name != "gradients__microbatch"}
    return trained(over_towers(rows, count, modules, base, **options), MeshShape(), 1, 3)[:2]


def gradient(stored, part):
    before, after = ({**s["params"]} if part == "params" else s["tables"] for s in stored[:2])
    return jax.tree.map(lambda a, b: (a - b) / RATE, before, after)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13), found, expected)


def compare(rows, hosts, count, modules, base, strategy, option):
    expected, stored = on_one_device(rows, count, modules, base, option)
    experiment = over_towers(rows, count, modules, base, strategy=STRATEGIES[strategy], **OPTIONS[option])
    losses, found, state = trained(experiment, MeshShape(replica=hosts, fsdp=8 // hosts), 8, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    close(found[0], stored[0])
    for part in ("params", "tables"):
        close(gradient(found, part), gradient(stored, part))
    close(found[-1], stored[-1])
    changes = {path: np.abs(g).max() for path, g in gradient(stored, "params").items()}
    assert all(change > 1e-4 for change in changes.values()), changes  # a mean over devices would not go unnoticed
    return state


CASES = [
    (hosts, modules, "DLRM", strategy, "nothing")
    for hosts, modules, strategy in itertools.product(HOSTS, MODULES, ("implicit", "explicit"))
]
DEFAULT = [
    ((2, 4), "DLRM", "DLRM", "implicit", "parts"),
    ((4, 4), "FM", "DCNv2", "explicit FULL_SHARD", "mean"),
    ((8, 8), "DCN", "Wukong", "ddp", "nothing"),
]
COVERING = covering(list(itertools.product(HOSTS, MODULES, BASES, STRATEGIES, OPTIONS)))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("hosts", "modules", "base", "strategy", "option"),
    [
        case if case in DEFAULT else pytest.param(*case, marks=pytest.mark.slow)
        for case in dict.fromkeys([*DEFAULT, *CASES, *COVERING])
    ],
)
def test_towers_on_their_hosts_train_as_all_on_one_device(rows, hosts, modules, base, strategy, option):
    compare(rows, *hosts, modules, base, strategy, option)
