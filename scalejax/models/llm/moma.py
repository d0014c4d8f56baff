"""MoMa: a decoder whose experts are grouped by modality (Lin et al., arXiv 2407.21770).

    h = x + RMSNorm(Attention(x));    y = h + RMSNorm(sum_j g_j(h) FFN_j(h)) over the experts j of the token's modality

A token of modality M goes to the group of M, known from its id; inside of the group every expert takes its
k = floor(b_M / n_M) best of the b_M tokens of that modality, at least 1 where there is one, by sigmoid scores that are
also the weights (`experts.ExpertChoice`). The mixed-modal form with one group of 8 is `Experts(count=8)`.

    LlamaConfig(..., mlp=ModalityExperts(groups=(("text", 4), ("image", 4))), norm=OutputRmsNorm())

Which tokens are of which modality is the same for all layers, so their order is made once: each layer gathers the
tokens of a modality, [B, C, E] with C places a row (`TokenSchema.capacities`), and gathers what came of them back.

Axes: B rows, S positions, E model, F hidden, n experts of a group, C places of a modality in a row.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from scalejax import nn
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm.experts import Execution, ExpertChoice, ExpertLayers, Experts
from scalejax.models.llm.llama3.parts import Numbers
from scalejax.nn import routing
from scalejax.train.metrics.protocol import Metric

if TYPE_CHECKING:
    from scalejax.models.llm.llama3.config import LlamaConfig

Order = dict[str, routing.Routes]
"""Of each modality the places of its tokens in every row: a `Routes` whose arrays have a leading axis of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModalityExperts:
    """Groups of experts, one for each modality of the data; gated MLPs, `ffn_dim` of the config wide each.

    Attributes:
      groups: (modality, experts) of each, in the order of the data's modalities.
      router: Among which tokens experts choose.
      execution: "batched" or "sequential", see `Experts`.
      capacities: Most tokens of each modality in a row; None = those of the data.
    """

    groups: tuple[tuple[str, int], ...] = (("text", 4), ("image", 4))
    router: ExpertChoice = ExpertChoice()
    execution: Execution = "batched"
    capacities: tuple[int, ...] | None = None

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
        """These groups with the capacities of the data, if they have none of their own.

        Raises:
          UserError: the data has other modalities.
        """
        names = tuple(name for name, _ in self.groups)
        if names != schema.modalities:
            raise UserError(
                f"model.mlp.groups are of {', '.join(names)}, but tokens of the data are of "
                f"{', '.join(schema.modalities)}. Give a group for each modality, in that order, or take data that "
                "tell them apart (TwoModalityData)."
            )
        if self.capacities is not None:
            return self
        found = tuple(schema.capacity(number) for number in range(len(names)))
        return dataclasses.replace(self, capacities=found)

    def build(self, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes) -> "ModalityExpertLayers":
        """See `llama3.parts.MlpPart`."""
        return ModalityExpertLayers(self, config, rngs, dtypes)

    @property
    def generates(self) -> bool:
        """See `llama3.parts.RoutedPart`."""
        return False

    def macs(self, config: "LlamaConfig") -> int:
        """See `llama3.parts.RoutedPart`: a token meets one expert in the mean, and the router of its group."""
        routers = [count for _, count in self.groups]
        return config.dim * sum(routers) // len(routers) + 3 * config.dim * config.ffn_dim

    def losses(self, numbers: Numbers) -> jax.Array:
        """See `llama3.parts.RoutedPart`: experts that choose are even."""
        return jnp.zeros((), next(iter(numbers.values())).dtype)

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

    def __init__(self, part: ModalityExperts, config: "LlamaConfig", rngs: nnx.Rngs, dtypes: nn.Dtypes):
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

    def prepare(self, real: jax.Array, modality: jax.Array | None) -> Order:
        """See `llama3.parts.RoutedMlp`: where in its row each token of a modality lies.

        Raises:
          UserError: the batch does not say of which modality its tokens are.
        """
        if modality is None:
            raise UserError(
                "model.mlp has a group of experts for each modality, and the batch does not say of which its tokens "
                "are. Take data with several modalities (TwoModalityData), or mlp=Experts."
            )
        capacities = self.part.capacities or (real.shape[1],) * len(self.part.groups)
        order = {}
        for number, (name, _) in enumerate(self.part.groups):
            own = real & (modality == number)
            size = min(real.shape[1], capacities[number])
            order[name] = jax.vmap(lambda own, size=size: routing.routes_of_some(own, size=size))(own)
        return order

    def with_numbers(self, x: jax.Array, order: Order, numbers: Numbers) -> tuple[jax.Array, Numbers]:
        """See `llama3.parts.RoutedMlp`."""
        y, found = jnp.zeros_like(x), dict(numbers)
        for name, _ in self.part.groups:
            routes = order[name]
            own = jax.vmap(routing.dispatch)(x, routes)
            real = routes.tokens < x.shape[1]
            made, changed = self.group(name).with_numbers(own, real, _of_group(numbers, name))
            y += jax.vmap(routing.dispatch)(made, routing.reverse(routes))
            found |= {f"{name}/{key}": value for key, value in changed.items()}
        return y, found


def _of_group(numbers: Numbers, name: str) -> Numbers:
    return {key.removeprefix(f"{name}/"): value for key, value in numbers.items() if key.startswith(f"{name}/")}
