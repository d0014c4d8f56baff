"""Modules of towers on the hosts of their features (`tables.exchange.route=towers`): the steps of one device.

A host, an index of `replica`, looks up the features of its own towers for the examples of all hosts, runs their modules
on them, and sends on what these return. Gradients of a module are summed over the devices of its host: a mean over them
would be wrong by exactly their number, which Adam hides. So steps are those of SGD, and a first step is its gradient.
"""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pyarrow as pa
import pytest
import small_run
from changes import changed
from covering import covering

from scalejax import optim
from scalejax.data import Categorical
from scalejax.errors import UserError
from scalejax.models.recsys.dcnv2 import DcnV2Config
from scalejax.models.recsys.dhen import DhenConfig, EnsembleLayer
from scalejax.models.recsys.dlrm import DlrmConfig
from scalejax.models.recsys.interactions import FactorizationMachine, FeatureCross, LinearCompression
from scalejax.models.recsys.towers import DcnTower, DlrmTower, TowersConfig
from scalejax.models.recsys.wukong import WukongConfig
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures, Sgd
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.plan.sharding_plan import ShardingPlan, TablePlan
from scalejax.parallel.embedding.tiers import Tier
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.towers import Partition
from scalejax.plan import explain_sharding
from scalejax.train import loop
from scalejax.train.checkpoints.checkpoint import Checkpointer
from scalejax.train.experiment import Checkpoints, Precision
from scalejax.train.runs import binding
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
N = 8
MODULES = {
    "none": (),
    "DLRM": (DlrmTower(dim=4, each=1, mixed=2),),
    "DCN": (DcnTower(dim=4, cross_layers=2),),
    "linear": (LinearCompression(outputs=2),),
    "FM": (FactorizationMachine(outputs=2, rank=2, hidden=(6,)),),
    "FM and linear": (FactorizationMachine(outputs=2, rank=2, hidden=(6,)), LinearCompression(outputs=2)),
}
BASES = {
    "DLRM": DlrmConfig(dim=N, bottom_hidden=(6,), top_hidden=(7,)),
    "DCNv2": DcnV2Config(dim=N, bottom_hidden=(6,), deep_hidden=(7,)),
    "Wukong": WukongConfig(
        dim=N, fm_outputs=3, lcb_outputs=3, rank=2, fmb_hidden=(8,), head_hidden=(16,),
        bottom_hidden=(4,),
    ),
    "DHEN": DhenConfig(
        dim=N, layers=(EnsembleLayer(modules=(FeatureCross(outputs=3),)),), head_hidden=(4,), bottom_hidden=(4,)
    ),
}  # fmt: skip
STRATEGIES = {
    "implicit": Fsdp(sharding="NO_SHARD"),
    "implicit FULL_SHARD": Fsdp(replicate_below=0),
    "implicit SHARD_GRAD_OP": Fsdp(sharding="SHARD_GRAD_OP", replicate_below=0),
    "implicit HYBRID_SHARD": Fsdp(sharding="HYBRID_SHARD", replicate_below=0),
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
    "scaled": {"gradients__loss_scaling": LossScaling(initial=2.0**10, interval=2)},
    "averages": {"averages": (optim.Average(decay=0.5),)},
    "towers alone": {"trainable": "modules/.*"},
    "id maps": {
        "tables__id_maps": (MappedFeatures(features=("c10",), id_map=IdMapConfig(rows=257)),),
        "data__categorical": (*FEATURES[:-1], Categorical(name="c10", rows=None)),
    },
    "deltas": {"tables__full_every": 6},
    "tiers": {"tables__tiers": (Tier(features=("c9",), slots=64),)},
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


def arrays(run, state):
    stored = run.to_stored(state)
    return {part: jax.tree.map(np.asarray, stored[part]) for part in ("params", "tables")}


def trained(experiment, mesh, devices, steps):
    """(losses, what is stored at first, after the first step and after the last, the state)."""
    run = Run.bind(experiment, experiment.data.build(), make_mesh(mesh, jax.devices()[:devices]))
    state, host = run.begin()
    losses, stored = [], [arrays(run, state)]
    with run.feed(host, steps) as feed:
        for step in range(steps):
            feed.take()
            state, loss = feed.step(state)
            losses.append(float(loss))
            if step in (0, steps - 1):
                stored.append(arrays(run, state))
    return losses, stored, state


@functools.cache
def on_one_device(rows, count, modules, base, option):
    whole = "gradients__microbatch", "tables__tiers"  # one device takes a batch at once and holds every row
    options = {name: value for name, value in OPTIONS[option].items() if name not in whole}
    return trained(over_towers(rows, count, modules, base, **options), MeshShape(), 1, 3)[:2]


def gradient(stored, part):
    before, after = ({**s["params"]} if part == "params" else s["tables"] for s in stored[:2])
    return jax.tree.map(lambda a, b: (a - b) / RATE, before, after)


def close(found, expected):
    """To rounding of the largest number of each array: sums over examples nearly cancel in some."""

    def same(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-10 * np.abs(b).max(initial=0))

    jax.tree.map(same, found, expected)


def compare(rows, mesh, count, modules, base, strategy, option):
    expected, stored = on_one_device(rows, count, modules, base, option)
    experiment = over_towers(rows, count, modules, base, strategy=STRATEGIES[strategy], **OPTIONS[option])
    losses, found, _ = trained(experiment, mesh, 8, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    close(found[0], stored[0])
    for part in ("params", "tables"):
        close(gradient(found, part), gradient(stored, part))
    close(found[-1], stored[-1])
    changes = {path: np.abs(g).max() for path, g in gradient(stored, "params").items()}
    assert all(change > 1e-7 for path, change in changes.items() if path.startswith("modules")), changes


DEFAULT = ((2, 2), "linear", "DLRM", "explicit", "nothing")
COVERING = covering(
    [
        (*case, case[3].startswith("implicit"))
        for case in itertools.product(HOSTS, MODULES, BASES, STRATEGIES, OPTIONS)
        if case[1] != "none" or case[4] != "towers alone"
    ],
    columns=[(0, 5), (1, 5), (2, 5)],
)
"""Every strategy and option. Numbers of hosts, modules and bases meet both forms; sums over devices know no modules."""


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("hosts", "modules", "base", "strategy", "option"),
    [
        case if case == DEFAULT else pytest.param(*case, marks=pytest.mark.slow)
        for case in dict.fromkeys([DEFAULT, *(case[:5] for case in COVERING)])
    ],
)
def test_towers_on_their_hosts_train_as_all_on_one_device(rows, hosts, modules, base, strategy, option):
    compare(rows, MeshShape(replica=hosts[0], fsdp=8 // hosts[0]), hosts[1], modules, base, strategy, option)


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("explicit", MeshShape(replica=2, fsdp=1, expert=2, context=2)),
        ("implicit", MeshShape(replica=2, fsdp=2, tensor=2)),
    ],
    ids=["beside expert and context", "beside tensor"],
)
def test_axes_that_towers_do_not_know_are_devices_of_their_host(rows, strategy, mesh):
    compare(rows, mesh, 4, "DLRM", "DLRM", strategy, "nothing")


EQUAL = tuple(Categorical(name=f"c{i}", rows=64) for i in range(8))


def compiled(rows, hosts, form, module, width=16, sizes=None):
    """A step in float32 over towers, of equal size or these, its collectives and the bytes of a device's vectors."""
    features = iter(f.name for f in EQUAL)
    partition = tuple(tuple(itertools.islice(features, size)) for size in sizes or [8 // hosts] * hosts)
    base = DlrmConfig(dim=width, bottom_hidden=(6,), top_hidden=(7,))
    experiment = over_towers(
        rows,
        2,
        model=TowersConfig(base=base, towers=Partition(towers=partition), modules=module),
        data__categorical=EQUAL,
        precision=Precision(),
        tables__dtype=None,
        strategy=STRATEGIES[form],
    )
    mesh = make_mesh(MeshShape(replica=hosts, fsdp=8 // hosts))
    program = binding.bind(experiment, experiment.data.schema(), mesh)
    done = program.train_step.lower(program.abstract_state(), program.abstract_batch()).compile()
    return program, explain_sharding(done, mesh), experiment.data.batch_size // 8 * len(EQUAL) * width * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "hosts", "compression"),
    covering([*itertools.product(("implicit", "explicit"), (2, 4, 8), (1, 4, 16))], columns=[(0, 1), (1, 2)]),
)
def test_what_crosses_between_hosts_is_what_leaves_the_towers(rows, form, hosts, compression):
    """b W (T - 1) / T / c numbers each way, between one device of every host."""
    module = DlrmTower(dim=16 // compression)
    program, found, vectors = compiled(rows, hosts, form, (module,))
    assert program.task.model.compression == compression
    inside = 8 // hosts
    between = [c for c in found if "replica" in c.axes and c.kind == "all-to-all"]
    assert all({device // inside for device in group} == {*range(hosts)} for c in between for group in c.groups)
    assert all(len(group) == hosts for c in between for group in c.groups)
    ids = 8 * 8 * 4 * (2 if inside == 1 else 3)  # row, bag and, where a host has several, device of one id a feature
    assert sorted(c.bytes for c in between) == sorted([ids, *[vectors // compression] * 2])
    formula = vectors * (hosts - 1) // hosts // compression
    assert sorted(c.minimum_bytes for c in between) == sorted([ids * (hosts - 1) // hosts, formula, formula])
    # Gradients of a tower's parameters are summed within its host alone.
    own = sum(p.size for name, p in program.model.params.items() if name.startswith("modules"))
    sums = [c.bytes for c in found if c.axes == ("fsdp",) and c.kind == "all-reduce"]
    assert sums == ([own * 4 // hosts] if inside > 1 else [])
    assert {c.kind for c in found} == {"all-to-all", "all-reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(5, 3), (1, 4, 2, 1)], ids=str)
def test_smaller_towers_send_as_much_as_the_largest(rows, sizes):
    """b T (outputs of the largest) D numbers, not b W / c, which are as many for equal towers only."""
    hosts, inside = len(sizes), 8 // len(sizes)
    program, found, vectors = compiled(rows, hosts, "implicit", (DlrmTower(dim=8),), sizes=sizes)
    config = program.task.model
    features = hosts * max(sizes)  # as if every tower had
    ids = 8 * features * 4 * (2 if inside == 1 else 3)
    sent = vectors // 2 * features // 8
    assert config.sent_compression == vectors / sent < config.compression == 2
    between = [c.bytes for c in found if "replica" in c.axes and c.kind == "all-to-all"]
    assert sorted(between) == sorted([ids, sent, sent])


@pytest.mark.slow
@pytest.mark.parametrize("module", [m for m in MODULES if m != "none"])
def test_under_jit_a_device_computes_its_own_examples_alone(rows, module):
    modules = tuple(
        dataclasses.replace(m, dim=16) if isinstance(m, DlrmTower | DcnTower) else m for m in MODULES[module]
    )
    _, found, _ = compiled(rows, 2, "implicit", modules)
    assert {c.kind for c in found} == {"all-to-all", "all-reduce"}


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
def test_a_checkpoint_of_four_towers_on_eight_devices_goes_on_on_two_and_on_one(rows, tmp_path):
    experiment = over_towers(
        rows, 4, strategy=STRATEGIES["explicit FULL_SHARD"], steps=3, checkpoints=Checkpoints(every=2),
        evaluation__every=0, placement__mesh=MeshShape(replica=4, fsdp=2),
    )  # fmt: skip
    scores = loop.train(experiment, workdir=tmp_path)
    found = {}
    for devices, mesh in {8: MeshShape(replica=4, fsdp=2), 2: MeshShape(replica=2), 1: MeshShape()}.items():
        run = Run.bind(experiment, experiment.data.build(), make_mesh(mesh, jax.devices()[:devices]))
        assert (run.program.towers is None) == (devices == 1)
        with Checkpointer(tmp_path / "checkpoints", experiment.checkpoints, run.identity()) as checkpoints:
            state, host = run.restore(checkpoints, 2)
        opened = arrays(run, state)
        with run.feed(host, 3) as feed:
            feed.take()
            state, loss = feed.step(state)
        found[devices] = opened, arrays(run, state), float(loss)
        kernel = state.params["modules/0/each/kernel"]
        towers = max(1, 4 // mesh.resolve(devices)[0])
        assert {shard.data.shape[0] for shard in kernel.addressable_shards} == {towers}
    for devices in (2, 1):
        jax.tree.map(np.testing.assert_array_equal, found[devices][0], found[8][0])
        close(found[devices][1], found[8][1])
        assert found[devices][2] == pytest.approx(found[8][2], rel=1e-12)
    alone = loop.evaluate(changed(experiment, placement__mesh=None), workdir=tmp_path, split="test")
    assert alone["test_logloss"] == pytest.approx(scores["test_logloss"], rel=1e-6)


def bound(rows, count=4, mesh=None, **changes):
    experiment = over_towers(rows, count, precision=Precision(), tables__dtype=None, **changes)
    return binding.bind(experiment, experiment.data.schema(), make_mesh(mesh or MeshShape(replica=4, fsdp=2)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": MeshShape(replica=8, fsdp=1)}, r"got 4 towers and replica=8. Take replica=1 or 2 or 4 "),
        ({"count": 8, "model": BASES["DLRM"]}, r"route is 'towers', .* but DlrmConfig has none. Set --set .*two_level"),
        (
            {"tables__dedup": (DedupGroup(features=("c0", "c1"), rows_per_example=1.0),)},
            r"route is 'towers', .*; got tables.dedup",
        ),
        (
            {"tables__sharding": ShardingPlan(tables=(TablePlan(table="c3", kind="row_wise"),))},
            r"table 'c3' has rows on indices 0, 1, 2, 3 of .*, and feature 'c3' is in a tower of index 0; .*two_level",
        ),
        (
            {"tables__sharding": ShardingPlan(tables=(TablePlan(table="c7", kind="table_wise", ranks=(0,)),))},
            r"table 'c7' has rows on indices 0 of .*'c7' is in a tower of index 1; .* Leave the table out of",
        ),
        (
            {"tables__sharding": ShardingPlan(tables=(TablePlan(table="c7", kind="data_parallel"),))},
            r"table 'c7' has rows on indices 0, 1, 2, 3 of",
        ),
        ({"tables__sharding": ShardingPlan(replicas="copy")}, r"route='towers' crosses between hosts"),
    ],
)
def test_what_does_not_go_with_towers_on_hosts_is_refused(rows, changes, words):
    with pytest.raises(UserError, match=words):
        bound(rows, **changes)


def test_tables_that_a_plan_does_not_name_are_striped_in_the_host_of_their_tower(rows):
    plan = ShardingPlan(
        tables=(TablePlan(table="c7", kind="table_wise", ranks=(3,)), TablePlan(table="c1", kind="table_row_wise"))
    )
    program = bound(rows, tables__sharding=plan)
    ranks = {m.config.name: m.ranks for stack in program.collection.stacks for m in stack.members}
    assert ranks == {
        name: (3,) if name == "c7" else (2 * t, 2 * t + 1) for t, tower in enumerate(TOWERS[4]) for name in tower
    }
