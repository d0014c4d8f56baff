"""Experts in the place of a decoder's MLP: a router sends every token to a few of many gated MLPs.

    LlamaConfig(..., ffn_dim=256, mlp=Experts(count=8, router=TopK(k=2)))

Every token takes the k experts of its largest scores, and y = sum_j g_j FFN_j(x) with the scores of the chosen ones
over their sum (Mixtral, arXiv 2401.04088). Two losses can be asked for, each a sum over tokens and a mean over layers:

    balance   n sum_i f_i p_i with p_i the score of expert i and f_i the choices of it a token, over the global batch
              (Fedus et al., arXiv 2101.03961); f enters as a constant
    z         logsumexp(logits)^2 (Zoph et al., arXiv 2202.08906)

Axes: B rows, S positions, T = B S tokens, E model, F hidden, n experts, L layers.
"""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.kernels.grouped_matmul import grouped_matmul
from scalejax.models.llm.expert_use import ExpertUse
from scalejax.models.llm.llama3.parts import Numbers, StackedNormal
from scalejax.nn import routing
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.mesh import BATCH_AXES

if TYPE_CHECKING:
    from scalejax.models.llm.llama3.config import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """Every token takes k experts.

    Attributes:
      k: Experts of a token.
      scores: "softmax" over all experts as in Mixtral, or "sigmoid" of each.
      balance: Factor on the balance loss.
      z: Factor on the z loss.
      capacity_factor: In training and its evaluations an expert has room for this many times T k / n tokens of a
        device; what is beyond is dropped, by position, and counted. Generation drops nothing. None = nor does this.
    """

    k: int = 2
    scores: routing.Scores = "softmax"
    balance: float = 0.01
    z: float = 0.0
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"TopK: k must be a whole number of at least 1; got {self.k!r}.")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"TopK: scores must be softmax or sigmoid; got {self.scores!r}.")
        for field in ("balance", "z"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"TopK: {field} must be 0 or more, and finite; got {getattr(self, field)}.")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"TopK: capacity_factor must be above 0 and finite, or None; got {self.capacity_factor}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Gated MLPs, `ffn_dim` of the config wide each.

    Attributes:
      count: n, experts of a layer.
      router: Who takes whom.
      execution: "grouped": tokens sorted by expert, nothing dropped (`kernels.grouped_matmul`). "batched": all experts
        at once, each with the same number of places. "sequential": the same, one expert after another.
    """

    count: int = 8
    router: TopK = TopK()
    execution: Literal["grouped", "batched", "sequential"] = "grouped"

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"Experts: count must be a whole number of at least 1; got {self.count!r}.")
        if self.router.k > self.count:
            raise ValueError(f"Experts: router.k must be at most count; got {self.router.k} of {self.count} experts.")
        if self.execution not in ("grouped", "batched", "sequential"):
            raise ValueError(f"Experts: execution must be grouped, batched or sequential; got {self.execution!r}.")
        if (self.execution == "grouped") != (self.router.capacity_factor is None):
            raise ValueError(
                f"Experts: execution={self.execution!r} does not go with router.capacity_factor="
                f"{self.router.capacity_factor}. Without a capacity experts get as many tokens as chose them, which is "
                "execution='grouped'; with one they all have equally many places, 'batched' or 'sequential'."
            )

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "ExpertLayers":
        """See `llama3.parts.MlpPart`."""
        return ExpertLayers(self, config, rngs, dtypes)

    def macs(self, config: "LlamaConfig") -> int:
        """See `llama3.parts.RoutedPart`: the router, and k gated MLPs."""
        return config.dim * self.count + self.router.k * 3 * config.dim * config.ffn_dim

    def losses(self, numbers: Numbers) -> jax.Array:
        """wide[]: the losses of the router over all rows, to be added to the sum of those of the targets."""
        router, layers = self.router, numbers["load"].shape[1]
        return (router.balance * numbers["balance"].sum() + router.z * numbers["z"].sum()) / layers

    def sums(self, numbers: Numbers) -> dict[str, jax.Array]:
        """Sums over all rows that `ExpertUse` measures."""
        return {f"experts/{name}": numbers[name].sum(0) for name in ("entropy", "dropped", "tokens", "load")}

    def metrics(self, layers: int) -> tuple[ExpertUse, ...]:
        """How evenly experts are used."""
        return (ExpertUse(layers=layers, experts=self.count, k=self.router.k),)


class ExpertLayers(nnx.Module):
    """The experts and routers of all layers; used one layer at a time."""

    def __init__(self, part: Experts, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        normal = StackedNormal(config, rngs, dtypes.params)
        self.router = normal((config.dim, part.count), ("embed", "router"))
        self.gate = normal((part.count, config.dim, config.ffn_dim), ("experts", "embed", "hidden"))
        self.up = normal((part.count, config.dim, config.ffn_dim), ("experts", "embed", "hidden"))
        self.down = normal.to_stream((part.count, config.ffn_dim, config.dim), ("experts", "hidden", "embed"))
        self.part = part
        self.layers = config.layers
        self.compute_dtype = dtypes.compute

    def numbers(self, rows: int) -> Numbers:
        """Of no layers: what `with_numbers` adds to."""
        wide = nn.wide(self.compute_dtype)
        names = ("balance", "z", "entropy", "dropped", "tokens")
        return {
            **{name: jnp.zeros(rows, wide) for name in names},
            "load": jnp.zeros((rows, self.layers, self.part.count), wide),
            "layer": jnp.zeros(rows, jnp.int32),
        }

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, S, E] -> [B, S, E]; no token is dropped."""
        choice, _ = self._choose(x, jnp.ones(x.shape[:2], bool))
        return self._apply(x, choice, capacity=None)[0]

    def with_numbers(self, x: jax.Array, real: jax.Array, numbers: Numbers) -> tuple[jax.Array, Numbers]:
        """x [B, S, E] -> [B, S, E], and what this layer adds to the numbers.

        Args:
          x: compute_dtype[B, S, E].
          real: bool[B, S], False = padding, which goes to no expert and counts nowhere.
          numbers: Of the layers before.
        """
        (rows, positions), part = x.shape[:2], self.part
        router = part.router
        choice, logits = self._choose(x, real)
        capacity = None
        if router.capacity_factor is not None:
            shards = _row_shards(rows)
            capacity = math.ceil(router.capacity_factor * rows // shards * positions * router.k / part.count)
        y, placed = self._apply(x, choice, capacity=capacity)

        def by_row(x: jax.Array) -> jax.Array:
            return x.reshape(rows, positions, *x.shape[1:]).sum(1)

        wide = choice.scores.dtype
        flat = real.reshape(-1)
        tokens = flat.astype(wide)
        load = _one_hot_sum(choice.experts, part.count, rows).astype(wide)
        total, all_tokens = _over_batch(load.sum(0)), _over_batch(tokens.sum())
        share = jax.lax.stop_gradient(total / jnp.maximum(all_tokens, 1))
        scores = choice.scores / jnp.maximum(choice.scores.sum(1, keepdims=True), jnp.finfo(wide).tiny)
        logs = jnp.log(jnp.maximum(scores, jnp.finfo(wide).tiny))
        added = {
            "balance": part.count * by_row(tokens * (scores * share[None, :]).sum(1)),
            "z": by_row(tokens * jax.nn.logsumexp(logits, axis=1) ** 2),
            "entropy": -jax.lax.stop_gradient(by_row(tokens * (scores * logs).sum(1))),
            "dropped": load.sum(1) - placed,
            "tokens": by_row(tokens),
        }
        here = jnp.arange(self.layers, dtype=jnp.int32)[None, :] == numbers["layer"][:, None]
        found = {name: numbers[name] + value for name, value in added.items()}
        found["load"] = numbers["load"] + jnp.where(here[:, :, None], load[:, None, :], 0)
        return y, {**found, "layer": numbers["layer"] + 1}

    def _choose(self, x: jax.Array, real: jax.Array) -> tuple[routing.TokenChoice, jax.Array]:
        router, wide = self.part.router, nn.wide(self.compute_dtype)
        logits = nn.project(x.astype(wide), self.router[...].astype(wide)).reshape(-1, self.part.count)
        return routing.choose_experts(logits, real.reshape(-1), k=router.k, scores=router.scores), logits

    def _apply(self, x: jax.Array, choice: routing.TokenChoice, *, capacity: int | None) -> tuple[jax.Array, jax.Array]:
        """y [B, S, E], and wide[B], the choices of each row that had a place."""
        rows, positions = x.shape[:2]
        k = choice.experts.shape[1]
        experts, gates = (a.reshape(rows, positions, k) for a in (choice.experts, choice.gates))
        weights = [p[...].astype(self.compute_dtype) for p in (self.gate, self.up, self.down)]
        local = functools.partial(_local, capacity=capacity, execution=self.part.execution)
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and mesh.size > 1:
            token = ("batch", "sequence", None)
            local = shard_kernel(
                local,
                in_axes=(token, token, token, *3 * ((None, None, None),)),
                out_axes=(token, ("batch", "sequence")),
                rules=ACTIVATIONS,
            )
        y, placed = local(x, experts, gates, *weights)
        return y, placed.sum(1)


def _local(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    down: jax.Array,
    *,
    capacity: int | None,
    execution: Literal["grouped", "batched", "sequential"],
) -> tuple[jax.Array, jax.Array]:
    """What a device does with its tokens: y [B, S, E], and wide[B, S], the choices of a token that had a place."""
    count, tokens = gate.shape[0], x.shape[0] * x.shape[1]
    flat, k = x.reshape(tokens, x.shape[2]), experts.shape[2]
    chosen, weighed = experts.reshape(tokens, k), gates.reshape(tokens, k)
    if capacity is None:
        block = _block(tokens * k, count)
        routes, sizes = routing.routes_in_groups(chosen, weighed, count=count, block=block)
        run = functools.partial(grouped_matmul, sizes=sizes, block=block)
        rows = routing.dispatch(flat, routes)
        results = run(jax.nn.silu(run(rows, gate)) * run(rows, up), down)
    else:
        routes = routing.routes_with_capacity(chosen, weighed, count=count, capacity=capacity)
        rows = routing.dispatch(flat, routes).reshape(count, capacity, -1)

        def one(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

        if execution == "batched":
            results = jax.vmap(one)(rows, gate, up, down)
        else:
            results = jnp.stack([one(*each) for each in zip(rows, gate, up, down, strict=True)])
        results = results.reshape(count * capacity, -1)
    y = routing.combine(results, routes).reshape(x.shape)
    # Of a float dtype, as an integer would have no cotangent for `shard_kernel` to divide.
    return y, routes.used.sum(1).astype(gates.dtype).reshape(x.shape[:2])


def _block(choices: int, experts: int) -> int:
    """Rows of a block: a power of 2 up to 128, not above the mean of an expert, so that few places stay empty."""
    return 1 << max(0, min(7, (choices // experts).bit_length() - 1))


def _one_hot_sum(experts: jax.Array, count: int, rows: int) -> jax.Array:
    """int32[B, n], choices of each expert in each row."""
    return jax.vmap(functools.partial(routing.count_choices, count=count))(experts.reshape(rows, -1, experts.shape[1]))


def _manual_batch_axes() -> tuple[str, ...]:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in BATCH_AXES if axis in manual)


def _over_batch(total: jax.Array) -> jax.Array:
    """A sum over the global batch: the compiler's where the batch is cut by it, ours where axes are manual."""
    axes = _manual_batch_axes()
    return jax.lax.psum(total, axes) if axes else total


def _row_shards(rows: int) -> int:
    """Devices over which the compiler cuts these rows, as `shard_kernel` does."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    count = math.prod(mesh.shape[axis] for axis in BATCH_AXES if axis not in mesh.manual_axes)
    return count if rows % count == 0 else 1
