"""Sums of gradients that travel compressed both ways: nothing is lost, error feedback matters, other devices go on."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.compression import two_way
from scalejax.parallel.compression.compressors import (
    Blocks,
    Fp16,
    Identity,
    LinearDithering,
    OneBit,
    RandomKEntries,
    TopKEntries,
    Traits,
)
from scalejax.parallel.compression.two_way import Compression, compress_gradients
from scalejax.parallel.gradients.blocks import StepContext
from scalejax.parallel.links import SentBytes
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import explain_sharding
from scalejax.plan.compiled import collectives

N = 1000
FLAT = (("replica",), (), MeshShape(replica=8))
DOCS = pathlib.Path(__file__).parents[3] / "docs" / "compression.md"
HOSTS = (("replica",), ("fsdp",), MeshShape(replica=2, fsdp=4))
BOTH = pytest.mark.parametrize("where", [FLAT, HOSTS], ids=["8", "2x4"])
BIASED = pytest.mark.parametrize("compressor", [OneBit(), TopKEntries(k=0.05)], ids=["onebit", "topk"])


def gradients(seed, n=N):
    return np.random.default_rng(seed).standard_t(3, (8, n)).astype(np.float32)


class Devices:
    """The reduction on eight devices, step by step; `left_out` is what the last one measured.

    With dtype=np.float64 sums and residuals are in it.
    """

    def __init__(self, compression, where=FLAT, n=N, measure=None, dtype=np.float32):
        self.slow, self.fast, shape = where
        self.mesh, axes = meshes.make_mesh(shape), (*self.slow, *self.fast)
        hosts = self.mesh.shape[self.slow[0]]
        one = two_way.initial(compression, n, hosts, 8 // hosts)
        one = {name: np.asarray(x, dtype if x.dtype == np.float32 else None) for name, x in one.items()}
        self.state = {name: np.tile(x[None], (8, *(1 for _ in x.shape))) for name, x in one.items()}
        self.dtype = dtype
        self.number, self.measure, self.left_out = 0, measure, None

        @functools.partial(
            jax.shard_map, mesh=self.mesh, in_specs=(P(axes), P(axes), P()), out_specs=P(axes), check_vma=False
        )
        def local(g, state, context):
            found, new, left_out = two_way.reduced(
                compression, g[0], {k: x[0] for k, x in state.items()}, slow=self.slow, fast=self.fast, context=context
            )
            return jax.tree.map(lambda x: x[None], (found, new, left_out))

        self.run = jax.jit(local)

    def reduce(self, given, rate=1.0):
        """[8, n]: what every device gets."""
        measure = None if self.measure is None else jnp.bool_(self.measure)
        with jax.enable_x64(self.dtype == np.float64):
            rate = jnp.asarray(rate, self.dtype)
            context = StepContext(jnp.int32(self.number), jax.random.key(self.number), rate, measure)
            found, self.state, self.left_out = self.run(given.astype(self.dtype), self.state, context)
        self.number += 1
        return np.asarray(found)

    def remembered(self):
        """[n]: the sum of all errors, of workers and owners, where they belong."""
        hosts = self.mesh.shape[self.slow[0]]
        worker, owner = (np.asarray(self.state[name], np.float64) for name in ("worker", "owner"))
        workers = worker.reshape(hosts, 8 // hosts, -1).sum(0).ravel()
        owners = owner.reshape(hosts, 8 // hosts, -1).swapaxes(0, 1).ravel()
        return (workers + owners)[: int(self.state["values"][0])]


def in_order(given, where):
    """The sum over devices, chunk by chunk in their order, within hosts first."""
    if where is FLAT:
        return functools.reduce(np.add, given)
    hosts = given.reshape(2, 4, -1)
    return functools.reduce(np.add, hosts.swapaxes(0, 1))[0] + functools.reduce(np.add, hosts.swapaxes(0, 1))[1]


@BOTH
def test_the_identity_is_the_uncompressed_sum_to_the_bit(where):
    devices = Devices(Compression(compressor=Identity()), where)
    for seed in range(3):
        given = gradients(seed)
        found = devices.reduce(given)
        np.testing.assert_array_equal(found.view(np.uint32), np.tile(in_order(given, where), (8, 1)).view(np.uint32))
    assert np.all(devices.remembered() == 0)


@BOTH
@BIASED
@pytest.mark.default_cases("*float64-onebit-2x4")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_was_applied_and_what_is_remembered_is_the_uncompressed_sum(compressor, where, dtype):
    devices = Devices(Compression(compressor=compressor), where, dtype=dtype)
    applied, exact = np.zeros(N), np.zeros(N)
    # Of whole numbers the largest values are whole, so that nothing is rounded; means of magnitudes are not.
    whole = isinstance(compressor, TopKEntries) and dtype == np.float32
    bound = 0 if whole else {np.float32: 2e-4, np.float64: 1e-12}[dtype]
    for seed in range(12):
        given = np.rint(gradients(seed)) if whole else gradients(seed)
        found = devices.reduce(given)
        assert all((row == found[0]).all() for row in found)
        applied, exact = applied + found[0], exact + given.astype(np.float64).sum(0)
        np.testing.assert_allclose(applied + devices.remembered(), exact, rtol=0, atol=bound)
    assert np.abs(devices.remembered()).max() > 1


@pytest.mark.slow
def test_corrected_errors_keep_that_in_units_of_the_update_when_the_learning_rate_changes():
    """Steps at a rate of 0, with which schedules and phases begin, apply nothing and lose nothing. In float64."""
    rates, n = [0.0, 0.1, 0.1, 0.4, 0.0, 0.0, 0.4, 0.05, 0.2], 200
    for kind in ("corrected", "vanilla"):
        devices = Devices(Compression(error_feedback=kind), n=n, dtype=np.float64)
        applied, exact = np.zeros(n), np.zeros(n)
        for step, rate in enumerate(rates):
            given = gradients(step, n)
            applied += rate * devices.reduce(given, rate)[0].astype(np.float64)
            exact += rate * given.astype(np.float64).sum(0)
        missed = np.linalg.norm(applied + rates[-1] * devices.remembered() - exact) / np.linalg.norm(exact)
        assert (missed < 1e-12) == (kind == "corrected"), missed


def test_without_feedback_nothing_is_remembered():
    devices = Devices(Compression(error_feedback="none"))
    assert devices.state == {}
    devices.reduce(gradients(0))
    assert devices.state == {}


def test_one_way_is_what_numpy_says_where_owners_send_all_of_it():
    devices = Devices(Compression(compressor=OneBit(), owner=Identity()))
    error, size = np.zeros((8, N)), N // 8
    for seed in range(4):
        given = gradients(seed)
        wanted = given + error
        chunks = wanted.reshape(8, 8, size)
        sent = (np.where(chunks < 0, -1, 1) * np.abs(chunks).mean(-1, keepdims=True)).reshape(8, N)
        error = wanted - sent
        np.testing.assert_allclose(devices.reduce(given)[0], sent.sum(0), atol=1e-4)


def test_what_is_left_out_is_what_numpy_says_and_measuring_changes_no_bit():
    """Of signs with feedback both ways: messages minus what was to be sent, in float64, step by step."""
    silent, measured = (Devices(Compression(compressor=OneBit()), measure=measure) for measure in (None, True))
    worker, owner, size = np.zeros((8, N)), np.zeros(N), N // 8

    def signs(x):
        """Of each chunk."""
        chunks = x.reshape(-1, size)
        return (np.where(chunks < 0, -1, 1) * np.abs(chunks).mean(-1, keepdims=True)).reshape(x.shape)

    for seed in range(3):
        given = gradients(seed)
        np.testing.assert_array_equal(measured.reduce(given), silent.reduce(given))
        jax.tree.map(np.testing.assert_array_equal, measured.state, silent.state)
        sent = signs(given + worker)
        back = signs(sent.sum(0) + owner)
        squares = ((sent - given) ** 2).sum() + ((back - sent.sum(0)) ** 2).sum()
        np.testing.assert_allclose(np.asarray(measured.left_out).sum(), squares, rtol=1e-5)
        worker, owner = worker + given - sent, owner + sent.sum(0) - back
    assert silent.left_out is None


def test_what_is_left_out_of_sums_that_are_right_on_average_is_their_error():
    """The squares of all devices add up to the squared distance from the exact sum: their draws are independent."""
    compression = Compression(compressor=LinearDithering(levels=16), error_feedback="none")
    devices, given = Devices(compression, HOSTS, n=40_000, measure=True), gradients(0, 40_000)
    missed = ((devices.reduce(given)[0] - given.astype(np.float64).sum(0)) ** 2).sum()
    assert np.asarray(devices.left_out).sum() == pytest.approx(missed, rel=0.05)
    devices.measure = False
    devices.reduce(given)
    assert np.asarray(devices.left_out).sum() == 0


def test_momentum_is_added_before_compression():
    devices = Devices(Compression(compressor=Identity(), momentum=0.9))
    moment = np.zeros((8, N))
    for seed in range(4):
        given = gradients(seed)
        moment = 0.9 * moment + given
        np.testing.assert_allclose(devices.reduce(given)[0], (given + 0.9 * moment).sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_random_places_travel_on_as_they_are_and_owners_have_no_errors():
    """So that correcting owners at the chosen places alone, the third kind of the released code, is the same."""
    devices = Devices(Compression(compressor=RandomKEntries(k=0.1, scale="none")))
    for seed in range(3):
        devices.reduce(gradients(seed))
    assert np.all(np.asarray(devices.state["owner"]) == 0)
    assert np.abs(np.asarray(devices.state["worker"])).max() > 0


@pytest.mark.parametrize("owner", [None, RandomKEntries(k=3)])
def test_random_places_are_scaled_by_what_the_feedback_needs(owner):
    """Of the default scale: with feedback not at all, without it workers and owners of their own by n / k."""
    for feedback, scale in (("vanilla", "none"), ("corrected", "none"), ("none", "n/k")):
        compression = Compression(compressor=RandomKEntries(k=3), owner=owner, error_feedback=feedback)
        two_way.initial(compression, N, 8, 1)
        assert compression.of_workers == RandomKEntries(k=3, scale=scale)
        assert compression.of_owners == RandomKEntries(k=3, scale="none" if owner is None else scale)


@pytest.mark.slow
@pytest.mark.parametrize("compressor", [LinearDithering(levels=16), RandomKEntries(k=0.25)], ids=["linear", "random"])
def test_what_is_right_on_average_needs_no_memory(compressor):
    compression = Compression(compressor=compressor, error_feedback="none")
    given, devices = gradients(0), Devices(compression)
    mean = np.mean([devices.reduce(given)[0] for _ in range(200)], axis=0)
    one = np.linalg.norm(devices.reduce(given)[0] - given.sum(0))
    assert np.linalg.norm(mean - given.sum(0)) < 0.12 * one  # 1 / sqrt(200), and some


@BOTH
def test_gradients_that_are_not_finite_leave_what_is_remembered(where):
    devices = Devices(Compression(), where)
    devices.reduce(gradients(0))
    before = jax.tree.map(np.asarray, devices.state)
    spoilt = gradients(1)
    spoilt[3, 17] = np.inf
    assert np.isnan(devices.reduce(spoilt)).all()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, devices.state), before)
    assert np.isfinite(devices.reduce(gradients(2))).all()


def test_what_a_format_has_not_leaves_what_is_remembered():
    devices = Devices(Compression(compressor=Fp16()))
    devices.reduce(gradients(0))
    before = jax.tree.map(np.asarray, devices.state)
    large = gradients(1)
    large[3, 17] = 1e5  # float16 ends at 65,504
    assert np.isnan(devices.reduce(large)).all()
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, devices.state), before)


class Halves:
    """A user's compressor: every other value, and zeros."""

    traits = Traits("halves", "none", "biased")

    def check(self, n):
        pass

    def payload_bytes(self, n):
        return 4 * -(-n // 2)

    def encode(self, x, key=None):
        return {"even": x[:, ::2]}

    def decode(self, payload, n, key=None):
        even = payload["even"]
        return jnp.zeros((len(even), n)).at[:, ::2].set(even)


def test_a_compressor_of_ones_own_needs_no_rule_for_other_devices():
    """What is remembered is the exchange's."""
    devices, exact, applied = Devices(Compression(compressor=Halves()), HOSTS), np.zeros(N), np.zeros(N)
    for seed in range(3):
        given = gradients(seed)
        applied, exact = applied + devices.reduce(given)[0], exact + given.sum(0)
    np.testing.assert_allclose(applied + devices.remembered(), exact, atol=2e-4)
    state = two_way.resized({name: np.asarray(x) for name, x in devices.state.items()}, 4, 1)
    total = state["worker"].reshape(4, -1).sum(0) + state["owner"].ravel()
    np.testing.assert_allclose(total[:N], devices.remembered(), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "local"), [(8, 1), (4, 1), (1, 1), (4, 2), (3, 2)])
def test_other_devices_remember_the_same(hosts, local):
    devices = Devices(Compression(compressor=TopKEntries(k=0.05), momentum=0.5), HOSTS, n=999)
    for seed in range(3):
        devices.reduce(gradients(seed, 999))
    state = {name: np.asarray(x) for name, x in devices.state.items()}
    there = two_way.resized(state, hosts, local)
    like = two_way.initial(Compression(compressor=TopKEntries(k=0.05), momentum=0.5), 999, hosts, local)
    assert {k: x.shape for k, x in there.items()} == {k: (hosts * local, *x.shape) for k, x in like.items()}
    total = there["worker"].reshape(hosts, local, -1).sum(0).ravel()
    total = total + there["owner"].reshape(hosts, local, -1).swapaxes(0, 1).ravel()
    np.testing.assert_allclose(total[:999], devices.remembered(), atol=1e-5)
    assert np.all(total[999:] == 0)
    momentum = [x["momentum"].reshape(-1, x["momentum"].shape[1] * x["momentum"].shape[2]) for x in (state, there)]
    sums = [np.asarray(of).reshape(n, -1).sum(0).ravel()[:999] for of, n in zip(momentum, (2, hosts), strict=True)]
    np.testing.assert_allclose(sums[1], sums[0], atol=1e-5)
    back = two_way.resized(there, 2, 4)
    np.testing.assert_allclose(back["owner"], state["owner"], atol=0)


def quadratic(compression, steps, rate, seed=0):
    """Squared distance from the best point of eight quadratics with optima far apart; the rate falls half-way."""
    rng = np.random.default_rng(seed)
    optima = jnp.asarray(rng.normal(size=(8, 200)) * 5 + rng.normal(size=200), jnp.float32)
    devices, x = Devices(compression, n=200), jnp.zeros(200)
    for step in range(steps):
        rate_now = rate if step < steps // 2 else rate / 10
        x = x - rate_now * jnp.asarray(devices.reduce(np.asarray(x[None] - optima) / 8)[0])
    return float(((x - optima.mean(0)) ** 2).sum())


@pytest.mark.slow
@BIASED
def test_error_feedback_is_what_lets_a_biased_compressor_converge(compressor):
    with_it = quadratic(Compression(compressor=compressor), 400, 0.05)
    without = quadratic(Compression(compressor=compressor, error_feedback="none"), 400, 0.05)
    longer = quadratic(Compression(compressor=compressor, error_feedback="none"), 800, 0.05)
    assert with_it < 0.1 * without
    assert longer > 0.5 * without  # more steps do not help


def test_bytes_are_those_of_the_payload():
    compressor = OneBit()
    devices = Devices(Compression(compressor=compressor), HOSTS, n=8000)
    context = StepContext(jnp.int32(0), jax.random.key(0))
    compiled = devices.run.lower(jnp.zeros((8, 8000)), devices.state, context).compile()
    sizes: dict = {}
    for c in explain_sharding(compiled, devices.mesh):
        if c.bytes > 4:  # not whether all is finite
            sizes[c.kind, c.axes] = sizes.get((c.kind, c.axes), 0) + c.bytes
    payload = compressor.payload_bytes(1000)
    assert payload == 125 + 4
    assert sizes["all-to-all", ("replica",)] == 2 * payload + 2 * payload  # to owners, and back
    within = 2 * 3 / 4 * 4 * 8000  # summed in shards before, and gathered after
    assert two_way.sent(Compression(), 8000, 2, 4) == SentBytes(within, 2 * payload)
    compiled_bytes = collectives.sent(explain_sharding(compiled, devices.mesh), devices.mesh.shape)
    assert (compiled_bytes.within, compiled_bytes.between) == pytest.approx((within, 2 * payload), abs=16)


@pytest.mark.slow
@pytest.mark.skipif(not DOCS.exists(), reason="runs in a checkout")
def test_the_loop_of_the_documents_finds_the_parameters():
    (block,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    names = {}
    exec(block, names)
    np.testing.assert_allclose(names["params"]["w"], names["true"], atol=1e-2)


def test_the_mean_of_ones_own_loop_has_the_momentum_and_the_owners_that_were_asked_for():
    """Workers send all they have, owners two of three values of each of their chunks, with nothing remembered."""
    reduction = compress_gradients(
        Identity(), owner=TopKEntries(k=2), error_feedback="none", momentum=0.5, axes=("data",)
    )
    params = {"b": jnp.zeros(4), "w": jnp.zeros((4, 5))}
    state = {name: x[:, None] for name, x in reduction.init(params, hosts=8).items()}
    step = jax.jit(jax.vmap(reduction.update, axis_name="data"))
    moment = np.zeros(24)
    for seed in range(3):
        given = gradients(seed, 24)
        found, state = step({"b": given[:, :4], "w": given[:, 4:].reshape(8, 4, 5)}, state)
        moment = 0.5 * moment + given.mean(0)
        wanted = (given.mean(0) + 0.5 * moment).reshape(8, 3)
        wanted = np.where(np.abs(wanted) > np.abs(wanted).min(axis=1, keepdims=True), wanted, 0).ravel()
        assert {path: x.shape for path, x in found.items()} == {"b": (8, 4), "w": (8, 4, 5)}
        got = np.concatenate([np.asarray(x).reshape(8, -1) for x in found.values()], axis=1)
        np.testing.assert_allclose(got, np.tile(wanted, (8, 1)), atol=1e-5)


def forgotten_key():
    reduction = compress_gradients(RandomKEntries(scale="none"), error_feedback="corrected", axes=("data",))
    state = jax.tree.map(lambda x: x[:1], reduction.init({"w": jnp.zeros(32)}, hosts=8))
    reduction.update({"w": jnp.zeros(32)}, state, learning_rate=1.0)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: Compression(error_feedback="dense"), "error_feedback must be one of vanilla, corrected, none"),
        (lambda: Compression(error_feedback="sparse"), "is 'vanilla' here, with RandomKEntries and no other owner"),
        (lambda: Compression(momentum=1.0), r"momentum must be in \[0, 1\); got 1.0"),
        (lambda: Devices(Compression(compressor=TopKEntries(k=500))).reduce(gradients(0)), "500"),
        (
            lambda: Devices(Compression(compressor=RandomKEntries(scale="n/k"))),
            "overshoot. Set scale='none' of it .--set strategy.compression.compressor.scale=none., or "
            "error_feedback='none' .--set strategy.compression.error_feedback=none.",
        ),
        (
            lambda: Devices(Compression(owner=RandomKEntries(scale="n/k"))),
            "owner: random-k.*--set strategy.compression.owner.scale=none",
        ),
        (
            lambda: Devices(Compression(compressor=LinearDithering(levels=5, scale="l2"))),
            "of rows of 125 values would grow.*rows of 100 and more. Set scale='max'.*compressor.scale=max",
        ),
        (lambda: forgotten_key(), "random-k, k=.* is random and needs a key"),
        (lambda: Compression(momentum="0.5"), r"momentum must be in \[0, 1\); got '0.5'"),
        (lambda: Compression(bucket_bytes=1.5), "bucket_bytes must be a whole number of at least 1; got 1.5"),
        (lambda: Compression(plain_below=True), "plain_below must be a whole number of at least 0; got True"),
        (lambda: Compression(bucket_bytes=0), "bucket_bytes must be a whole number of at least 1; got 0"),
        (lambda: Compression(compressor=None), r"compressor must be a compressor.*got None: it has no traits, check"),
        (lambda: Compression(compressor=OneBit), r"compressor must be a compressor, such as OneBit\(\).*it is a class"),
        (lambda: Compression(owner="onebit"), "owner must be a compressor.*got 'onebit': it has no traits, check"),
        (lambda: compress_gradients(Compression(), axes=("data",)), "compressor must be a compressor.*has no traits"),
        (lambda: two_way.flat({"w": np.zeros(3)}), "'w' is float64"),
    ],
)
def test_what_does_not_go_is_refused(run, message):
    with pytest.raises(UserError, match=message):
        run()


NODES = {"node": 2, "gpu": 4}


def on_mesh(given, *, axes=("data",), fast=(), mesh=None, init=None, of=None, check_vma=True, **fields):
    """What `update` returns of [8, ...] in a shard_map over a mesh of one's own, all gradients in one pytree."""
    mesh = mesh or {"data": 8}
    mesh = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh))
    reduction = compress_gradients(**{"compressor": OneBit(), **fields}, axes=axes, fast=fast)
    local = 1 if not fast else mesh.shape["gpu"]
    of = jax.tree.map(lambda x: x[0], given) if of is None else of
    state = reduction.init(of, **({"hosts": 8 // local, "local": local} if init is None else init))
    over = P(mesh.axis_names)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(over, over), out_specs=(P(), over), check_vma=check_vma)
    def run(given, state):
        return reduction.update(jax.tree.map(lambda x: x[0], given), state, jax.random.key(0), 0.5)

    return jax.tree.map(np.asarray, jax.jit(run)(given, state))


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"axes": ["data"], "compressor": TopKEntries(k=3), "error_feedback": "corrected"},
        {"axes": "data", "compressor": RandomKEntries(k=0.2), "momentum": 0.5},
        {"axes": "data", "compressor": LinearDithering(levels=5), "error_feedback": "none"},
        {"axes": "data", "compressor": Blocks()},
        {"axes": "node", "fast": "gpu", "mesh": NODES},
        {"axes": "replica", "fast": "gpu", "mesh": {"replica": 2, "gpu": 4}},
        {"axes": ("node", "gpu"), "mesh": NODES, "owner": Identity()},
    ],
    ids=["onebit", "topk", "randomk", "linear", "int4", "2x4", "replica", "owner"],
)
def test_a_shard_map_that_checks_what_varies_gets_the_same_bits(how):
    given = {"b": gradients(0, 13), "w": gradients(1, 60).reshape(8, 6, 10)}
    checked, unchecked = (on_mesh(given, **how, check_vma=check) for check in (True, False))
    jax.tree.map(np.testing.assert_array_equal, checked, unchecked)
    assert np.abs(checked[0]["w"]).max() > 0


def summed_already():
    """The gradient of parameters that are the same on all devices, under check_vma=True."""
    reduction = compress_gradients(OneBit(), axes="data")
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    state = reduction.init({"w": jnp.zeros(20)}, hosts=8)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P("data")))
    def run(params, x, state):
        return reduction.update(jax.grad(lambda p: (x[0] * p["w"]).sum())(params), state)

    jax.eval_shape(run, {"w": jnp.zeros(20)}, jnp.ones((8, 20)), state)


def of_twenty(**fields):
    return on_mesh({"w": gradients(0, 20)}, **fields)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: of_twenty(axes=()), "must be different names, at least one of them in axes"),
        (lambda: of_twenty(axes="node", fast="node", mesh=NODES), "'node' must be different names"),
        (lambda: of_twenty(axes="node"), "no mesh axis of one of the names node here"),
        (
            lambda: of_twenty(init={"hosts": 16}),
            r"'worker': \[2, 16, 2\].*want .*'worker': \[1, 8, 3\].*hosts=8, local=1",
        ),
        (lambda: of_twenty(init={"hosts": 1, "local": 8}), "local=8 are devices along the axes `fast`.*there are none"),
        (lambda: of_twenty(init={"hosts": 0}), "hosts must be a whole number of at least 1; got 0"),
        (lambda: of_twenty(init={"hosts": 8, "local": None}), "local must be a whole number of at least 1; got None"),
        (lambda: of_twenty(of={"w": jnp.zeros(200)}), r"'owner': \[1, 25\].*gradients of 20 values.*'owner': \[1, 3\]"),
        (lambda: on_mesh({"n": np.ones((8, 20), np.int32)}), r"gradient of \"\['n'\]\" is int32"),
        (lambda: on_mesh({}), "a row must have 1 to"),
        (summed_already, r"the same along data: under check_vma=True.*pcast\(params, \('data',\), to=\"varying\"\)"),
    ],
)
def test_what_does_not_go_in_a_loop_of_ones_own_is_refused(run, message):
    with pytest.raises(UserError, match=message):
        run()
