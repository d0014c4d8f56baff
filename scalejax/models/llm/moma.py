"""MoMa: a decoder whose experts are grouped by modality (Lin et al., arXiv 2407.21770).

    h = x + RMSNorm(Attention(x));    y = h + RMSNorm(sum_j g_j(h) FFN_j(h)) over the experts j of the token's modality

A token of modality M goes to the group of M, known from its id; inside of the group every expert takes its
k = floor(b_M / n_M) best of the b_M tokens of that modality, at least 1 where there is one, by sigmoid scores that are
also the weights (`experts.ExpertChoice`). The mixed-modal form, one group of 8 for all
tokens, is `Experts(count=8, router=ExpertChoice(), execution="batched")`.

    LlamaConfig(..., mlp=ModalityExperts(groups=(("text", 4), ("image", 4))), norm=OutputRmsNorm())

Which tokens are of which modality is the same for all layers, so their order is made once: each layer gathers the
tokens of a modality, [B, C, E] with C places a row (`TokenSchema.capacities`), and gathers what came of them back.

Axes: B rows, S positions, E model, F hidden, n experts of a group, C places of a modality in a row.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NoReturn

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.text.modalities import PADDING, ModalityMap
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm.architecture import Architecture
from scalejax.models.llm.auxiliary import AuxiliaryRouter
from scalejax.models.llm.depth import MixtureOfDepths
from scalejax.models.llm.experts import Execution, ExpertChoice, ExpertLayers, Experts, Prepared
from scalejax.models.llm.llama3 import architecture as llama
from scalejax.models.llm.llama3.config import LlamaConfig
from scalejax.models.llm.llama3.model import Llama
from scalejax.models.llm.llama3.parts import MlpPart, Numbers, OutputRmsNorm, Room
from scalejax.nn import routing
from scalejax.train.metrics.protocol import Metric


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Order:
    """Where in their rows the tokens of each modality lie.

    Attributes:
      routes: By modality, to the places of its tokens: a `Routes` whose arrays have a leading axis of rows.
      keys: By modality, uint32[B, ...], see `experts.Prepared`; {} = nothing is drawn.
    """

    routes: dict[str, routing.Routes]
    keys: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalityExperts:
    """Groups of experts, one for each modality of the data; gated MLPs, `ffn_dim` of the config wide each.

    Attributes:
      groups: (modality, experts) of each, in the order of the data's modalities.
      router: Among which tokens experts choose.
      execution: "batched" or "sequential", see `Experts`.
      capacities: Most tokens of each modality in a row; None = those of the data.
      ranges: Of which modality an id is, see `data.text.modalities.ModalityMap`; None = as the data say.
    """

    groups: tuple[tuple[str, int], ...] = (("text", 4), ("image", 4))
    router: ExpertChoice = ExpertChoice()
    execution: Execution = "batched"
    capacities: tuple[int, ...] | None = None
    ranges: tuple[tuple[str, int, int], ...] | None = None

    FREE = ("execution", "capacities", "ranges")

    def __post_init__(self) -> None:
        names = [name for name, _ in self.groups]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"ModalityExperts: groups must name each modality once; got {self.groups}.")
        if self.capacities is not None and len(self.capacities) != len(names):
            raise ValueError(
                f"ModalityExperts: capacities must be one number for each of {len(names)} groups; got "
                f"{self.capacities}. Leave them None to take those of the data."
            )
        if not isinstance(self.router, ExpertChoice):
            raise ValueError(f"ModalityExperts: router must be an ExpertChoice; got {self.router}.")
        for name, count in self.groups:
            if not name.isidentifier():
                raise ValueError(f"ModalityExperts: a modality is named like a variable, such as 'text'; got {name!r}.")
            self.group(count)

    def group(self, count: int) -> Experts:
        """The experts of one group."""
        return Experts(count=count, router=self.router, execution=self.execution)

    def bound(self, schema: TokenSchema) -> "ModalityExperts":
        """These groups with the capacities and ranges of the data, if they have none of their own.

        Raises:
          UserError: the data have other modalities or ranges, or rows with more tokens of one than there is room for.
        """
        names = tuple(name for name, _ in self.groups)
        if names != schema.modalities:
            raise UserError(
                f"model.mlp.groups are of {', '.join(names)}, but tokens of the data are of "
                f"{', '.join(schema.modalities)}. Give a group for each modality, in that order, or take data that "
                "tell them apart (TwoModalityData)."
            )
        found = tuple(schema.capacity(number) for number in range(len(names)))
        if self.capacities is not None and any(own < data for own, data in zip(self.capacities, found, strict=True)):
            raise UserError(
                f"model.mlp.capacities={self.capacities}, but rows of the data have up to {found} tokens of "
                f"{', '.join(names)}; what is beyond would go to no expert. Raise them, or leave them None."
            )
        if self.ranges is not None and schema.ranges and self.ranges != schema.ranges:
            raise UserError(
                f"model.mlp.ranges={self.ranges}, but the data say {schema.ranges}. Leave them None, or take the data "
                "that the model was made for."
            )
        return dataclasses.replace(self, capacities=self.capacities or found, ranges=self.ranges or schema.ranges)

    def build(self, config: LlamaConfig, rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "ModalityExpertLayers":
        """See `llama3.parts.MlpPart`."""
        return ModalityExpertLayers(self, config, rngs, dtypes)

    @property
    def generates(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return self.router.auxiliary is not None

    @property
    def draws(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return self.group(1).draws

    @property
    def identity(self) -> Mapping[str, str]:
        """See `llama3.parts.RoutedPart`."""
        one = {name: value for name, value in self.group(1).identity.items() if name != "mlp.count"}
        return {"mlp.groups": ", ".join(f"{count} of {name}" for name, count in self.groups), **one}

    @property
    def sees_later_tokens(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return True

    @property
    def count(self) -> int:
        """Experts of a layer, of all modalities."""
        return sum(count for _, count in self.groups)

    @property
    def active(self) -> int:
        """Experts that see a token, in the mean."""
        return 1

    @property
    def routers(self) -> int:
        """Of a layer: a token passes that of its modality."""
        return len(self.groups)

    def capacity(self, length: int, shards: int) -> float | None:
        """See `Experts`: a row has places for the most tokens of each modality."""
        if self.capacities is None:
            return None
        of_groups = [self.group(count).capacity(length, shards) or 1.0 for _, count in self.groups]
        return sum(size * factor for size, factor in zip(self.capacities, of_groups, strict=True)) / length

    def exchange(self, devices: int) -> float:
        """See `Experts`."""
        return self.group(1).exchange(devices)

    @property
    def keeps_products(self) -> bool:
        """See `Experts`."""
        return self.group(1).keeps_products

    def macs(self, config: LlamaConfig) -> int:
        """See `llama3.parts.RoutedPart`: a token meets one expert in the mean, and the router of its group."""
        routers = [count for _, count in self.groups]
        return config.dim * sum(routers) // len(routers) + 3 * config.dim * config.ffn_dim

    def losses(self, numbers: Numbers) -> jax.Array:
        """See `llama3.parts.RoutedPart`: those of auxiliary routers, if there are some."""
        losses = [self.group(count).losses(_of_group(numbers, name)) for name, count in self.groups]
        return sum(losses[1:], start=losses[0])

    def sums(self, numbers: Numbers) -> dict[str, jax.Array]:
        """See `llama3.parts.RoutedPart`."""
        found: dict[str, jax.Array] = {}
        for name, count in self.groups:
            of_group = self.group(count).sums(_of_group(numbers, name))
            found |= {f"{name}/{key}": value for key, value in of_group.items()}
        return found

    def metrics(self, layers: int) -> tuple[Metric, ...]:
        """How evenly the experts of each modality are used."""
        return tuple(
            dataclasses.replace(metric, group=name)
            for name, count in self.groups
            for metric in self.group(count).metrics(layers)
        )


class ModalityExpertLayers(nnx.Module):
    """The experts and routers of all layers and groups; used one layer at a time."""

    def __init__(self, part: ModalityExperts, config: LlamaConfig, rngs: nnx.Rngs, dtypes: nn.Dtypes):
        for name, count in part.groups:
            setattr(self, name, part.group(count).build(config, rngs, dtypes))
        self.part = part

    def group(self, name: str) -> ExpertLayers:
        """The experts of one modality."""
        return getattr(self, name)

    def numbers(self, rows: int) -> Numbers:
        """See `llama3.parts.RoutedMlp`: those of each group, as "text/load"."""
        return {
            f"{name}/{key}": value
            for name, _ in self.part.groups
            for key, value in self.group(name).numbers(rows).items()
        }

    def prepare(
        self,
        real: jax.Array,
        tokens: jax.Array,
        modality: jax.Array | None = None,
        keys: jax.Array | None = None,
        *,
        room: Room,
    ) -> Order:
        """See `llama3.parts.RoutedMlp`: where in its row each token of a modality lies.

        Raises:
          UserError: neither the batch nor the model knows of which modality the tokens are.
        """
        if modality is None:
            modality = self._modality_of(tokens)
        length = real.shape[1]
        capacities = self.part.capacities if room == "data" else None
        routes, drawn = {}, {}
        for number, (name, _) in enumerate(self.part.groups):
            own = real & (modality == number)
            size = length if capacities is None else min(length, capacities[number])
            routes[name] = jax.vmap(lambda own, size=size: routing.routes_of_some(own, size=size))(own)
            if keys is not None:
                drawn[name] = jax.vmap(functools.partial(_fold, number))(keys)
        return Order(routes, drawn)

    def _modality_of(self, tokens: jax.Array) -> jax.Array:
        """int8[B, S], by the ids of tokens."""
        if not self.part.ranges:
            raise UserError(
                "model.mlp has a group of experts for each modality, and neither the batch nor model.mlp.ranges says "
                "which a token is of. Take data with several modalities (TwoModalityData), or mlp=Experts."
            )
        found = ModalityMap(ranges=self.part.ranges)
        return jnp.asarray(found.of_ids).at[tokens].get(mode="fill", fill_value=PADDING)

    def infer(self, x: jax.Array, order: Order) -> jax.Array:
        """See `llama3.parts.RoutedMlp`."""
        y = jnp.zeros_like(x)
        for name, _ in self.part.groups:
            routes = order.routes[name]
            made = self.group(name).infer(_placed(x, routes), Prepared(routes.tokens < x.shape[1]))
            y += _placed(made, routing.reverse(routes))
        return y

    def with_numbers(self, x: jax.Array, order: Order, numbers: Numbers) -> tuple[jax.Array, Numbers]:
        """See `llama3.parts.RoutedMlp`."""
        y, found = jnp.zeros_like(x), dict(numbers)
        for name, _ in self.part.groups:
            routes = order.routes[name]
            prepared = Prepared(routes.tokens < x.shape[1], order.keys.get(name))
            made, changed = self.group(name).with_numbers(_placed(x, routes), prepared, _of_group(numbers, name))
            y += _placed(made, routing.reverse(routes))
            found |= {f"{name}/{key}": value for key, value in changed.items()}
        return y, found


@dataclasses.dataclass(frozen=True)
class PublishedSize:
    """A class of models of equal FLOPs a token: Table 1 of arXiv 2407.21770.

    A row of the table says layers, width, the FFN's width F, heads, and the parameters of four models. These come out
    with untied embeddings of 65,536 and 2 d F parameters an FFN, so the three matrices of a gated one have 2/3 F
    columns.

    Attributes:
      layers, dim, ffn, heads: Of the dense model; F is printed.
      depth: (layers, width, F, heads) of the models with mixture-of-depths.
      parameters: As printed: dense, with 8 experts, with mixture-of-depths, with both.
    """

    layers: int
    dim: int
    ffn: int
    heads: int
    depth: tuple[int, int, int, int]
    parameters: tuple[float, float, float, float]


TABLE_1 = {
    "90M": PublishedSize(8, 512, 2048, 8, (14, 512, 2048, 8), (90e6, 210e6, 110e6, 317e6)),
    "435M": PublishedSize(24, 1024, 4096, 16, (40, 1024, 4096, 16), (435e6, 1.9e9, 635e6, 3e9)),
    "1.4B": PublishedSize(24, 2048, 8192, 16, (32, 2304, 9216, 18), (1.4e9, 7.1e9, 2.3e9, 12e9)),
}
"""The published sizes by name."""

VOCABULARY = 65_536
"""Ids of text and of 8,192 codes of images."""


def published(size: str, mlp: MlpPart | None = None, *, depth: MixtureOfDepths | None = None) -> LlamaConfig:
    """A model of `TABLE_1`.

    Args:
      size: "90M", "435M" or "1.4B".
      mlp: Experts; None = four of each modality.
      depth: Mixture-of-depths, which have more layers; None = without.
    """
    row = TABLE_1[size]
    layers, dim, ffn, heads = (row.layers, row.dim, row.ffn, row.heads) if depth is None else row.depth
    return LlamaConfig(
        layers=layers,
        dim=dim,
        ffn_dim=2 * ffn // 3,
        heads=heads,
        kv_heads=heads,
        vocabulary=VOCABULARY,
        rope_theta=10_000.0,
        max_positions=4096,
        mlp=mlp or ModalityExperts(groups=(("text", 4), ("image", 4))),
        norm=OutputRmsNorm(),
        depth=depth,
    )


def _fold(number: int, data: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), number))


def _placed(x: jax.Array, routes: routing.Routes) -> jax.Array:
    return jax.vmap(routing.dispatch)(x, routes)


def _of_group(numbers: Numbers, name: str) -> Numbers:
    return {key.removeprefix(f"{name}/"): value for key, value in numbers.items() if key.startswith(f"{name}/")}


def _no_folder(*_: object) -> NoReturn:
    raise UserError(
        "MoMa and mixture-of-depths have no form in folders of Hugging Face, whose MoEs choose experts by token. Use "
        "the run folder as it is: scalejax generate, eval and init take it."
    )


def _describe(config: LlamaConfig) -> dict[str, str]:
    lines, part = llama.describe(config), config.mlp
    if isinstance(part, ModalityExperts):
        lines |= {"experts": ", ".join(f"{count} of {name}" for name, count in part.groups)}
    if isinstance(config.depth, MixtureOfDepths):
        lines |= {"mixture-of-depths": f"every other layer sees {config.depth.capacity:.3g} of the tokens"}
    return lines


MOMA = Architecture(
    config=LlamaConfig,
    parts=(*llama.LLAMA.parts, Experts, ModalityExperts, ExpertChoice, AuxiliaryRouter, MixtureOfDepths, OutputRmsNorm),
    build=Llama,
    name="MoMa",
    model_type="moma",
    entries=_no_folder,
    sizes=_no_folder,
    derived=(),
    copies=_no_folder,
    read_config=_no_folder,
    write_config=_no_folder,
    describe=_describe,
    has=lambda config: isinstance(config.mlp, ModalityExperts) or config.depth is not None,
)
