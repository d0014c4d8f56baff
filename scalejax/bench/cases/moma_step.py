"""The training step of a model with experts that choose, against this project's dense model of as many FLOPs a token.

One step is forward, backward, clipping by the global norm and AdamW; "examples" are tokens, half of them of images in
every row. The peer `dense` is the same model with one gated MLP of the same width in the place of the experts, of which
each sees a token in the mean once. Cases:

    1t1i    a gated MLP each for text and images, weighed by a gate
    8x      eight experts for all tokens
    4t4i    four experts each for text and images

On a CPU float32, 16 rows of 128 tokens, 4 layers of width 128, hidden 384; on a GPU the 435M class of the paper (MoMa,
arXiv 2407.21770, Table 1) in bfloat16, 6 rows of 4,096 tokens. The paper's own costs (Table 2) are throughputs of 0.94,
0.91 and 0.83 of dense.

Figures: `cpu_ratio` is the ratio of CPU seconds of the process, median over turns, which other programs on the machine
disturb less than they do the clock. `routing` (scores, and who takes whom), `gather` (the ways of tokens to their
places and back) and `experts` are shares of a step: each piece of one layer is compiled alone, with its gradients, and
its least time of five, times the layers, is divided by the least time of five steps (on a CPU, CPU seconds). What
begins with `empty` are shares of the places of experts that no token has, counted, with P percent of images in every
row: `empty_P_in_0.1` where the bounds of the data are 0.1 around that share, `empty_P_in_any` where they are 0 and 1.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.bench import machine
from scalejax.bench.harness import Contest, OutputsDiffer, Timed, best_seconds
from scalejax.bench.token_step import TokenStep
from scalejax.data.images.interleaved import capacities
from scalejax.data.text.tokens import TokenSchema
from scalejax.models.llm import moma
from scalejax.models.llm.experts import ExpertChoice, Experts
from scalejax.models.llm.llama3 import LlamaConfig
from scalejax.models.llm.llama3.parts import GatedMlp, OutputRmsNorm
from scalejax.models.llm.moma import ModalityExperts
from scalejax.nn import routing

CASES = ("1t1i", "8x", "4t4i")
PEERS = ("dense",)

PARTS = {
    "1t1i": ModalityExperts(groups=(("text", 1), ("image", 1))),
    "8x": Experts(count=8, router=ExpertChoice(), execution="batched"),
    "4t4i": ModalityExperts(groups=(("text", 4), ("image", 4))),
}

FLOPS_TOLERANCE = 0.05
"""Of the FLOPs a token of the dense model."""

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True)
class Size:
    """A dense model, and rows of a batch by their tokens."""

    model: LlamaConfig
    rows: int
    length: int


_CPU_SIZE = Size(
    LlamaConfig(
        layers=4, dim=128, ffn_dim=384, heads=4, kv_heads=4, vocabulary=512, remat="none", unroll=4,
        norm=OutputRmsNorm(),
    ),
    16, 128,
)  # fmt: skip


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    gpu = Size(moma.published("435M", GatedMlp()), 6, 4096)
    return contest(case, against, _CPU_SIZE if machine.on_cpu() else gpu)


def contest(case: str, against: str | None, size: Size) -> Contest:
    """Ours and the dense model's step on batches of equal shape."""
    device, schema = jax.devices()[0], schema_of(size, (0.5, 0.5))
    model = dataclasses.replace(size.model, mlp=PARTS[case])
    ours = TokenStep(model, device, size.rows, schema)
    timed = Timed(ours.steps, time.process_time)
    timed_peer = None
    if against is not None:
        timed_peer = Timed(TokenStep(size.model, device, size.rows, schema).steps, time.process_time)

    def check() -> None:
        ours_, dense = (m.bound(schema).flops_per_token(size.length) for m in (model, size.model))
        if abs(ours_ / dense - 1) > FLOPS_TOLERANCE:
            raise OutputsDiffer(f"{case} has {ours_:,} FLOPs a token, the dense model {dense:,}")

    def figures() -> dict[str, float]:
        clock = time.process_time if device.platform == "cpu" else time.perf_counter
        step = best_seconds(lambda: ours.steps(1), clock)
        seconds = {name: best_seconds(run, clock) for name, run in pieces(case, size).items()}
        found = {name: size.model.layers * of_layer / step for name, of_layer in seconds.items()}
        if timed_peer is not None and device.platform == "cpu":
            found = {"cpu_ratio": timed_peer.seconds() / timed.seconds(), **found}
        for share in SHARES:
            for name, room in (("0.1", 0.1), ("any", 1.0)):
                bounds = max(0.0, share - room), min(1.0, share + room)
                found[f"empty_{100 * share:.0f}_in_{name}"] = empty_places(case, size, share, bounds)
        return found

    tokens = size.rows * size.length
    return Contest(timed, tokens, machine.device_name(device), timed_peer, check, figures=figures)


def schema_of(size: Size, bounds: tuple[float, float]) -> TokenSchema:
    """Tokens of which the upper half of the ids are images, from `bounds` of every row."""
    assert size.model.vocabulary is not None
    vocabulary = size.model.vocabulary
    ranges = (("text", 0, vocabulary // 2), ("image", vocabulary // 2, vocabulary))
    return TokenSchema(vocabulary, size.length, ("text", "image"), capacities(size.length, bounds), ranges)


def groups_of(case: str, size: Size, bounds: tuple[float, float]) -> list[tuple[int, int]]:
    """(experts, places of tokens in a row) of the groups of a layer."""
    part = PARTS[case]
    if isinstance(part, Experts):
        return [(part.count, size.length)]
    places = capacities(size.length, bounds)
    return [(count, places[number]) for number, (_, count) in enumerate(part.groups)]


def empty_places(case: str, size: Size, share: float, bounds: tuple[float, float]) -> float:
    """The share of places that no token has, where `share` of every row are images and the data say `bounds`."""
    used, all_places = 0, 0
    images = round(share * size.length)
    groups = groups_of(case, size, bounds)
    for (count, room), own in zip(
        groups, (size.length - images, images) if len(groups) > 1 else (size.length,), strict=True
    ):
        real = np.tile(np.arange(room) < own, size.rows)
        scores = jax.random.uniform(jax.random.key(0), (real.size, count))
        routes = routing.choose_tokens(scores, jnp.asarray(real), capacity=max(1, real.size // count))
        used += int((routes.tokens < real.size).sum())
        all_places += routes.tokens.size
    return 1 - used / all_places


def pieces(case: str, size: Size) -> dict[str, Callable[[], object]]:
    """What one layer does, each with its gradients, by name."""
    dtype = jnp.float32 if machine.on_cpu() else jnp.bfloat16
    dim, hidden, keys = size.model.dim, size.model.ffn_dim, iter(jax.random.split(jax.random.key(0), 64))
    normal = lambda *shape, dtype=dtype: jax.random.normal(next(keys), shape, dtype) / shape[-1] ** 0.5  # noqa: E731
    x = normal(size.rows, size.length, dim)
    groups = groups_of(case, size, (0.5, 0.5))
    kind = np.stack([np.random.default_rng(row).permutation(size.length) % len(groups) for row in range(size.rows)])
    routers, weights, orders, chosen, placed = [], [], [], [], []
    for number, (count, room) in enumerate(groups):
        orders.append(jax.vmap(functools.partial(routing.routes_of_some, size=room))(jnp.asarray(kind == number)))
        routers.append(normal(dim, count, dtype=jnp.float32))
        weights.append([normal(count, *shape) for shape in ((dim, hidden), (dim, hidden), (hidden, dim))])
        placed.append(normal(count, size.rows * room // count, dim))
        tokens = normal(size.rows, room, dim)
        chosen.append(_choose(tokens, routers[-1]))

    def route(tokens: list[jax.Array], routers: list[jax.Array]) -> list[jax.Array]:
        return [_choose(t, router).gates for t, router in zip(tokens, routers, strict=True)]

    def gather(x: jax.Array, gates: list[jax.Array]) -> jax.Array:
        y = jnp.zeros_like(x)
        for order, routes, gate in zip(orders, chosen, gates, strict=True):
            routes = dataclasses.replace(routes, gates=gate)
            if len(groups) == 1:
                return routing.combine(routing.dispatch(x.reshape(-1, dim), routes), routes).reshape(x.shape)
            of_group = jax.vmap(routing.dispatch)(x, order)
            back = routing.combine(routing.dispatch(of_group.reshape(-1, dim), routes), routes).reshape(of_group.shape)
            y += jax.vmap(routing.dispatch)(back, routing.reverse(order))
        return y

    def experts(placed: list[jax.Array], weights: list[list[jax.Array]]) -> list[jax.Array]:
        return [jax.vmap(_gated_mlp)(rows, *w) for rows, w in zip(placed, weights, strict=True)]

    tokens = [normal(size.rows, room, dim) for _, room in groups]
    return {
        "routing": _with_gradients(route, tokens, routers),
        "gather": _with_gradients(gather, x, [routes.gates for routes in chosen]),
        "experts": _with_gradients(experts, placed, weights),
    }


def _choose(tokens: jax.Array, router: jax.Array) -> routing.Routes:
    flat = tokens.reshape(-1, tokens.shape[-1]).astype(jnp.float32)
    real, capacity = jnp.ones(flat.shape[0], bool), flat.shape[0] // router.shape[1]
    return routing.choose_tokens(jax.nn.sigmoid(flat @ router), real, capacity=capacity)


def _gated_mlp(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def _with_gradients(piece: Callable[..., object], *given: object) -> Callable[[], object]:
    def run(given: tuple[object, ...]) -> object:
        y, back = jax.vjp(piece, *given)
        return y, back(y)

    compiled = jax.jit(run)
    return lambda: jax.block_until_ready(compiled(given))
