"""Experts in the place of a decoder's MLP: a router sends every token to a few of many gated MLPs.

    LlamaConfig(..., ffn_dim=256, mlp=Experts(count=8, router=TopK(k=2)))

`TopK`: every token takes the k experts of its largest scores, and y = sum_j g_j FFN_j(x) with the scores of the chosen
ones over their sum (Mixtral, arXiv 2401.04088). Two losses can be asked for, each a sum over tokens and a mean over
layers:

    balance   n sum_i f_i p_i with p_i the score of expert i and f_i the choices of it a token, over the global batch
              (Fedus et al., arXiv 2101.03961); f enters as a constant
    z         logsumexp(logits)^2 (Zoph et al., arXiv 2202.08906)

`ExpertChoice`: every expert takes its k = floor(b / n) best of b tokens, at least 1, by sigmoid scores, which are also
the weights (MoMa, arXiv 2407.21770). All experts do equal work, and a token may be seen by none. Who is taken depends
on later tokens, so that losses are too good, and nothing can be generated.

Axes: B rows, S positions, T = B S tokens, E model, F hidden, n experts, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.kernels.grouped_matmul import grouped_gated_mlp
from scalejax.models.llm.expert_use import ExpertUse
from scalejax.models.llm.llama3.parts import Numbers, StackedNormal
from scalejax.nn import routing
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.mesh import BATCH_AXES

if TYPE_CHECKING:
    from scalejax.models.llm.llama3.config import LlamaConfig

Execution = Literal["grouped", "batched", "sequential"]


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

    def active(self, experts: int) -> int:
        """Experts that see a token."""
        del experts
        return self.k


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Every expert takes its best tokens.

    Attributes:
      group: Of which tokens: "sequence", those of a row; "device", all that a device has of a part of the batch, which
        other meshes and other numbers of parts change.
    """

    group: Literal["sequence", "device"] = "device"

    def __post_init__(self) -> None:
        if self.group not in ("sequence", "device"):
            raise ValueError(f"ExpertChoice: group must be sequence or device; got {self.group!r}.")

    def active(self, experts: int) -> int:
        """Experts that see a token, in the mean."""
        del experts
        return 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Gated MLPs, `ffn_dim` of the config wide each.

    Attributes:
      count: n, experts of a layer.
      router: Who takes whom.
      execution: "grouped": tokens sorted by expert, nothing dropped (`kernels.grouped_matmul`), for `TopK` without a
        capacity. "batched": all experts at once, each with the same number of places. "sequential": the same, one
        expert after another.
    """

    count: int = 8
    router: TopK | ExpertChoice = TopK()
    execution: Execution = "grouped"

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"Experts: count must be a whole number of at least 1; got {self.count!r}.")
        if self.router.active(self.count) > self.count:
            k = self.router.active(self.count)
            raise ValueError(f"Experts: router.k must be at most count; got {k} of {self.count} experts.")
        if self.execution not in ("grouped", "batched", "sequential"):
            raise ValueError(f"Experts: execution must be grouped, batched or sequential; got {self.execution!r}.")
        uneven = isinstance(self.router, TopK) and self.router.capacity_factor is None
        if (self.execution == "grouped") != uneven:
            raise ValueError(
                f"Experts: execution={self.execution!r} does not go with router={self.router}. Where experts get as "
                "many tokens as chose them, which is TopK without a capacity_factor, take execution='grouped'; where "
                "all have equally many places, 'batched' or 'sequential'."
            )

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "ExpertLayers":
        """See `llama3.parts.MlpPart`."""
        return ExpertLayers(self, config, rngs, dtypes)

    @property
    def generates(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return isinstance(self.router, TopK)

    def macs(self, config: "LlamaConfig") -> int:
        """See `llama3.parts.RoutedPart`: the router, and the gated MLPs that see a token."""
        return config.dim * self.count + self.router.active(self.count) * 3 * config.dim * config.ffn_dim

    def losses(self, numbers: Numbers) -> jax.Array:
        """wide[]: the losses of the router over all rows, to be added to the sum of those of the targets."""
        router, layers = self.router, numbers["load"].shape[1]
        if isinstance(router, ExpertChoice):
            return jnp.zeros((), numbers["tokens"].dtype)
        return (router.balance * numbers["balance"].sum() + router.z * numbers["z"].sum()) / layers

    def sums(self, numbers: Numbers) -> dict[str, jax.Array]:
        """Sums over all rows that `ExpertUse` measures."""
        return {f"experts/{name}": numbers[name].sum(0) for name in ("entropy", "dropped", "unseen", "tokens", "load")}

    def metrics(self, layers: int) -> tuple[ExpertUse, ...]:
        """How evenly experts are used."""
        return (ExpertUse(layers=layers, experts=self.count, k=self.router.active(self.count)),)


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
        names = ("balance", "z", "entropy", "dropped", "unseen", "tokens")
        return {
            **{name: jnp.zeros(rows, wide) for name in names},
            "load": jnp.zeros((rows, self.layers, self.part.count), wide),
            "layer": jnp.zeros(rows, jnp.int32),
        }

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [B, S, E] -> [B, S, E]; no token is dropped.

        Raises:
          UserError: experts choose, for which all tokens have to be there.
        """
        router = self.part.router
        if isinstance(router, ExpertChoice):
            raise UserError(
                "model.mlp.router is ExpertChoice: which tokens an expert takes depends on later ones, so that nothing "
                "can be generated. Train with TopK to generate."
            )
        choice, _ = self._choose(x, jnp.ones(x.shape[:2], bool), router)
        return self._to_chosen(x, choice, capacity_factor=None)[0]

    def with_numbers(self, x: jax.Array, real: jax.Array, numbers: Numbers) -> tuple[jax.Array, Numbers]:
        """x [B, S, E] -> [B, S, E], and what this layer adds to the numbers.

        Args:
          x: compute_dtype[B, S, E].
          real: bool[B, S], False = padding, which goes to no expert and counts nowhere.
          numbers: Of the layers before.
        """
        router = self.part.router
        if isinstance(router, ExpertChoice):
            logits = self._logits(x)
            scores = jax.nn.sigmoid(logits)
            y, used = self._to_choosing(x, scores, real)
            return y, self._add(numbers, logits, scores, real, used, jnp.zeros_like(real, scores.dtype))
        choice, logits = self._choose(x, real, router)
        y, placed = self._to_chosen(x, choice, capacity_factor=router.capacity_factor)
        chosen = choice.experts.reshape(*real.shape, router.k)
        experts = jnp.arange(self.part.count, dtype=chosen.dtype)
        asked = (chosen[..., None] == experts[None, None, None, :]).any(2).astype(choice.scores.dtype)  # B S n
        return y, self._add(numbers, logits, choice.scores.reshape(asked.shape), real, asked, asked.sum(2) - placed)

    def _add(
        self,
        numbers: Numbers,
        logits: jax.Array,
        scores: jax.Array,
        real: jax.Array,
        asked: jax.Array,
        dropped: jax.Array,
    ) -> Numbers:
        """What this layer adds: logits, scores and `asked` (who was to see whom) [B, S, n], `dropped` wide[B, S]."""
        wide, count = scores.dtype, self.part.count
        tokens, load = real.astype(wide), asked.sum(1)
        total, all_tokens = _over_batch(load.sum(0)), _over_batch(tokens.sum())
        share = jax.lax.stop_gradient(total / jnp.maximum(all_tokens, 1))
        tiny = jnp.finfo(wide).tiny
        shares = scores / jnp.maximum(scores.sum(2, keepdims=True), tiny)
        added = {
            "balance": count * (tokens * (shares * share[None, None, :]).sum(2)).sum(1),
            "z": (tokens * jax.nn.logsumexp(logits, axis=2) ** 2).sum(1),
            "entropy": -jax.lax.stop_gradient((tokens * (shares * jnp.log(jnp.maximum(shares, tiny))).sum(2)).sum(1)),
            "dropped": dropped.sum(1),
            "unseen": (tokens * (asked.sum(2) == dropped)).sum(1),
            "tokens": tokens.sum(1),
        }
        here = jnp.arange(self.layers, dtype=jnp.int32)[None, :] == numbers["layer"][:, None]
        found = {name: numbers[name] + value for name, value in added.items()}
        found["load"] = numbers["load"] + jnp.where(here[:, :, None], load[:, None, :], 0)
        return {**found, "layer": numbers["layer"] + 1}

    def _logits(self, x: jax.Array) -> jax.Array:
        """wide[B, S, n]."""
        wide = nn.wide(self.compute_dtype)
        return nn.project(x.astype(wide), self.router[...].astype(wide))

    def _choose(self, x: jax.Array, real: jax.Array, router: TopK) -> tuple[routing.TokenChoice, jax.Array]:
        logits = self._logits(x)
        flat = logits.reshape(-1, self.part.count)
        return routing.choose_experts(flat, real.reshape(-1), k=router.k, scores=router.scores), logits

    def _to_chosen(
        self, x: jax.Array, choice: routing.TokenChoice, *, capacity_factor: float | None
    ) -> tuple[jax.Array, jax.Array]:
        """y [B, S, E], and wide[B, S], the choices of each token that had a place."""
        experts, gates = (a.reshape(*x.shape[:2], -1) for a in (choice.experts, choice.gates))
        local = functools.partial(_chosen, capacity_factor=capacity_factor, execution=self.part.execution)
        y, placed = self._on_devices(local, "sequence", x, experts, gates)
        return y, placed[..., 0]

    def _to_choosing(self, x: jax.Array, scores: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        """y [B, S, E], and wide[B, S, n], 1 where an expert took a token."""
        router = self.part.router
        assert isinstance(router, ExpertChoice)
        local = functools.partial(_choosing, group=router.group, execution=self.part.execution)
        # A sequence is whole where experts choose among its tokens.
        positions = "sequence" if router.group == "device" else None
        return self._on_devices(local, positions, x, scores, real.astype(scores.dtype)[..., None])

    def _on_devices(
        self, local: Callable[..., tuple[jax.Array, jax.Array]], positions: str | None, *tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`local` of tokens [B, S, ...] and of all experts, each device of its rows and, if named, of its positions."""
        weights = [p[...].astype(self.compute_dtype) for p in (self.gate, self.up, self.down)]
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and mesh.size > 1:
            token = ("batch", positions, None)
            in_axes = (*len(tokens) * (token,), *3 * ((None, None, None),))
            local = shard_kernel(local, in_axes=in_axes, out_axes=(token, token), rules=ACTIVATIONS)
        return local(*tokens, *weights)


# What a device does with its tokens. Second results are of a float dtype: an integer has no cotangent.


def _chosen(
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    *weights: jax.Array,
    capacity_factor: float | None,
    execution: Execution,
) -> tuple[jax.Array, jax.Array]:
    """y [B, S, E], and wide[B, S, 1], the choices of a token that had a place."""
    count, tokens = weights[0].shape[0], x.shape[0] * x.shape[1]
    flat, k = x.reshape(tokens, x.shape[2]), experts.shape[2]
    chosen, weighed = experts.reshape(tokens, k), gates.reshape(tokens, k)
    if capacity_factor is None:
        block = _block(tokens * k, count)
        routes, sizes = routing.routes_in_groups(chosen, weighed, count=count, block=block)
        gate, up, down = weights
        results = grouped_gated_mlp(routing.dispatch(flat, routes), gate, up, down, sizes, block=block)
    else:
        capacity = math.ceil(capacity_factor * tokens * k / count)
        routes = routing.routes_with_capacity(chosen, weighed, count=count, capacity=capacity)
        results = _equal_work(routing.dispatch(flat, routes), weights, execution)
    y = routing.combine(results, routes).reshape(x.shape)
    return y, routes.used.sum(1).astype(gates.dtype).reshape(*x.shape[:2], 1)


def _choosing(
    x: jax.Array,
    scores: jax.Array,
    real: jax.Array,
    *weights: jax.Array,
    group: Literal["sequence", "device"],
    execution: Execution,
) -> tuple[jax.Array, jax.Array]:
    """y [B, S, E], and wide[B, S, n], 1 where an expert took a token."""
    count = weights[0].shape[0]

    def one(x: jax.Array, scores: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        routes = routing.choose_tokens(scores, real[:, 0] > 0, capacity=max(1, x.shape[0] // count))
        results = _equal_work(routing.dispatch(x, routes), weights, execution)
        return routing.combine(results, routes), routes.used.astype(scores.dtype)

    if group == "sequence":
        return jax.vmap(one)(x, scores, real)
    y, used = one(*(a.reshape(-1, a.shape[2]) for a in (x, scores, real)))
    return y.reshape(x.shape), used.reshape(scores.shape)


def _equal_work(rows: jax.Array, weights: tuple[jax.Array, ...], execution: Execution) -> jax.Array:
    """[P, E] -> [P, E]: every expert's equally many places, one expert after another."""

    def one(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

    placed = rows.reshape(weights[0].shape[0], -1, rows.shape[1])
    if execution == "batched":
        return jax.vmap(one)(placed, *weights).reshape(rows.shape)
    return jnp.concatenate([one(*each) for each in zip(placed, *weights, strict=True)])


def _block(choices: int, experts: int) -> int:
    """Rows of a block: a power of 2 up to 128, not above the mean of an expert, so that few places stay empty."""
    return 1 << max(0, min(7, (choices // experts).bit_length() - 1))


def _over_batch(total: jax.Array) -> jax.Array:
    """A sum over the global batch: the compiler's where the batch is cut by it, ours where axes are manual."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = tuple(axis for axis in BATCH_AXES if axis in manual)
    return jax.lax.psum(total, axes) if axes else total
