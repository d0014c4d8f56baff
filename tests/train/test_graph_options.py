"""What runs over a graph share with all others: strategies, clipping, scaled losses, averages, frozen parameters."""

import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
from changes import changed
from small_graph_run import bind, gcn, scores_of, write_graph

from scalejax import optim
from scalejax.data.graphs import GraphSchema
from scalejax.errors import UserError
from scalejax.models.graph import GatConfig, GcnConfig, GraphSageConfig
from scalejax.models.graph.task import NodeTask
from scalejax.numerics.quantize import cast
from scalejax.numerics.quantized.rules import QuantizationRule
from scalejax.parallel import rules
from scalejax.parallel.embedding.config import IdMapConfig, MappedFeatures
from scalejax.parallel.embedding.ids.jagged import DedupGroup
from scalejax.parallel.embedding.tiers import Tier
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.gradients.scaling import LossScaling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.train import loop
from scalejax.train.batches.convert import to_device
from scalejax.train.checkpoints import trained
from scalejax.train.experiment import Experiment, Placement, Precision
from scalejax.train.runs.run import Run
from scalejax.train.state import TrainState
from scalejax.train.step import Program
from scalejax.train.task import Batch, Field, Loss

STEPS = 4
WIDE = Precision(params="float64", compute="float64")
ADAM = optim.Adam(learning_rate=optim.Constant(value=0.02))
SGD = optim.Sgd(learning_rate=optim.Constant(value=0.5))
OVER_ALL = MeshShape(replica=2, fsdp=2, expert=2)
HYBRID = MeshShape(replica=2, fsdp=4)
BOTH = "optimizer and parameters"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_graph(tmp_path_factory.mktemp("graph") / "graph.npz")


def _trained(experiment: Experiment) -> tuple[Program, TrainState, list[float]]:
    data = experiment.data.build()
    program = bind(experiment, data)
    batches = program.task.train_batches(data, program.mesh, 0)
    state, losses = program.init(), []
    for _ in range(STEPS):
        state, loss = program.train_step(state, to_device(next(batches), program))
        losses.append(float(loss))
    return program, state, losses


def _same(one: tuple[Any, TrainState, list[float]], other: tuple[Any, TrainState, list[float]]) -> None:
    np.testing.assert_allclose(one[2], other[2], rtol=1e-12)
    states = [(state.params, state.optimizer, state.averages) for _, state, _ in (one, other)]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9)


# Mesh, pieces that the parameters are cut into, and the rest.
CASES: dict[str, tuple[MeshShape, int, dict[str, Any]]] = {
    "full": (MeshShape(), 8, {}),
    "full over three axes": (OVER_ALL, 8, {}),
    "kept": (MeshShape(), 8, {"strategy": Fsdp(sharding="SHARD_GRAD_OP")}),
    "hybrid": (HYBRID, 4, {"strategy": Fsdp(sharding="HYBRID_SHARD")}),
    "hybrid, kept": (HYBRID, 4, {"strategy": Fsdp(sharding="HYBRID_SHARD_ZERO2")}),
    "whole": (MeshShape(), 1, {"strategy": Fsdp(sharding="NO_SHARD")}),
    "by rules, beside tensor": (MeshShape(fsdp=4, tensor=2), 4, {"placement__rules": rules.FSDP}),
    "clipped": (MeshShape(), 8, {"gradients__clip": 0.01, "optimizer": SGD}),
    "scaled": (MeshShape(), 8, {"gradients__loss_scaling": LossScaling(initial=1024.0, interval=2)}),
    "averages": (HYBRID, 4, {"averages": (optim.Average(decay=0.5),), "strategy": Fsdp(sharding="HYBRID_SHARD")}),
    "frozen": (MeshShape(), 8, {"trainable": "layers/1/.*"}),
    "in host memory": (HYBRID, 4, {"placement__offload": BOTH, "strategy": Fsdp(sharding="HYBRID_SHARD")}),
    # Nodes are cut over all axes, whatever these are to other models.
    "beside context and stage": (MeshShape(fsdp=2, context=2, stage=2), 2, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_eight_devices_are_one(name: str, path: str, x64: None) -> None:
    shape, pieces, changes = CASES[name]
    experiment = gcn(path, **{"precision": WIDE, "optimizer": ADAM, **changes})
    one, eight = (_trained(changed(experiment, placement__mesh=mesh)) for mesh in (None, shape))
    _same(eight, one)
    kernel = eight[1].params["layers/0/kernel"]
    assert len(kernel.addressable_shards) == 8
    assert kernel.size // kernel.addressable_shards[0].data.size == pieces


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "HYBRID_SHARD"])
def test_mini_batches_on_eight_devices_are_those_on_one(sharding: Any, path: str, x64: None) -> None:
    changes: dict[str, Any] = {"normalization": "none", "fanouts": (3, 2), "batch_size": 16}
    experiment = gcn(path, precision=WIDE, optimizer=ADAM, strategy=Fsdp(sharding=sharding), gradients__clip=0.1)
    experiment = changed(experiment, data=changed(experiment.data, **changes))
    experiment = changed(experiment, model=GraphSageConfig(hidden=8, dropout=0.0))
    one, eight = (_trained(changed(experiment, placement__mesh=mesh)) for mesh in (None, HYBRID))
    _same(eight, one)


@pytest.mark.slow
def test_a_clipped_step_is_as_long_as_it_says(path: str, x64: None) -> None:
    experiment = gcn(path, precision=WIDE, optimizer=SGD, gradients__clip=0.01)
    data = experiment.data.build()
    program = bind(experiment, data)
    state = program.init()
    before = {name: np.asarray(p) for name, p in state.params.items()}
    state, _ = program.train_step(state, to_device(data.whole("train"), program))
    moved = np.sqrt(sum(((np.asarray(state.params[name]) - p) ** 2).sum() for name, p in before.items()))
    assert moved == pytest.approx(0.5 * 0.01, rel=1e-9)
    _, sums = program.take_metrics(state)
    assert int(sums["steps"].clipped) == 1


@pytest.mark.slow
def test_a_scaled_loss_that_never_overflows_changes_nothing(path: str, x64: None) -> None:
    plain = gcn(path, precision=WIDE, optimizer=ADAM)
    scaled = gcn(path, precision=WIDE, optimizer=ADAM, gradients__loss_scaling=LossScaling(initial=2.0**20, interval=2))
    _same(_trained(scaled), _trained(plain))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, MeshShape()])
def test_float16_learns_under_a_scaled_loss_and_skips_what_overflows(mesh: MeshShape | None, path: str) -> None:
    scaling = LossScaling(initial=2.0**40, interval=100)
    half = gcn(
        path, placement__mesh=mesh, optimizer=ADAM, precision__compute="float16", gradients__loss_scaling=scaling
    )
    data = half.data.build()
    program = bind(half, data)
    batch = to_device(data.whole("train"), program)
    state: Any = program.init()
    first = {name: np.asarray(p) for name, p in state.params.items()}
    losses: list[float] = []
    skipped = 0
    for _ in range(40):
        state, loss = program.train_step(state, batch)
        losses.append(float(loss))
        skipped = int(state.loss_scale.skipped)
        if skipped == len(losses):
            for name, p in first.items():
                np.testing.assert_array_equal(np.asarray(state.params[name]), p)
    assert 10 < skipped < 36  # 2**40 is far above, what float16 can hold of these gradients far below
    assert float(state.loss_scale.scale) == 2.0 ** (40 - skipped)
    assert np.isfinite(losses).all()
    assert scores_of(program, state, data, "train")["loss"] < losses[0]


@pytest.mark.slow
def test_averages_are_those_of_the_parameters_and_may_be_scored(path: str, x64: None) -> None:
    changes: dict[str, Any] = {"precision": WIDE, "optimizer": ADAM, "averages": (optim.Average(decay=0.5),)}
    experiment = gcn(path, **changes, evaluation__average="ema")
    data = experiment.data.build()
    program, plain = bind(experiment, data), bind(gcn(path, **changes), data)
    state, batch = program.init(), to_device(data.whole("train"), program)
    wanted = {name: np.asarray(p) for name, p in state.params.items()}
    for _ in range(3):
        state, _ = program.train_step(state, batch)
        wanted = {name: 0.5 * a + 0.5 * np.asarray(state.params[name]) for name, a in wanted.items()}
    for name, average in wanted.items():
        np.testing.assert_allclose(state.averages["ema"][name], average, rtol=1e-12, atol=1e-14)
    averaged = scores_of(program, state, data, "test")["loss"]
    assert averaged != scores_of(plain, state, data, "test")["loss"]
    state = dataclasses.replace(state, params=state.averages["ema"])
    assert averaged == scores_of(plain, state, data, "test")["loss"]


@pytest.mark.slow
def test_frozen_parameters_stay_and_have_no_optimizer_state(path: str) -> None:
    experiment = gcn(path, optimizer=ADAM, trainable="layers/1/.*")
    fresh = bind(experiment).init()
    _, state, _ = _trained(experiment)
    for name, p in fresh.params.items():
        assert np.array_equal(np.asarray(state.params[name]), np.asarray(p)) == name.startswith("layers/0/")
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.optimizer)}
    assert shapes == {(), (8, 3), (3,)}


@pytest.mark.slow
def test_state_rests_in_host_memory_and_the_graph_on_the_devices(path: str) -> None:
    program, state, _ = _trained(gcn(path, optimizer=ADAM, placement__offload=BOTH, placement__mesh=HYBRID))
    resting = {leaf.sharding.memory_kind for leaf in jax.tree.leaves((state.params, state.optimizer)) if leaf.ndim}
    assert resting == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(program.constants)} == {"device"}


class ScaledTask(NodeTask):
    """Losses times a number that the host draws for each step."""

    def fields(self) -> dict[str, Any]:
        return super().fields() | {"scale": Field(shape=(), dtype="float32", scope="step")}

    def drawn(self, rng: np.random.Generator) -> dict[str, Any]:
        return {"scale": np.float32(rng.uniform(0.5, 1.5))}

    def loss(self, model: Any, batch: Batch, **others: Any) -> Loss:
        found = super().loss(model, batch, **others)
        return dataclasses.replace(found, sum=found.sum * batch["scale"])


class ScaledSage(GraphSageConfig):
    def task(self, schema: GraphSchema) -> NodeTask:
        return ScaledTask(config=self, schema=schema)


@pytest.mark.slow
@pytest.mark.parametrize(("fanouts", "mesh"), [((), None), ((3, 2), HYBRID)], ids=["whole", "mini-batches on eight"])
def test_fields_that_the_host_draws_are_those_of_seed_and_step(
    fanouts: tuple[int, ...], mesh: MeshShape | None, path: str
) -> None:
    batches: dict[str, Any] = {"data__fanouts": fanouts, "data__batch_size": 16} if fanouts else {}
    experiment = gcn(path, placement__mesh=mesh, seed=5, optimizer=ADAM, data__normalization="none", **batches)
    data = experiment.data.build()
    configs = (GraphSageConfig(hidden=8, dropout=0.0), ScaledSage(hidden=8, dropout=0.0))
    plain, scaled = (bind(changed(experiment, model=config), data) for config in configs)

    def factor(step: int) -> float:
        return np.random.default_rng((5, step)).uniform(0.5, 1.5)

    for step in (1, 2):
        batch = next(plain.task.train_batches(data, plain.mesh, 0))
        one, other = (p.train_step(p.init(), to_device(batch, p, step=step))[1] for p in (plain, scaled))
        assert float(other) == pytest.approx(factor(step) * float(one), rel=1e-6)
    one, other = (scores_of(p, p.init(), data, "test")["loss"] for p in (plain, scaled))
    assert other == pytest.approx(factor(0) * one, rel=1e-6)


COARSE = QuantizationRule(module_path="layers/.*", weight_qtype="bdr_mx4", tail="pad")


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        GcnConfig(hidden=8, dropout=0.0),
        GraphSageConfig(hidden=8, dropout=0.0),
        GatConfig(hidden=4, heads=2, dropout=0.0),
    ],
    ids=["gcn", "graphsage", "gat"],
)
def test_weights_of_a_graph_network_are_those_cast_by_hand(model: Any, path: str) -> None:
    normalization = "symmetric" if isinstance(model, GcnConfig) else "none"
    changes: dict[str, Any] = {"model": model, "optimizer": ADAM, "data__normalization": normalization}
    experiment = gcn(path, **changes, quantization=(COARSE,))
    data = experiment.data.build()
    program, plain = bind(experiment, data), bind(gcn(path, **changes), data)
    state = program.init()

    def by_hand(name: str, value: jax.Array) -> jax.Array:
        vector = value.ndim < 2 or name.endswith(("source", "target"))
        return value if vector else cast(value, "bdr_mx4", axis=0, tail="pad")

    changed_state = dataclasses.replace(state, params={name: by_hand(name, p) for name, p in state.params.items()})
    wanted = scores_of(plain, changed_state, data, "train")["loss"]
    assert scores_of(program, state, data, "train")["loss"] == pytest.approx(wanted, rel=1e-5)
    assert abs(wanted - scores_of(plain, state, data, "train")["loss"]) > 1e-3 * wanted
    loss = program.train_step(state, to_device(data.whole("train"), program))[1]
    assert float(loss) == pytest.approx(wanted, rel=1e-5)


def test_rules_are_not_for_vectors_of_attention(path: str) -> None:
    """A pattern for all layers leaves them out, as it does biases, and one for them alone is refused."""
    experiment = gcn(path, model=GatConfig(hidden=4, heads=2), optimizer=ADAM, data__normalization="none")
    data = experiment.data.build()
    program = bind(changed(experiment, quantization=(COARSE,)), data)
    assert {"layers/0/source", "layers/1/target"} < set(program.model.params)
    assert set(program.formats) == {"layers/0", "layers/1"}
    program.train_step.trace(program.abstract_state(), to_device(data.whole("train"), program))
    vectors = dataclasses.replace(COARSE, module_path="layers/./(source|target)")
    message = (
        r"^quantization\.0: module_path 'layers/\./\(source\|target\)' matches no module; there are layers/[01], layers"
    )
    with pytest.raises(UserError, match=message):
        bind(changed(experiment, quantization=(vectors,)), data)


@pytest.mark.slow
def test_number_formats_on_eight_devices_are_those_on_one(path: str) -> None:
    formats = dict.fromkeys(("weight_qtype", "act_qtype", "bwd_qtype"), "bdr_mx9")
    changes: dict[str, Any] = {"optimizer": ADAM, "model": GcnConfig(hidden=8, dropout=0.0)}
    rule = QuantizationRule(module_path="layers/0", tail="pad", **formats)
    experiment = gcn(path, **changes, quantization=(rule,))
    one, eight = (_trained(changed(experiment, placement__mesh=mesh)) for mesh in (None, HYBRID))
    plain = _trained(gcn(path, **changes))
    assert np.abs(np.array(one[2]) - plain[2]).max() > 1e-4 * one[2][0]
    np.testing.assert_allclose(eight[2], one[2], rtol=1e-4)


@pytest.mark.slow
def test_parameters_begin_with_those_of_another_run(path: str, tmp_path: pathlib.Path) -> None:
    experiment = gcn(path, steps=3, optimizer=ADAM)
    loop.train(experiment, workdir=tmp_path)
    there = trained.open_run(tmp_path).params
    average = optim.Average(decay=0.5)
    placement = Placement(mesh=HYBRID, offload=BOTH)  # averages stay on the devices
    further = changed(experiment, init=str(tmp_path), placement=placement, averages=(average,))
    data = further.data.build()
    run = Run.bind(further, data, make_mesh(HYBRID))
    state, host = run.begin()
    assert set(state.params) == set(there)
    for name, p in state.params.items():
        np.testing.assert_array_equal(np.asarray(p), there[name][...])
        np.testing.assert_array_equal(np.asarray(state.averages["ema"][name]), there[name][...])
    assert (host.examples, int(state.step)) == (0, 0)
    with run.feed(host, 1) as feed:
        feed.take()
        state, loss = feed.step(state)
    assert np.isfinite(float(loss))
    other = Run.bind(changed(further, model=GcnConfig(hidden=16)), data, make_mesh(HYBRID))
    with pytest.raises(UserError, match=r"init=.*does not fit the model: of other shapes: layers/0/"):
        other.begin()


@pytest.mark.default_cases("id_maps*", "pipeline*")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id_maps", (MappedFeatures(features=("item",), id_map=IdMapConfig(rows=1217)),)),
        ("tiers", (Tier(features=("item",), slots=100),)),
        ("dedup", (DedupGroup(features=("shop",), rows_per_example=1.0),)),
        ("pipeline", "ids"),
        ("full_every", 4),
    ],
)
def test_options_of_tables_are_refused_without_tables(field: str, value: Any, path: str) -> None:
    experiment = gcn(path, **{f"tables__{field}": value, "checkpoints__every": 4})
    with pytest.raises(UserError, match=rf"^tables.{field} is .* GcnConfig has no embedding tables"):
        bind(experiment)
