"""The plan of a quantization: the format of every weight of a model."""

import dataclasses
from collections.abc import Iterator, Sequence

from scalejax.errors import UserError
from scalejax.models.llm.mapping import LAYER, Entry
from scalejax.models.llm.model_folder import LanguageModel
from scalejax.models.llm.packed_layouts.known import check_inputs
from scalejax.models.llm.packed_layouts.protocol import PackedLayout
from scalejax.numerics import formats
from scalejax.numerics.formats import BlockFormat
from scalejax.numerics.quantized import rules, static
from scalejax.numerics.quantized.rules import QuantizationRule

KEPT = QuantizationRule(module_path="embed|head|(.*/)?[a-z_]*norm")
"""What stays as it is unless a rule names it: embeddings, the head and norms."""

_LEFT = "none"
_ROW = ":row"


@dataclasses.dataclass(frozen=True)
class Weight:
    """One tensor of the model that is written.

    Attributes:
      name: Its name in a folder of Hugging Face.
      module: The path that rules are matched against: "layers/0/attention/query", "embed".
      entry: Its line of the table of parameters.
      layer: Its layer, or None.
      shape: Of the tensor; products sum over its last axis.
      format: Its format; None = it stays as it is.
      inputs: Format of what it multiplies, under a static scale; None = that stays as it is.
    """

    name: str
    module: str
    entry: Entry
    layer: int | None
    shape: tuple[int, ...]
    format: BlockFormat | None
    inputs: static.Format | None = None


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
    for name, module, entry, layer, shape in _weights(model):
        rule = rules.find([*ordered, KEPT], module)
        chosen = format
        if rule is not None:
            used.add(rule)
            chosen = patterns.get(rule, _LEFT)
        found = None if chosen == _LEFT else _sized(chosen, name, shape)
        if found is not None:
            layout.check(name, found, shape)
        met = inputs if found is not None and len(shape) == 2 and module != "embed" else None
        if met is not None:
            check_inputs(layout, name, met, shape)
        made.append(Weight(name, module, entry, layer, shape, found, met))
    for rule in ordered:
        if rule not in used:
            modules = sorted({weight.module for weight in made if weight.layer in (None, 0)})
            raise UserError(
                f"--rule {rule.module_path}={patterns[rule]} decides of no weight: its pattern matches none, or rules "
                f"before it match them all. Modules are {', '.join(modules)}, and so on for each layer."
            )
    if not any(weight.format for weight in made):
        raise UserError("--format and --rule leave every weight as it is. Name a format for some of them.")
    if inputs is not None and not any(weight.inputs for weight in made):
        raise UserError(f"--activations {inputs}: no matrix of a product takes a format. Name one for some of them.")
    return tuple(made)


def _weights(model: LanguageModel) -> Iterator[tuple[str, str, Entry, int | None, tuple[int, ...]]]:
    """(name, module, entry, layer, shape): the embedding, layer after layer, what comes behind."""
    sizes, entries = model.architecture.sizes(model.config), model.architecture.entries(model.config)
    if any(entry.spread for entry in entries):
        raise UserError(f"{model.path}: weights of experts are not quantized yet. Give a model without experts.")
    inside = [entry for entry in entries if entry.stacked]
    before = [entry for entry in entries if not entry.stacked and entry.path.startswith("embed")]
    after = [entry for entry in entries if not entry.stacked and entry not in before]
    ordered: list[tuple[Entry, int | None]] = [(entry, None) for entry in before]
    ordered += [(entry, layer) for layer in range(model.config.layers) for entry in inside]
    ordered += [(entry, None) for entry in after]
    for entry, layer in ordered:
        path = entry.path.removesuffix("/weight").removesuffix("/scale")
        module = path if layer is None else path.replace("layers/", f"layers/{layer}/", 1)
        yield entry.name.replace(LAYER, str(layer)), module, entry, layer, entry.tensor_shape(sizes)


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
