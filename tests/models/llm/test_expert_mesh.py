"""Experts on a mesh: training equals one device, tokens travel by all-to-alls of stated size, and experts stay."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_language_run as small
from flax import nnx
from llama_cases import F64, GQA

from scalejax import optim
from scalejax.data.images.sources import ImageFolder
from scalejax.data.images.two_modality import TwoModalityData
from scalejax.errors import UserError
from scalejax.models.llm.experts import ExpertChoice, Experts, Prepared, TopK
from scalejax.models.llm.llama3.parts import OutputRmsNorm
from scalejax.models.llm.moma import ModalityExperts
from scalejax.parallel import expert
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan import explain_sharding
from scalejax.train.experiment import Precision
from scalejax.train.metrics import sums as metric_sums

COUNT = 8
WIDE = 100.0  # a factor at which there is room for everything


def moma(group, **changes):
    return ModalityExperts(groups=(("text", 4), ("image", 4)), router=ExpertChoice(group=group, **changes))


PARTS = {
    "dropless": Experts(count=COUNT, router=TopK(k=2, z=0.01)),
    "room between two": Experts(count=COUNT, router=TopK(k=2, pair_factor=WIDE)),
    "with a capacity": Experts(count=COUNT, router=TopK(k=2, capacity_factor=COUNT / 2), execution="batched"),
    "bias": Experts(count=COUNT, router=TopK(k=2, balance=0.0, bias_rate=0.1)),
    "sequence": Experts(count=COUNT, router=ExpertChoice(group="sequence"), execution="sequential"),
    "global": Experts(count=COUNT, router=ExpertChoice(group="global"), execution="batched"),
    "moma sequence": dataclasses.replace(moma("sequence"), execution="sequential"),
    "moma noise": moma("global", noise="gumbel"),
}
EXPLICIT = Fsdp(sharding="FULL_SHARD", form="explicit")
MESHES = {
    "fsdp x 4": (Fsdp(), MeshShape(fsdp=2, expert=4)),
    "explicit fsdp x 4": (EXPLICIT, MeshShape(fsdp=2, expert=4)),
    "replica x fsdp x 2": (
        dataclasses.replace(EXPLICIT, sharding="HYBRID_SHARD"),
        MeshShape(replica=2, fsdp=2, expert=2),
    ),
    "whole x 4": (dataclasses.replace(EXPLICIT, sharding="NO_SHARD"), MeshShape(fsdp=2, expert=4)),
    "tensor x 4": (Fsdp(), MeshShape(fsdp=1, tensor=2, expert=4)),
    "explicit tensor x 2": (EXPLICIT, MeshShape(fsdp=2, tensor=2, expert=2)),
    "context x 4": (EXPLICIT, MeshShape(fsdp=1, context=2, expert=4)),
    "stage x 4": (EXPLICIT, MeshShape(fsdp=1, stage=2, expert=4)),
    "implicit stage x 2": (Fsdp(), MeshShape(fsdp=2, stage=2, expert=2)),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 28, 28)).astype(np.uint8)
    np.savez(folder / "images.npz", images=pixels, labels=np.arange(40) % 3)
    return small.write(folder / "documents")


def bound(texts, part, shape, remat="full", **changes):
    """A run whose data have images among their text where experts are grouped by modality."""
    model = dataclasses.replace(small.MODEL, mlp=part, stage_parts=1, remat=remat)
    if isinstance(part, ModalityExperts):
        model = dataclasses.replace(model, norm=OutputRmsNorm(), max_positions=128)
        changes["data"] = TwoModalityData(
            images=ImageFolder(path=str(texts.parent / "images.npz")),
            codes=16,
            path=str(texts),
            length=128,
            batch_size=8,
            image_share=(0.35, 0.9),
            folder=str(texts.parent / "kept"),
        )
    return small.bind(texts, shape, model=model, **changes)


def trained(texts, part, shape, **changes):
    """Losses of three steps, and all parameters and variables after them."""
    run = bound(texts, part, shape, precision=Precision(params="float64"), **changes)
    state, host = run.begin()
    state, losses = small.steps(run, state, host, 3)
    return losses, jax.tree.map(np.asarray, {**state.params, **state.variables})


@pytest.fixture(scope="module")
def without_travel(texts):
    """Of each part on one device, made when it is first asked for.

    In the explicit form each device draws with its own key: what draws is made on as many devices with whole experts.
    """
    found = {}

    def get(name, strategy, shape):
        devices = shape.replica * shape.fsdp * shape.expert if draws(PARTS[name]) and strategy == EXPLICIT else 1
        if (name, devices) not in found:
            with jax.enable_x64(True):
                changes = {"strategy": EXPLICIT} if devices > 1 else {}
                found[name, devices] = trained(texts, PARTS[name], MeshShape(fsdp=devices), **changes)
        return found[name, devices]

    return get


def draws(part):
    return isinstance(part, ModalityExperts) and part.draws


# Every mesh, and every part: those that choose among all tokens where a row or a stage is cut, those that draw in both
# forms. Whole experts on other axes are in test_depth.
CASES = [
    ("dropless", "explicit tensor x 2"),
    ("with a capacity", "whole x 4"),
    ("room between two", "replica x fsdp x 2"),
    ("bias", "fsdp x 4"),
    ("sequence", "stage x 4"),
    ("global", "context x 4"),
    ("moma sequence", "tensor x 4"),
    ("moma noise", "explicit fsdp x 4"),
    ("moma noise", "implicit stage x 2"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_devices_change_nothing_but_the_order_of_sums(texts, without_travel, name, mesh):
    strategy, shape = MESHES[mesh]
    losses, params = without_travel(name, strategy, shape)
    with jax.enable_x64(True):
        found, got = trained(texts, PARTS[name], shape, strategy=strategy)
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    for path, value in params.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-9, atol=1e-12, err_msg=path)


RAGGED = Experts(count=COUNT, router=TopK(k=2, z=0.01, exchange="ragged"))


def stand_in(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What jax says that `ragged_all_to_all` does, in terms of everything that all devices have."""
    operands, begins, sizes, places = (
        jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
    )
    me, rows = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for source in range(len(sizes)):
        number = rows - places[source, me]
        arrives = (number >= 0) & (number < sizes[source, me])
        row = operands[source].at[begins[source, me] + number].get(mode="fill", fill_value=jnp.nan)
        output = jnp.where(arrives[:, None], row, output)
    return jnp.where((recv_sizes == sizes[:, me]).all(), output, jnp.nan)


@pytest.mark.slow
def test_as_many_tokens_as_there_are_may_travel(texts, without_travel, monkeypatch):
    strategy, shape = MESHES["stage x 4"]
    losses, params = without_travel("dropless", strategy, shape)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", stand_in)
    monkeypatch.setattr(expert, "RAGGED_PLATFORMS", ("cpu",))
    with jax.enable_x64(True):
        found, got = trained(texts, RAGGED, shape, strategy=strategy)
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    for path, value in params.items():
        np.testing.assert_allclose(got[path], value, rtol=1e-9, atol=1e-12, err_msg=path)


def test_a_cpu_has_no_such_exchange(texts):
    run = bound(texts, RAGGED, MeshShape(fsdp=1, expert=4))
    with pytest.raises(UserError, match=r"exchange='ragged' is for tpu and gpu, .* Leave it 'padded'"):
        run.program.train_step.lower(run.program.abstract_state(), run.program.abstract_batch())


def on_devices(part, x, shape):
    """(results, numbers) of experts that differ, of tokens without padding."""
    graph, state = nnx.split(part.build(GQA, nnx.Rngs(0), F64))
    state, prepared = jax.tree.map(lambda x: 20 * x[0], state), Prepared(jnp.ones(x.shape[:2], bool))

    @jax.jit
    def run(state, x):
        module = nnx.merge(graph, state)
        return module.with_numbers(x, prepared, module.numbers(len(x)))

    devices = math.prod(dataclasses.astuple(shape))
    with jax.set_mesh(make_mesh(shape, jax.devices()[:devices])):
        return jax.tree.map(np.asarray, run(state, x))


@pytest.mark.slow
def test_experts_of_a_device_choose_others_there(x64):
    """Among the tokens of a device alone, as if there were no others; the control of those that choose of all."""
    part = Experts(count=COUNT, router=ExpertChoice(group="device"), execution="batched")
    x, one = jax.random.normal(jax.random.key(0), (8, 6, GQA.dim)), MeshShape(fsdp=1)
    found, _ = on_devices(part, x, MeshShape(fsdp=1, expert=4))
    alone = [on_devices(part, rows, one)[0] for rows in np.split(np.asarray(x), 4)]
    np.testing.assert_allclose(found, np.concatenate(alone), rtol=1e-11, atol=1e-12)
    assert np.abs(found - on_devices(part, x, one)[0]).max() > 1e-2


ROUTERS = {
    "grouped": TopK(k=2, pair_factor=0.5),
    "batched": ExpertChoice(group="global", capacity_factor=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("execution", ROUTERS)
def test_what_has_no_place_is_dropped_and_counted(texts, execution):
    part = Experts(count=COUNT, router=ROUTERS[execution], execution=execution)
    run = bound(texts, part, MeshShape(fsdp=1, expert=4))
    state, host = run.begin()
    state, _ = small.steps(run, state, host, 1)
    values = {}
    for name, sums in state.metrics.items():
        if name in run.program.metrics:
            values |= run.program.metrics[name].compute(metric_sums.to_host(sums))
    assert 0.3 < values["dropped"] < 0.7
    assert values["tokens_unseen"] + values["tokens_seen_once"] > 0.3


@pytest.mark.slow
def test_what_is_dropped_between_two_devices_comes_last_in_their_order(x64):
    """Of what a device sends to another the first choices stay, by row, position and rank; gradients are theirs."""
    shape = MeshShape(fsdp=2, expert=4)
    part = Experts(count=8, router=TopK(k=2, pair_factor=0.6))
    graph, state = nnx.split(part.build(GQA, nnx.Rngs(0), F64))
    state = jax.tree.map(lambda x: 20 * x[0], state)
    prepared = Prepared(jnp.ones((8, 6), bool).at[3, 4:].set(False))
    x = jax.random.normal(jax.random.key(0), (8, 6, GQA.dim))
    devices, here = shape.fsdp * shape.expert, COUNT // shape.expert
    tokens = x.shape[0] // devices * x.shape[1]
    room = math.ceil(0.6 * tokens * 2 / shape.expert)

    def chosen(state, x):
        scores = jax.nn.softmax(x @ state["router"][...])
        gates, experts = jax.lax.top_k(scores, 2)
        return gates / gates.sum(2, keepdims=True), experts

    kept, experts = np.zeros((8, 6, 2), bool), np.asarray(jax.jit(chosen)(state, x)[1])
    for rows in np.split(np.arange(8), devices):
        sent = dict.fromkeys(range(shape.expert), 0)
        for row, position, rank in np.ndindex(len(rows), 6, 2):
            to = experts[rows[row], position, rank] // here
            if prepared.real[rows[row], position]:
                kept[rows[row], position, rank] = sent[to] < room
                sent[to] += 1

    def literal(state, x):
        gates, experts = chosen(state, x)
        gate, up, down = (state[name][...] for name in ("gate", "up", "down"))
        hidden = jax.nn.silu(jnp.einsum("bse,nef->bsnf", x, gate)) * jnp.einsum("bse,nef->bsnf", x, up)
        made = jnp.einsum("bsnf,nfe->bsne", hidden, down)
        return (jnp.where(kept, gates, 0)[..., None] * jnp.take_along_axis(made, experts[..., None], 2)).sum(2)

    def ours(state, x):
        module = nnx.merge(graph, state)
        return module.with_numbers(x, prepared, module.numbers(8))

    dropped = (2 * prepared.real - kept.sum(2)).sum(1)
    assert 0 < dropped.sum() < 60
    with jax.set_mesh(make_mesh(shape, jax.devices()[:devices])):
        y, numbers = jax.jit(ours)(state, x)
        found = jax.jit(jax.grad(lambda *given: (ours(*given)[0] ** 2).sum(), (0, 1)))(state, x)
    np.testing.assert_allclose(y, jax.jit(literal)(state, x), rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(numbers["dropped"], dropped)
    wanted = jax.jit(jax.grad(lambda *given: (literal(*given) ** 2).sum(), (0, 1)))(state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), found, wanted)


PART_CASES = {
    "sequence": PARTS["sequence"],
    "global": PARTS["global"],
    "device": Experts(count=COUNT, router=ExpertChoice(group="device"), execution="batched"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PART_CASES)
def test_a_group_is_within_a_part_of_the_batch(texts, name):
    """Parts change who is chosen of a device or of all, as batches of that size would; not of a row."""

    def begun(**changes):
        run = bound(texts, PART_CASES[name], MeshShape(fsdp=1), precision=Precision(params="float64"), **changes)
        return run, *run.begin()

    with jax.enable_x64(True):
        (whole,) = small.steps(*begun(), 1)[1]
        (in_parts,) = small.steps(*begun(gradients__microbatch=4), 1)[1]
        # Two batches of four rows, while nothing is learnt.
        rate = optim.AdamW(learning_rate=optim.Constant(value=0.0))
        run, state, host = begun(data__batch_size=4, optimizer=rate)
        _, losses = small.steps(run, state, host, 2)
        weights = [batch.weights.sum() for batch in itertools.islice(run.data.train_batches(start_example=0), 2)]
    literal = np.average(losses, weights=weights)
    np.testing.assert_allclose(in_parts, literal, rtol=1e-12)
    if name == "sequence":
        np.testing.assert_allclose(in_parts, whole, rtol=1e-12)
    else:
        assert abs(in_parts - whole) > 1e-6


def exchanged(texts, part, strategy, shape):
    """(all collectives of the compiled step, tokens of a device, the part's run)."""
    run = bound(texts, part, shape, remat="none", strategy=strategy)
    program = run.program
    compiled = program.train_step.lower(program.abstract_state(), program.abstract_batch()).compile()
    rows = 8 // (shape.replica * shape.fsdp * shape.expert)
    return explain_sharding(compiled, program.mesh), rows * 32


PLACES = {
    # Of a device, which sends them along with 4-byte numbers of their experts where these are not in order.
    "with a capacity": lambda tokens: COUNT * math.ceil(COUNT / 2 * tokens * 2 / COUNT),
    "global": lambda tokens: COUNT * tokens,
    "sequence": lambda tokens: COUNT * (32 // COUNT) * (tokens // 32),
    "dropless": lambda tokens: 4 * tokens * 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), [*zip(PLACES, itertools.cycle(["fsdp x 4", "explicit fsdp x 4"]), strict=False)]
)
def test_tokens_travel_by_all_to_alls_of_the_stated_size_and_experts_stay(texts, mesh, name):
    """Four a layer, there and back, forward and backward, where nothing is rematerialised."""
    strategy, shape = MESHES[mesh]
    found, tokens = exchanged(texts, PARTS[name], strategy, shape)
    sent = sum(c.bytes for c in found if c.kind == "all-to-all" and c.axis == "expert")
    places = PLACES[name](tokens)
    numbers = 4 * places if name == "dropless" else 0
    layers = small.MODEL.layers
    assert sent == layers * (4 * places * small.MODEL.dim * 4 + numbers)
    gathered = {c.bytes // c.count for c in found if c.kind == "all-gather" and c.axis == "fsdp"}
    assert gathered == {COUNT // shape.expert * small.MODEL.dim * small.MODEL.ffn_dim * 4}  # one matrix of those here


def test_a_pipeline_carries_no_bias(texts):
    strategy, shape = MESHES["stage x 4"]
    run = bound(texts, PARTS["bias"], shape, strategy=strategy)
    with pytest.raises(UserError, match="a pipeline over stage=2 does not carry"):
        run.program.train_step.lower(run.program.abstract_state(), run.program.abstract_batch())


@pytest.mark.slow
def test_experts_that_do_not_divide_are_refused(texts):
    with pytest.raises(UserError, match=r"expert=4, which does not divide experts=6 of 'layers/mlp/down'"):
        bound(texts, Experts(count=6), MeshShape(fsdp=1, expert=4))


@pytest.mark.slow
def test_what_positions_do_not_divide_is_whole_everywhere_and_chosen_once(x64):
    """Seven positions over two devices of `context`: no token enters twice."""
    part = Experts(count=2, router=ExpertChoice(group="global"), execution="batched")
    x = jax.random.normal(jax.random.key(0), (2, 7, GQA.dim))
    y, numbers = on_devices(part, x, MeshShape(fsdp=1))
    found, of_mesh = on_devices(part, x, MeshShape(fsdp=1, context=2))
    np.testing.assert_allclose(found, y, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(of_mesh["load"], numbers["load"])
