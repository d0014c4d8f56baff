"""Experts in the place of a decoder's MLP: a router sends every token to a few of many gated MLPs.

    LlamaConfig(..., ffn_dim=256, mlp=Experts(count=8, router=TopK(k=2)))

`TopK`: every token takes the k experts of its largest scores, and y = sum_j g_j FFN_j(x) with the scores of the chosen
ones over their sum (Mixtral, arXiv 2401.04088). Two losses can be asked for, each a sum over tokens and a mean over
layers:

    balance   n sum_i f_i p_i with p_i the score of expert i and f_i the choices of it a token, over the global batch,
              or the part of it that is run at once (Fedus et al., arXiv 2101.03961); f enters as a constant
    z         logsumexp(logits)^2 (Zoph et al., arXiv 2202.08906)

Instead of a loss a bias can keep experts even: it is added to the scores for the choice alone, and moves by a fixed
rate toward the experts that had less than the mean (Wang et al., arXiv 2408.15664).

`ExpertChoice`: every expert takes its k = floor(b / n) best of b tokens, at least 1, by sigmoid scores, which are also
the weights (MoMa, arXiv 2407.21770). All experts do equal work, and a token may be seen by none. Who is taken depends
on later tokens, so that losses are too good, and nothing can be generated without an `AuxiliaryRouter`.

On a mesh whose axis `expert` has W devices each of them holds n / W experts, and tokens travel (`parallel.expert`).

Axes: B rows, S positions, T = B S tokens, E model, F hidden, n experts, L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.errors import UserError
from scalejax.kernels.grouped_matmul import grouped_gated_mlp, grouped_matmul
from scalejax.kernels.grouped_matmul.api import Implementation
from scalejax.models.llm.auxiliary import AuxiliaryRouter, compare, guess
from scalejax.models.llm.expert_use import GUESSES, OF_EXPERTS, SUMS, ExpertGuesses, ExpertUse
from scalejax.models.llm.llama3.parts import Numbers, Room, StackedNormal
from scalejax.nn import routing
from scalejax.numerics.quantized import static
from scalejax.numerics.quantized.weights import StaticWeight
from scalejax.parallel import expert
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.kernel_sharding import shard_kernel
from scalejax.parallel.mesh import sum_over_batch

if TYPE_CHECKING:
    from scalejax.models.llm.llama3.config import LlamaConfig

Execution = Literal["grouped", "batched", "sequential"]


def _check_factor(field: str, factor: float | None) -> None:
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"{field} must be above 0 and finite, or None; got {factor}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopK:
    """Every token takes k experts.

    Attributes:
      k: Experts of a token.
      scores: "softmax" over all experts as in Mixtral, or "sigmoid" of each.
      balance: Factor on the balance loss.
      z: Factor on the z loss.
      bias_rate: By how much the bias of an expert moves in each part of a step; 0 = there is none.
      capacity_factor: In training and its evaluations an expert has room for this many times T k / n tokens of a
        device; what is beyond is dropped, by position, and counted. Generation drops nothing. None = nor does this.
      pair_factor: Without a capacity, on a mesh with several devices on `expert`: between two of them there is room for
        this many times the mean number of choices, T k / W of a device with T tokens; what is beyond is dropped and
        counted. None = for all that there could be, W times as many, so that nothing is dropped.
      exchange: Without a capacity, on such a mesh: "padded" sends all of that room; "ragged" as many tokens as there
        are, on TPUs and GPUs.
    """

    k: int = 2
    scores: routing.Scores = "softmax"
    balance: float = 0.01
    z: float = 0.0
    bias_rate: float = 0.0
    capacity_factor: float | None = None
    pair_factor: float | None = None
    exchange: Literal["padded", "ragged"] = "padded"

    FREE = ("balance", "z", "bias_rate", "capacity_factor", "pair_factor", "exchange")

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"TopK: k must be a whole number of at least 1; got {self.k!r}.")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"TopK: scores must be softmax or sigmoid; got {self.scores!r}.")
        for field in ("balance", "z", "bias_rate"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"TopK: {field} must be 0 or more, and finite; got {getattr(self, field)}.")
        _check_factor("TopK: capacity_factor", self.capacity_factor)
        _check_factor("TopK: pair_factor", self.pair_factor)
        if self.exchange not in ("padded", "ragged"):
            raise ValueError(f"TopK: exchange must be padded or ragged; got {self.exchange!r}.")
        factors = {"capacity_factor": self.capacity_factor, "pair_factor": self.pair_factor}
        given = next((f"{name}={factor}" for name, factor in factors.items() if factor is not None), None)
        if self.exchange == "ragged" and given is not None:
            raise ValueError(
                f"TopK: exchange='ragged' sends every choice, and {given} is how many places there are. Leave the "
                "factor out, or take exchange='padded'."
            )
        if self.capacity_factor is not None and self.pair_factor is not None:
            raise ValueError(
                f"TopK: capacity_factor={self.capacity_factor} already says how many places travel; leave "
                f"pair_factor={self.pair_factor} out."
            )

    def active(self, experts: int) -> int:
        """Experts that see a token."""
        del experts
        return self.k


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertChoice:
    """Every expert takes its best tokens.

    Attributes:
      group: Of which tokens: "sequence", those of a row; "device", all that a device has of a part of the batch, which
        other meshes and other numbers of parts change; "global", all of a part of the batch, which other numbers of
        parts change: scores travel to all devices first.
      capacity_factor: With "global", an expert has room for this many times T / n tokens of a device with T; what is
        beyond is dropped, by position, and counted. None = for all that there could be, so that nothing is dropped.
      auxiliary: What says without later tokens who would be taken; None = nothing can be generated.
      noise: "gumbel": in training scores are sigmoid(x + G' - G'') with two draws of the Gumbel distribution, by which
        upcycled experts, all alike at first, part; choice and weight see the same noise.
    """

    group: Literal["sequence", "device", "global"] = "device"
    capacity_factor: float | None = None
    auxiliary: AuxiliaryRouter | None = None
    noise: Literal["none", "gumbel"] = "none"

    FREE = ("capacity_factor", "noise")

    def __post_init__(self) -> None:
        if self.noise not in ("none", "gumbel"):
            raise ValueError(f"ExpertChoice: noise must be none or gumbel; got {self.noise!r}.")
        if self.group not in ("sequence", "device", "global"):
            raise ValueError(f"ExpertChoice: group must be sequence, device or global; got {self.group!r}.")
        _check_factor("ExpertChoice: capacity_factor", self.capacity_factor)
        if self.capacity_factor is not None and self.group != "global":
            raise ValueError(
                f"ExpertChoice: capacity_factor={self.capacity_factor} goes with group='global' alone; in a "
                f"{self.group} every expert takes as many tokens as every other."
            )

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
      implementation: Of grouped products; None = the fastest for the platform, see `kernels.grouped_matmul`.
    """

    count: int = 8
    router: TopK | ExpertChoice = TopK()
    execution: Execution = "grouped"
    implementation: Implementation | None = None

    FREE = ("execution", "implementation")

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or self.count < 1:
            raise ValueError(f"Experts: count must be a whole number of at least 1; got {self.count!r}.")
        if self.active > self.count:
            raise ValueError(f"Experts: router.k must be at most count; got {self.active} of {self.count} experts.")
        if self.execution not in ("grouped", "batched", "sequential"):
            raise ValueError(f"Experts: execution must be grouped, batched or sequential; got {self.execution!r}.")
        known = (None, *get_args(Implementation))
        if self.implementation not in known:
            names = ", ".join(map(str, known))
            raise ValueError(f"Experts: implementation must be one of {names}; got {self.implementation!r}.")
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
    def active(self) -> int:
        """Experts that see a token, in the mean."""
        return self.router.active(self.count)

    @property
    def routers(self) -> int:
        """Of a layer."""
        return 1

    def capacity(self, length: int, shards: int) -> float | None:
        """See `plan.arithmetic.decoders.ExpertPart`; where experts choose they have as many places as they take."""
        del length
        if self.router.capacity_factor is not None or isinstance(self.router, TopK):
            return self.router.capacity_factor
        # All that an expert takes of those of all devices may be of one.
        return float(min(self.count, shards)) if self.router.group == "global" and shards > 1 else None

    def exchange(self, devices: int) -> float:
        """See `plan.arithmetic.decoders.ExpertPart`."""
        router = self.router
        if devices == 1 or isinstance(router, ExpertChoice) or router.exchange == "ragged":
            return 1.0
        all_there_could_be = devices * min(router.k, self.count // devices) / router.k
        return min(all_there_could_be, router.pair_factor or all_there_could_be)

    @property
    def keeps_products(self) -> bool:
        """Whether each expert's products are products of two matrices, which the policy "dots" keeps."""
        return self.execution == "sequential"

    @property
    def generates(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return isinstance(self.router, TopK) or self.router.auxiliary is not None

    @property
    def draws(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return isinstance(self.router, ExpertChoice) and self.router.noise == "gumbel"

    @property
    def identity(self) -> Mapping[str, str]:
        """See `llama3.parts.RoutedPart`."""
        found = {"mlp.count": str(self.count), "mlp.router": type(self.router).__name__}
        return found | ({"mlp.router.group": self.router.group} if isinstance(self.router, ExpertChoice) else {})

    @property
    def sees_later_tokens(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return isinstance(self.router, ExpertChoice)

    def macs(self, config: "LlamaConfig") -> int:
        """See `llama3.parts.RoutedPart`: the router, and the gated MLPs that see a token."""
        return config.dim * self.count + self.active * 3 * config.dim * config.ffn_dim

    def losses(self, numbers: Numbers) -> jax.Array:
        """wide[]: the losses of the router over all rows, to be added to the sum of those of the targets."""
        router, layers = self.router, numbers["load"].shape[1]
        if isinstance(router, ExpertChoice):
            if router.auxiliary is None:
                return jnp.zeros((), numbers["tokens"].dtype)
            return numbers["auxiliary"].sum() / layers
        return (router.balance * numbers["balance"].sum() + router.z * numbers["z"].sum()) / layers

    def sums(self, numbers: Numbers) -> dict[str, jax.Array]:
        """Sums over all rows that `ExpertUse` measures."""
        names = (*SUMS, *(GUESSES if self._guesses else ()))
        return {f"experts/{name}": numbers[name].sum(0) for name in names}

    def metrics(self, layers: int) -> tuple[ExpertUse | ExpertGuesses, ...]:
        """How evenly experts are used."""
        use = ExpertUse(layers=layers, experts=self.count, k=self.active)
        return (use, ExpertGuesses(experts=self.count)) if self._guesses else (use,)

    @property
    def _guesses(self) -> bool:
        return isinstance(self.router, ExpertChoice) and self.router.auxiliary is not None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prepared:
    """What all layers of experts want to know of the tokens.

    Attributes:
      real: bool[B, S], False = padding.
      keys: uint32[B, ...], data of a key for each row; None = nothing is drawn.
    """

    real: jax.Array
    keys: jax.Array | None = None


class ExpertLayers(nnx.Module):
    """The experts and routers of all layers; used one layer at a time."""

    stages = (("gate", "up"), ("down",))
    """See `llama3.parts`; the router, which is never quantized, is in none."""

    def __init__(self, part: Experts, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
        normal = StackedNormal(config, rngs, dtypes.params)
        self.router = normal((config.dim, part.count), ("embed", "router"))
        self.gate = normal((part.count, config.dim, config.ffn_dim), ("experts", "embed", "hidden"))
        self.up = normal((part.count, config.dim, config.ffn_dim), ("experts", "embed", "hidden"))
        self.down = normal.to_stream((part.count, config.ffn_dim, config.dim), ("experts", "hidden", "embed"))
        if isinstance(part.router, TopK) and part.router.bias_rate:
            bias = jnp.zeros((config.repeats, part.count), nn.wide(dtypes.compute))
            self.bias = nnx.Variable(bias, logical_axes=("layers", "router"))
        if isinstance(part.router, ExpertChoice) and part.router.auxiliary is not None:
            hidden = part.router.auxiliary.columns(config.dim)
            self.auxiliary_in = normal((config.dim, hidden), ("embed", "router"))
            self.auxiliary_out = normal((hidden, part.count), ("router", "router"))
        self.part = part
        self.hidden = config.ffn_dim
        self.layers = config.repeats
        self.compute_dtype = dtypes.compute

    def inputs(self, stage: int, x: jax.Array, expert: jax.Array) -> jax.Array:
        """What the matrices of a stage of an expert multiply, [B, S, ...], zeros where a token does not reach it."""
        router = self.part.router
        assert isinstance(router, TopK)  # with another one there is no folder that could be written
        choice, _ = self._choose(x, jnp.ones(x.shape[:2], bool), router)
        reached = (choice.experts == expert).any(-1).reshape(*x.shape[:2], 1)
        x = jnp.where(reached, x, 0)
        if stage == 0:
            return x
        gate, up = (p[...][expert].astype(self.compute_dtype) for p in (self.gate, self.up))
        return jax.nn.silu(nn.project(x, gate)) * nn.project(x, up)

    def numbers(self, rows: int) -> Numbers:
        """Of no layers: what `with_numbers` adds to."""
        wide = nn.wide(self.compute_dtype)
        names = ("balance", "z", "entropy", "dropped", "unseen", "once", "tokens")
        if hasattr(self, "auxiliary_in"):
            names += GUESSES
        return {
            **{name: jnp.zeros(rows, wide) for name in names},
            **{name: jnp.zeros((rows, self.layers, self.part.count), wide) for name in OF_EXPERTS},
            "layer": jnp.zeros(rows, jnp.int32),
        }

    def prepare(
        self,
        real: jax.Array,
        tokens: jax.Array,
        modality: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        room: Room,
    ) -> Prepared:
        """See `llama3.parts.RoutedMlp`: tokens of all modalities are alike here."""
        del tokens, modality, room
        return Prepared(real, keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        """`infer` where there is no padding."""
        return self.infer(x, Prepared(jnp.ones(x.shape[:2], bool)))

    def infer(self, x: jax.Array, prepared: Prepared) -> jax.Array:
        """See `llama3.parts.RoutedMlp`.

        Raises:
          UserError: experts choose, for which all tokens have to be there.
        """
        router, real = self.part.router, prepared.real
        if isinstance(router, TopK):
            choice, _ = self._choose(x, real, router)
            return self._to_chosen(x, choice, dataclasses.replace(router, capacity_factor=None, pair_factor=None))[0]
        if router.auxiliary is None:
            raise UserError(
                "model.mlp.router is ExpertChoice without an auxiliary router: which tokens an expert takes depends on "
                "later ones, so that nothing can be generated and no text scored. Train auxiliary "
                "routers in a phase of the run, as the recipe moma does (surgery.experts.AddAuxiliaryRouters)."
            )
        chosen = (self._guess(x) > 0) & real[..., None]
        numbers = jnp.arange(self.part.count, dtype=jnp.int32)[None, None, :]
        experts = jnp.where(chosen, numbers, self.part.count).reshape(-1, self.part.count)
        scores = jax.nn.sigmoid(self._logits(x))
        gates = jnp.where(chosen, scores, 0).reshape(experts.shape)
        choice = routing.TokenChoice(experts, gates, scores.reshape(experts.shape))
        return self._to_chosen(x, choice, TopK(k=1))[0]

    def _guess(self, x: jax.Array) -> jax.Array:
        """wide[B, S, n]: above 0 where the auxiliary router says that an expert would take a token."""
        return guess(x, self.auxiliary_in[...], self.auxiliary_out[...], self.compute_dtype)

    def with_numbers(self, x: jax.Array, prepared: Prepared, numbers: Numbers) -> tuple[jax.Array, Numbers]:
        """x [B, S, E] -> [B, S, E], and what this layer adds to the numbers.

        Args:
          x: compute_dtype[B, S, E].
          prepared: What `prepare` made; padding goes to no expert and counts nowhere.
          numbers: Of the layers before.
        """
        router, real = self.part.router, prepared.real
        if isinstance(router, ExpertChoice):
            logits = self._logits(x)
            if prepared.keys is not None and router.noise == "gumbel":
                logits += routing.logistic_noise(prepared.keys, numbers["layer"], logits)
            scores = jax.nn.sigmoid(logits)
            y, asked, dropped = self._to_choosing(x, scores, real, router)
            numbers = self._add(numbers, logits, scores, real, asked, asked * scores, dropped)
            if router.auxiliary is None:
                return y, numbers
            found = compare(self._guess(x), real, asked)
            return y, numbers | {name: numbers[name] + value for name, value in found.items()}
        choice, logits = self._choose(x, real, router)
        y, placed = self._to_chosen(x, choice, router)
        chosen = choice.experts.reshape(*real.shape, router.k)
        experts = jnp.arange(self.part.count, dtype=chosen.dtype)
        took = chosen[..., None] == experts[None, None, None, :]  # B S k n
        asked = took.any(2).astype(choice.scores.dtype)
        gates = jnp.where(took, choice.gates.reshape(*chosen.shape, 1), 0).sum(2)
        scores, dropped = choice.scores.reshape(asked.shape), asked.sum(2) - placed
        return y, self._add(numbers, logits, scores, real, asked, gates, dropped)

    def _add(
        self,
        numbers: Numbers,
        logits: jax.Array,
        scores: jax.Array,
        real: jax.Array,
        asked: jax.Array,
        gates: jax.Array,
        dropped: jax.Array,
    ) -> Numbers:
        """What this layer adds.

        Args:
          numbers: Of the layers before.
          logits, scores: wide[B, S, n].
          real: bool[B, S].
          asked: wide[B, S, n], 1 where an expert was to see a token.
          gates: wide[B, S, n], the weight of its result there, 0 elsewhere.
          dropped: wide[B, S], choices without a place.
        """
        wide, count, gates = scores.dtype, self.part.count, jax.lax.stop_gradient(gates)
        tokens = real.astype(wide)
        of_experts = dict(zip(OF_EXPERTS, (each.sum(1) for each in (asked, gates, gates**2)), strict=True))
        total, all_tokens = sum_over_batch(of_experts["load"].sum(0)), sum_over_batch(tokens.sum())
        share = jax.lax.stop_gradient(total / jnp.maximum(all_tokens, 1))
        if isinstance(self.part.router, TopK) and self.part.router.bias_rate:
            self.bias[...] += self.part.router.bias_rate * jnp.sign(share.mean() - share)
        tiny = jnp.finfo(wide).tiny
        shares = scores / jnp.maximum(scores.sum(2, keepdims=True), tiny)
        added = {
            "balance": count * (tokens * (shares * share[None, None, :]).sum(2)).sum(1),
            "z": (tokens * jax.nn.logsumexp(logits, axis=2) ** 2).sum(1),
            "entropy": -jax.lax.stop_gradient((tokens * (shares * jnp.log(jnp.maximum(shares, tiny))).sum(2)).sum(1)),
            "dropped": dropped.sum(1),
            "unseen": (tokens * (asked.sum(2) == dropped)).sum(1),
            "once": (tokens * (asked.sum(2) == dropped + 1)).sum(1),
            "tokens": tokens.sum(1),
        }
        here = jnp.arange(self.layers, dtype=jnp.int32)[None, :] == numbers["layer"][:, None]
        found = {name: numbers[name] + value for name, value in added.items()}
        for name, value in of_experts.items():
            found[name] = numbers[name] + jnp.where(here[:, :, None], value[:, None, :], 0)
        return {**numbers, **found, "layer": numbers["layer"] + 1}

    def _logits(self, x: jax.Array) -> jax.Array:
        """wide[B, S, n]."""
        wide = nn.wide(self.compute_dtype)
        return nn.project(x.astype(wide), self.router[...].astype(wide))

    def _choose(self, x: jax.Array, real: jax.Array, router: TopK) -> tuple[routing.TokenChoice, jax.Array]:
        logits = self._logits(x)
        flat = logits.reshape(-1, self.part.count)
        bias = self.bias[...] if router.bias_rate else None
        return routing.choose_experts(flat, real.reshape(-1), k=router.k, scores=router.scores, bias=bias), logits

    def _to_chosen(self, x: jax.Array, choice: routing.TokenChoice, router: TopK) -> tuple[jax.Array, jax.Array]:
        """y [B, S, E], and wide[B, S], the choices of each token that had a place."""
        experts, gates = (a.reshape(*x.shape[:2], -1) for a in (choice.experts, choice.gates))
        local = functools.partial(_chosen, router=router)
        y, placed = self._on_devices(local, 2, "sequence", x, experts, gates)
        return y, placed[..., 0]

    def _to_choosing(
        self, x: jax.Array, scores: jax.Array, real: jax.Array, router: ExpertChoice
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """y [B, S, E], wide[B, S, n], 1 where an expert wants a token, and wide[B, S], how many had no place for it."""
        local = functools.partial(_choosing, router=router)
        # A sequence is whole where experts choose among its tokens.
        positions = None if router.group == "sequence" else "sequence"
        given = (x, scores, real.astype(scores.dtype)[..., None])
        y, asked, dropped = self._on_devices(local, 3, positions, *given)
        return y, asked, dropped[..., 0]

    def _on_devices(
        self, local: Callable[..., tuple[jax.Array, ...]], results: int, positions: str | None, *tokens: jax.Array
    ) -> tuple[jax.Array, ...]:
        """`local` on each device: of its rows of tokens [B, S, ...], its positions if named, and its experts."""
        weights: list[Any] = [p[...].astype(self.compute_dtype) for p in (self.gate, self.up, self.down)]
        inputs: tuple[static.Format | None, ...] = tuple(
            w.format if isinstance(w, StaticWeight) else None for w in weights
        )
        run = _Run(self.part, self.hidden, expert.cut_over(*tokens[0].shape[:2]), inputs)
        local = functools.partial(local, run=run)
        scales = [w.scale for w in weights if isinstance(w, StaticWeight)]
        weights = [w.array if isinstance(w, StaticWeight) else w for w in weights] + scales
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and mesh.size > 1:
            token = ("batch", positions, None)
            into, out = ("experts", None, "hidden"), ("experts", "hidden", None)
            local = shard_kernel(
                local,
                in_axes=(*len(tokens) * (token,), into, into, out, *len(scales) * (("experts",),)),
                out_axes=results * (token,),
                rules=ACTIVATIONS,
            )
        return local(*tokens, *weights)


# What a device does with its tokens and its experts. Results are of a float dtype: an integer has no cotangent.


@dataclasses.dataclass(frozen=True)
class _Run:
    """The experts of a layer on all devices.

    Attributes:
      part: What they are.
      hidden: F.
      cut: How tokens are cut.
      inputs: Formats of what gate, up and down multiply where that has static scales, which follow those weights in
        their order, wide[n] each.
    """

    part: Experts
    hidden: int
    cut: expert.Cut
    inputs: tuple[static.Format | None, ...] = (None, None, None)

    @property
    def count(self) -> int:
        """n."""
        return self.part.count

    def devices(self, weights: tuple[jax.Array, ...]) -> int:
        """W, over which experts lie, of which these are some."""
        return self.count // weights[0].shape[0]

    def whole(self, y: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        """The sum of results over the devices of `tensor` where each has some hidden features."""
        return y if weights[0].shape[2] == self.hidden else jax.lax.psum(y, "tensor")

    def equally(self, rows: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        """[P, E] -> [P, E]: equally many places of every expert, one expert after another."""

        def one(rows: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
            return (jax.nn.silu(rows @ gate) * (rows @ up)) @ down

        devices = self.devices(weights)
        placed = expert.to_experts(rows.reshape(self.count, -1, rows.shape[1]), devices)
        if self.part.execution == "sequential":
            results = jnp.stack([one(*each) for each in zip(placed, *weights, strict=True)])
        else:
            results = jax.vmap(one)(placed, *weights)
        return expert.from_experts(results, devices).reshape(rows.shape)


def _chosen(
    x: jax.Array, experts: jax.Array, gates: jax.Array, *weights: jax.Array, router: TopK, run: _Run
) -> tuple[jax.Array, jax.Array]:
    """y [B, S, E], and wide[B, S, 1], the choices of a token that had a place."""
    tokens, k = x.shape[0] * x.shape[1], experts.shape[2]
    flat, chosen, weighed = x.reshape(tokens, -1), experts.reshape(tokens, k), gates.reshape(tokens, k)
    devices, count = run.devices(weights), run.count
    if router.capacity_factor is not None:
        capacity = math.ceil(router.capacity_factor * tokens * k / count)
        routes = routing.routes_with_capacity(chosen, weighed, count=count, capacity=capacity)
        results = run.equally(routing.dispatch(flat, routes), weights)
    elif devices == 1:
        routes, results = _grouped(flat, chosen, weighed, weights, run)
    else:
        here = count // devices
        room = tokens * min(k, here)  # for what could come of one device
        if router.exchange == "ragged":
            routes, sizes = routing.routes_in_groups(chosen, weighed, count=count, block=1)
            travel = expert.Travel.plan(sizes, devices, sent=routes.tokens.shape[0], room=devices * room)
            arrived = travel.to_experts(routing.dispatch(flat, routes))
            results = travel.from_experts(_each(arrived, travel.own[:, None], gates.dtype, weights, run))
        else:
            if router.pair_factor is not None:
                room = min(room, math.ceil(router.pair_factor * tokens * k / devices))
            routes = routing.routes_with_capacity(chosen // here, weighed, count=devices, capacity=room)
            own = chosen.at[routes.tokens, routes.choices].get(mode="fill", fill_value=count)
            own = jnp.where(own < count, own % here, here)  # which of the experts of that device
            arrived, own = (
                expert.to_experts(a.reshape(devices, room, -1), devices)[0]
                for a in (routing.dispatch(flat, routes), own)
            )
            results = _each(arrived, own, gates.dtype, weights, run)[None]
            results = expert.from_experts(results, devices).reshape(devices * room, -1)
    y = run.whole(routing.combine(results, routes), weights).reshape(x.shape)
    return y, routes.used.sum(1).astype(gates.dtype).reshape(*x.shape[:2], 1)


def _each(
    rows: jax.Array, own: jax.Array, wide: jax.typing.DTypeLike, weights: tuple[jax.Array, ...], run: _Run
) -> jax.Array:
    """What comes of rows [P, E] by one of the experts that are here each, `own` [P, 1]; zeros where it is beyond."""
    routes, results = _grouped(rows, own, jnp.ones(own.shape, wide), weights, run)
    return routing.combine(results, routes)


def _grouped(
    rows: jax.Array,
    chosen: jax.Array,
    gates: jax.Array,
    weights: tuple[jax.Array, ...],
    run: _Run,
) -> tuple[routing.Routes, jax.Array]:
    """Results [P, E] of tokens [T, E] that chose [T, k] of the experts that are here, and their places."""
    count = weights[0].shape[0]
    block = _block(chosen.size, count)
    routes, sizes = routing.routes_in_groups(chosen, gates, count=count, block=block)
    gate, up, down, *scales = weights
    placed = routing.dispatch(rows, routes)
    how: dict[str, Any] = {"block": block, "implementation": run.part.implementation}
    if not scales:
        return routes, grouped_gated_mlp(placed, gate, up, down, sizes, **how)
    left = iter(scales)
    by_gate, by_up, by_down = (
        functools.partial(
            _static_product,
            weight=weight,
            sizes=sizes,
            format=format,
            scales=next(left) if format else None,
            how=how,
        )
        for weight, format in zip((gate, up, down), run.inputs, strict=True)
    )
    return routes, by_down(jax.nn.silu(by_gate(placed)) * by_up(placed))


def _static_product(
    x: jax.Array,
    weight: jax.Array,
    sizes: jax.Array,
    *,
    format: static.Format | None,
    scales: jax.Array | None,
    how: dict[str, Any],
) -> jax.Array:
    """`grouped_matmul` of codes of x [P, ...] under the scale of each expert, wide[n], 0 = x stays as it is."""
    if format is None or scales is None:
        return grouped_matmul(x, weight, sizes, **how)
    scale = jnp.repeat(scales, sizes, total_repeat_length=x.shape[0])[:, None]
    given = scale > 0
    scale = jnp.where(given, scale, 1)
    codes = jnp.where(given, static.encode(x, scale, format), x)
    return (grouped_matmul(codes, weight, sizes, **how) * scale).astype(x.dtype)


def _choosing(
    x: jax.Array, scores: jax.Array, real: jax.Array, *weights: jax.Array, router: ExpertChoice, run: _Run
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """y [B, S, E], wide[B, S, n], 1 where an expert wants a token, and wide[B, S, 1], how many had no place for it."""
    count, width = run.count, x.shape[2]
    groups = x.shape[0] if router.group == "sequence" else 1
    rows, ours, some = (a.reshape(groups, -1, a.shape[2]) for a in (x, scores, real > 0))
    tokens = rows.shape[1]
    if router.group == "global":
        routes, asked = _of_all(scores, real[..., 0] > 0, router.capacity_factor, run.cut)
        routes = jax.tree.map(lambda a: a[None], routes)
    else:
        choose = functools.partial(routing.choose_tokens, capacity=max(1, tokens // count))
        routes = jax.vmap(choose)(ours, some[..., 0])
        asked = jax.vmap(lambda routes: routes.used)(routes).reshape(scores.shape)
    # Of every expert the places of all groups.
    placed = jax.vmap(routing.dispatch)(rows, routes).reshape(groups, count, -1, width)
    results = run.equally(placed.swapaxes(0, 1).reshape(-1, width), weights)
    results = results.reshape(count, groups, -1, width).swapaxes(0, 1).reshape(groups, -1, width)
    y = run.whole(jax.vmap(routing.combine)(results, routes), weights).reshape(x.shape)
    used = jax.vmap(lambda routes: routes.used)(routes).reshape(scores.shape)
    return y, asked.astype(scores.dtype), (asked & ~used).sum(2, keepdims=True).astype(scores.dtype)


def _of_all(
    scores: jax.Array, real: jax.Array, factor: float | None, cut: expert.Cut
) -> tuple[routing.Routes, jax.Array]:
    """Routes of this device's tokens to experts that choose among those of all, and bool[B, S, n], who was chosen."""
    everyone, all_real = expert.of_all_devices(scores, cut), expert.of_all_devices(real, cut)
    total, tokens, count = all_real.size, real.size, scores.shape[2]
    k = max(1, total // count)
    best = routing.is_best(everyone.reshape(total, count), all_real.reshape(total), capacity=k)
    asked = expert.of_this_device(best.reshape(everyone.shape), scores.shape, cut)
    capacity = min(k, tokens) if factor is None else min(tokens, math.ceil(factor * tokens / count))
    numbers = jnp.where(asked, jnp.arange(count, dtype=jnp.int32)[None, None, :], count).reshape(tokens, count)
    gates = jnp.where(asked, scores, 0).reshape(tokens, count)
    return routing.routes_with_capacity(numbers, gates, count=count, capacity=capacity), asked


def _block(choices: int, experts: int) -> int:
    """Rows of a block: a power of 2 up to 128, not above the mean of an expert, so that few places stay empty."""
    return 1 << max(0, min(7, (choices // experts).bit_length() - 1))
