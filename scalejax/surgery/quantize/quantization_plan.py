"""The plan of a quantization: the format of every weight of a model."""

import dataclasses
from collections.abc import Mapping, Sequence

from scalejax.errors import UserError
from scalejax.models.llm import mapping
from scalejax.models.llm.mapping import Entry, TableTensor
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.models.llm.packed_layouts.known import check_inputs
from scalejax.models.llm.packed_layouts.protocol import PackedLayout
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantized import rules, static
from scalejax.numerics.quantized.rules import QuantizationRule

KEPT = QuantizationRule(module_path="embed|head|(.*/)?[a-z_]*norm")
"""What stays as it is unless a rule names it: embeddings, the head and norms."""

ROUTERS = QuantizationRule(module_path="(.*/)?router")
"""What stays as it is in any case: a router is small, and what it chooses is computed in float32."""

_LEFT = "none"
_ROW = ":row"


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of the model that is written.

    Attributes:
      tensor: Its lines of the table of parameters.
      module: The path that rules are matched against: "layers/0/attention/query", "embed", for all experts of a layer
        "layers/0/mlp/gate"; of a tensor of two parameters both, "layers/0/mlp/gate and layers/0/mlp/up".
      shape: Of the tensor; products sum over its last axis.
      format: Its format; None = it stays as it is.
      inputs: Format of what it multiplies, under a static scale; None = that stays as it is.
    """

    tensor: TableTensor
    module: str
    shape: tuple[int, ...]
    format: BlockFormat | None
    inputs: static.Format | None = None

    @property
    def name(self) -> str:
        """Its name in a folder of Hugging Face."""
        return self.tensor.name

    @property
    def layer(self) -> int | None:
        """Its layer, or None."""
        return self.tensor.layer


def parse_rule(text: str) -> tuple[str, str]:
    """(pattern, format) of `--rule PATTERN=FORMAT`.

    Raises:
      UserError: it has no "=", its pattern is no regular expression, or there is no such format.
    """
    pattern, _, name = text.rpartition("=")
    if not pattern or not name:
        raise UserError(f'--rule must be PATTERN=FORMAT, such as "layers/0/.*=mxfp8_e4m3"; got {text!r}.')
    try:
        QuantizationRule(module_path=pattern)
        check_format(name)
    except UserError as error:
        raise UserError(f"--rule {text}: {error}") from None
    return pattern, name


def check_format(name: str) -> None:
    """Refuses what no weight can have.

    Raises:
      UserError: it is neither "none" nor a format; the nearest ones are listed.
    """
    if name != _LEFT:
        formats.find(name.removesuffix(_ROW))


def make(
    model: LanguageModel,
    format: str,
    given: Sequence[tuple[str, str]],
    layout: PackedLayout,
    inputs: static.Format | None = None,
) -> tuple[Weight, ...]:
    """Gives each weight its format, in the order in which a model passes them.

    Args:
      model: The model.
      format: Of all matrices that no rule names but embeddings and the head; "none" = they stay. "int8:64" has blocks
        of 64, "int8:row" one for each row.
      given: Rules before that, (pattern, format): the first pattern that matches the whole of a path decides.
      layout: How it will be stored.
      inputs: Of what all matrices multiply that take a format.

    Raises:
      UserError: there is no such format, a rule decides of nothing, or a weight does not fit its format or the layout.
      UnsupportedError: the layout cannot hold a weight, or the scale of what it multiplies.
    """
    check_format(format)
    patterns = {QuantizationRule(module_path=pattern): name for pattern, name in reversed(given)}
    ordered = [QuantizationRule(module_path=pattern) for pattern, _ in given]
    used: set[QuantizationRule] = set()
    made = []
    sizes = model.architecture.sizes(model.config)
    for tensor in _tensors(model, layout, sizes):
        name, shape = tensor.name, tensor.shape(sizes)
        modules = [_module(entry, tensor.layer) for entry in tensor.entries]
        decided = {}
        for module in modules:
            rule = rules.find([ROUTERS, *ordered, KEPT], module)
            decided[module] = format if rule is None else patterns.get(rule, _LEFT)
            if rule is not None:
                used.add(rule)
        chosen = decided[modules[0]]
        if any(own != chosen for own in decided.values()):
            shown = ", but ".join(f"{own} for {module}" for module, own in decided.items())
            raise UserError(
                f"--layout {layout.name} has one tensor, {name}, where rules say {shown}. Give both one format, or "
                "choose --layout scalejax."
            )
        found = None if chosen == _LEFT else _sized(chosen, name, shape)
        if found is not None:
            layout.check(name, found, shape)
        met = inputs if found is not None and len(shape) == 2 and modules != ["embed"] else None
        if met is not None:
            check_inputs(layout, name, met, shape)
        made.append(Weight(tensor, " and ".join(modules), shape, found, met))
    for rule in ordered:
        if rule not in used:
            known = sorted({weight.module for weight in made if weight.layer in (None, 0)})
            free = [module for module in known if rules.find([ROUTERS], module) is None]
            raise UserError(
                f"--rule {rule.module_path}={patterns[rule]} decides of no weight: its pattern matches none, or rules "
                f"before it match them all. Modules are {', '.join(free)}, and so on for each layer"
                f"{'; routers stay as they are' if free != known else ''}."
            )
    if not any(weight.format for weight in made):
        raise UserError("--format and --rule leave every weight as it is. Name a format for some of them.")
    if inputs is not None and not any(weight.inputs for weight in made):
        raise UserError(f"--activations {inputs}: no matrix of a product takes a format. Name one for some of them.")
    return tuple(made)


def _tensors(model: LanguageModel, layout: PackedLayout, sizes: Mapping[str, int]) -> list[TableTensor]:
    """The tensors that are written: the embedding, layer after layer, what comes behind."""
    family, config = model.architecture, model.config
    entries = family.entries_in(layout.experts, config) if family.forms else family.entries(config)

    def place(tensor: TableTensor) -> int:
        if tensor.layer is not None:
            return tensor.layer
        return -1 if tensor.entries[0].path.startswith("embed") else config.layers

    return sorted(mapping.tensors(entries, sizes, config.layers).values(), key=place)


def _module(entry: Entry, layer: int | None) -> str:
    path = entry.path.removesuffix("/weight").removesuffix("/scale")
    return path if layer is None else path.replace("layers/", f"layers/{layer}/", 1)


def _sized(name: str, weight: str, shape: tuple[int, ...]) -> BlockFormat:
    """The format of a name, for a weight."""
    columns = shape[-1]
    if name.endswith(_ROW):
        return formats.find(f"{name.removesuffix(_ROW)}:{columns}")
    format = formats.find(name)
    if columns < format.k1:
        better = f"{name}:{columns}" if format.scale == "float32" else "none"
        raise UserError(
            f"{weight} has {columns} columns, fewer than the {format.k1} of a block of {format.name}. Choose another "
            f"format for it, such as {better} (--rule PATTERN=FORMAT)."
        )
    return format
