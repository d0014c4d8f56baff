"""The entry of a family of language models: all that inference and surgery know of it.

An entry says for the configs of a family how the model is built, how its parameters lie in a checkpoint of Hugging
Face, and what config.json says. `families` finds it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from scalejax import nn
from scalejax.data.text.tokens import TokenSchema
from scalejax.errors import UserError
from scalejax.models.llm.mapping import Entry
from scalejax.models.llm.special_tokens import SpecialTokens
from scalejax.nn.layers import Gather, whole
from scalejax.numerics.dtypes import Dtypes


class LanguageConfig(Protocol):
    """Config of a language model: a frozen dataclass of plain values and parts."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def layers(self) -> int: ...

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def heads(self) -> int:
        """Of queries."""
        ...

    @property
    def kv_heads(self) -> int:
        """Of keys and values."""
        ...

    @property
    def window(self) -> int | None:
        """Positions that a query sees, its own the last; None = all before it."""
        ...

    @property
    def max_positions(self) -> int:
        """Longest sequence that the model is meant for."""
        ...

    def parameters(self) -> int:
        """Exact number of parameters."""
        ...

    def bound(self, schema: TokenSchema) -> Self:
        """This config with the vocabulary of the data, if it has none of its own."""
        ...


Config = TypeVar("Config")


class Cache(Protocol):
    """What a model keeps of the tokens that it has read: a pytree whose arrays are in `nn.PagedCache`."""

    def admit(self, reading: nn.Reading) -> tuple[Self, nn.Reading]:
        """Stores the positions of tokens before layers store more of them, and says what their rows can see."""
        ...


class LanguageModule(Protocol):
    """A model that reads whole rows, or goes on with what it keeps of them in a cache.

    Its modules are `embed` and `head` (a parameter "weight" each; a tied model has no head), `final_norm`, and
    `layers`, whose parameters have a leading axis of layers.
    """

    compute_dtype: DTypeLike

    @property
    def layers(self) -> nnx.Module: ...

    @property
    def final_norm(self) -> Callable[[jax.Array], jax.Array]: ...

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *, gather: Gather = whole
    ) -> jax.Array:
        """Logits of all positions, wide[B, S, V]."""
        ...

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array, *, gather: Gather = whole
    ) -> tuple[jax.Array, jax.Array]:
        """What the head multiplies, compute_dtype[B, S, E], and the matrix of the head, [E, V]."""
        ...

    def logits(self, x: jax.Array, head: jax.Array) -> jax.Array:
        """Of some of these: [..., E] -> wide[..., V]."""
        ...

    def cache(self, pages: nn.PageShape) -> "Cache":
        """An empty cache."""
        ...

    def extend(
        self, tokens: jax.Array, reading: nn.Reading, cache: "Cache", *, gather: Gather = whole
    ) -> tuple[jax.Array, "Cache"]:
        """Reads the next tokens of rows: logits after the last of each, wide[R, V], and the cache."""
        ...

    @property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Matrices of a layer by path, in the order in which tokens pass them; those of a stage share their input."""
        ...

    def run_layer(self, layer: Any, x: jax.Array, stage: int | None = None, *expert: jax.Array) -> jax.Array:
        """What comes behind a layer, or what the matrices of a stage of it multiply; no parameter of `self` is read.

        Args:
          layer: `layers` with the parameters of one.
          x: float[B, S, E] before the layer; each row is a document.
          stage: A number of `stages`; None = behind the layer.
          expert: int32[], given where the parameters of the stage have an axis of experts: of this one, and zeros for
            tokens that do not reach it.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(Generic[Config]):
    """A family of language models.

    Attributes:
      config: Class of its configs.
      parts: Dataclasses that a config may hold and that a model folder may name.
      build: (config, rngs, dtypes) -> the model.
      name: In config.json of Hugging Face, as "architectures" has it.
      model_type: In the same file.
      entries: The tensors of a checkpoint of Hugging Face.
      sizes: Sizes of the axes of `entries`.
      derived: Ends of names of what checkpoints hold besides, and config.json says.
      copies: {name of a tensor that a checkpoint may repeat: name of the one that it equals}.
      read_config: (content of config.json, its name) -> config, special tokens, and keys of which nothing is known.
      write_config: (config, special tokens, dtype of the weights) -> content of config.json.
      describe: Lines of a table for a user.
      has: Whether a config of that class is of this family, where several share one.
      forms: Where a checkpoint can hold experts in several forms, the tensors of each by its name; the first is that of
        `entries`.
    """

    config: type[Config]
    parts: tuple[type, ...]
    build: Callable[[Config, nnx.Rngs, Dtypes], LanguageModule]
    name: str
    model_type: str
    entries: Callable[[Config], tuple[Entry, ...]]
    sizes: Callable[[Config], dict[str, int]]
    derived: tuple[str, ...]
    copies: Callable[[Config], dict[str, str]]
    read_config: Callable[[Mapping[str, object], str], tuple[Config, SpecialTokens, tuple[str, ...]]]
    write_config: Callable[[Config, SpecialTokens, str], dict[str, object]]
    describe: Callable[[Config], dict[str, str]]
    has: Callable[[Config], bool] = lambda _: True
    forms: Mapping[str, Callable[[Config], tuple[Entry, ...]]] = dataclasses.field(default_factory=dict)

    def entries_in(self, form: str, config: Config) -> tuple[Entry, ...]:
        """The tensors of a checkpoint that has experts in a form.

        Raises:
          UserError: the family has no such form.
        """
        if form not in self.forms:
            known = ", ".join(self.forms)
            raise UserError(
                f"--experts {form}: {self.name} has {f'experts in the forms {known}' if known else 'no experts'}. "
                f"{'Name one of these' if known else 'Leave it out'}."
            )
        return self.forms[form](config)

    def stored_entries(self, config: Config, names: Iterable[str]) -> tuple[Entry, ...]:
        """The tensors of a checkpoint in the form that it has, by the names of the tensors in its files."""
        usual, given = self.entries(config), tuple(names)
        known = {entry.tensor(0, 0) for entry in usual}
        for form in self.forms.values():
            # Quantized ones have more behind their names.
            own = tuple(entry.tensor(0, 0) for entry in form(config) if entry.tensor(0, 0) not in known)
            if own and any(name.startswith(own) for name in given):
                return form(config)
        return usual
