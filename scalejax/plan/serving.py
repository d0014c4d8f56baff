"""A language model that is served on a machine, by arithmetic alone: what fits, and the least times. Compiles nothing.

    machine = parse_machine("v5p:4x4x4")
    mesh = serving_mesh(machine, "context=8,tensor=8", config.kv_heads)
    arrays = abstract_model.arrays_of(config, mesh, dtype="bfloat16", page=64, kv_dtype="compute")
    model = PlannedModel(config, *arrays, 64)
    found = plan_serving(model, machine, mesh, slots=8, context=131_072, piece=512)
    found.greatest_context, found.prefill.seconds, found.decode.seconds

N devices along `context` share the tokens of each sequence, those along `tensor` heads, hidden features and vocabulary;
heads of keys and values that do not divide are whole on each device, and attention then is too. With T new tokens after
P cached ones, H and K heads of queries and keys on a device, D their width, E that of the model, L layers, e bytes an
element, F FLOP/s and B bytes/s of a device:

    products    2 T / N FLOPs for each element of a matrix on the device, of experts for those that a token meets
    attention   4 H D L FLOPs for each pair of a query and a key that it sees, of which a device has 1 / N
    memory      weights, and keys and values as they are stored, are read once from HBM
    tensor      2 L all-reduces of T / N x E x e bytes
    pass-KV     N - 1 transfers a layer of 2 (T + P) / N x K D e bytes, hidden behind the attention as far as it lasts
    pass-Q      N - 1 transfers of T / N x H D e, hidden likewise, and an all-to-all of T / N x H (D + 1) float32 with
                each other device, which is not

A prompt is read in pieces, each max(products + attention, memory) + tensor + what is not hidden; Algorithm 5 of
`parallel.context_choice` says for each what goes round. A token of B rows is the same with T = B and pass-Q, whose new
keys and values go to all devices of `context`. Rates are peaks of data sheets (of attention the part that a head fills
of a matrix unit), and the start of a transfer or of a kernel costs nothing: times are lower bounds, and those of a
token lie far below what is measured where few bytes travel often.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Protocol

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from scalejax.chips import Chip
from scalejax.errors import UserError, check_at_least
from scalejax.parallel import context_choice
from scalejax.parallel import mesh as meshes
from scalejax.parallel.activations import ACTIVATIONS
from scalejax.parallel.context_choice import ContextCosts
from scalejax.parallel.mesh import AXES, MeshShape
from scalejax.parallel.rules import LLM, LogicalAxes, Rules
from scalejax.plan import planner_machines
from scalejax.plan.arithmetic.decoders import experts_of
from scalejax.plan.arithmetic.step_model import Moved, moved_seconds
from scalejax.plan.compiled.collectives import Kind
from scalejax.plan.planner_machines import Gpus
from scalejax.plan.topology import Topology, lay_out

if TYPE_CHECKING:
    from scalejax.train.state import ModelShape

Machine = Topology | Gpus

_SERVING_AXES = ("context", "tensor")


class ServedConfig(Protocol):
    """What the config of a language model says; `models.llm.architecture.LanguageConfig` is one."""

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def vocabulary(self) -> int | None: ...

    @property
    def max_positions(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A language model and a cache of its own.

    Attributes:
      config: Its architecture, with a vocabulary.
      shape: Its parameters.
      cache: Arrays of one page for each device along `context`: (name, array, names of its axes).
      page: Places of a page.
    """

    config: ServedConfig
    shape: "ModelShape"
    cache: tuple[tuple[str, jax.ShapeDtypeStruct, LogicalAxes], ...]
    page: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingTime:
    """Seconds of one device.

    Attributes:
      product_s: Products with parameters.
      attention_s: Attention.
      hbm_s: Weights, keys and values from memory.
      tensor_s: All-reduces over `tensor`.
      context_s: What travels over `context`.
      exposed_s: Of these, what is not hidden behind attention.
      seconds: All, see the module.
      pass_q: Share of the tokens that were read by pass-Q.
    """

    product_s: float
    attention_s: float
    hbm_s: float
    tensor_s: float
    context_s: float
    exposed_s: float
    seconds: float
    pass_q: float = 0.0

    def __add__(self, other: "ServingTime") -> "ServingTime":
        return ServingTime(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in dataclasses.fields(ServingTime)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What a served model needs, and the least times.

    Attributes:
      machine: Its name.
      mesh: Devices per axis, axes of size 1 left out.
      parameters: How many the model has.
      kv_bytes_a_token: Keys and values of a token, with their scales, all heads and layers.
      kv_bytes_on_device: Of these, what one device holds in the mean: 1 / N over `context`.
      memory: Bytes of a device by kind.
      usable_bytes: That it has.
      slots: Sequences at once.
      context: Tokens of each.
      greatest_context: Tokens of one sequence alone, by memory.
      greatest_slots: Sequences of `context` tokens, by memory.
      max_positions: Tokens that the model is meant for.
      piece: Tokens that are read at once.
      hidden_from: T*, new tokens from which on pass-KV hides its transfers by equation 2; None = nothing travels.
      prefill: Of one prompt of `context` tokens.
      decode: Of one token of all slots.
      warnings: What may make the figures wrong.
    """

    machine: str
    mesh: dict[str, int]
    parameters: int
    kv_bytes_a_token: int
    kv_bytes_on_device: float
    memory: dict[str, int]
    usable_bytes: int
    slots: int
    context: int
    greatest_context: int
    greatest_slots: int
    max_positions: int
    piece: int
    hidden_from: float | None
    prefill: ServingTime
    decode: ServingTime
    warnings: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Of a device, all kinds."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether slots of that many tokens do."""
        return self.total_bytes <= self.usable_bytes

    @property
    def tokens_per_s(self) -> float:
        """Of all slots together."""
        return self.slots / self.decode.seconds

    def to_json(self) -> dict[str, object]:
        """The result as plain values."""
        return {**dataclasses.asdict(self), "fits": self.fits, "tokens_per_s": self.tokens_per_s}


def parse_machine(name: str) -> Machine:
    """The machine of a name: TPUs as `plan` takes them, or GPU:HOSTSxGPUS.

    Raises:
      UserError: it names none, or several slices.
    """
    gpus = planner_machines.find_gpus(name)
    if gpus is not None:
        return gpus
    found = planner_machines.parse_tpus(name)
    if found.slices > 1:
        raise UserError(
            f"--topology {name}: a served model lies on one slice; every slice can have a copy. Leave out "
            f",slices={found.slices}."
        )
    return found


def serving_mesh(machine: Machine, text: str | None, kv_heads: int) -> AbstractMesh:
    """The mesh of a served model.

    Args:
      machine: Whose devices it has.
      text: As "context=8,tensor=8"; None = as many devices along `tensor` as divide the heads of keys and values (on
        GPUs those of one host), the rest along `context`.
      kv_heads: Of the model.

    Raises:
      UserError: another axis is named, or the sizes do not multiply to the devices.
    """
    if text is None:
        tensor = math.gcd(kv_heads, machine.in_host if isinstance(machine, Gpus) else machine.devices)
        shape = MeshShape(fsdp=1, tensor=tensor, context=machine.devices // tensor)
    else:
        shape = meshes.parse_mesh(text)
    for axis in AXES:
        if axis not in _SERVING_AXES and getattr(shape, axis) != 1:
            raise UserError(
                f"--mesh {text}: --serve plans one copy of a model over context and tensor; got "
                f"{axis}={getattr(shape, axis)}. Give these devices to context or tensor."
            )
    try:
        sizes = shape.resolve(machine.devices)
    except UserError as error:
        raise UserError(
            f"--mesh {text}: the sizes must multiply to the {machine.devices} devices of {machine.name}. Try "
            f"context=-1,tensor={math.gcd(kv_heads, machine.devices)}."
        ) from error
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def plan_serving(
    model: PlannedModel, machine: Machine, mesh: AbstractMesh, *, slots: int, context: int, piece: int
) -> ServingPlan:
    """What a model needs on a machine.

    Args:
      model: The model, and the pages of its cache on this mesh.
      machine: The devices.
      mesh: See `serving_mesh`.
      slots: Sequences at once.
      context: Tokens of each.
      piece: Tokens that are read at once, for each device along `context`.

    Raises:
      UserError: a number is below 1.
    """
    for name, value in (("--slots", slots), ("--context-length", context), ("piece", piece)):
        check_at_least(name, value, 1)
    own = _Share.of(model, mesh)
    rates = _Rates.of(machine, mesh, own)
    usable = machine.chip.usable_hbm_bytes // machine.chip.devices_per_chip
    most, unit = piece * own.ranks, model.page * own.ranks
    sequence = -(-context // unit) * own.unit_bytes
    activations = own.piece_bytes(min(most, context)) + own.travelling_bytes(context)
    left = usable - own.parameter_bytes
    units = (left - own.piece_bytes(most) - own.logits_bytes) // (own.unit_bytes + own.travelling_bytes(unit))
    pieces = [(min(most, context - cached), cached) for cached in range(0, context, most)]
    prefill = functools.reduce(ServingTime.__add__, (rates.read(own, new, cached) for new, cached in pieces))
    return ServingPlan(
        machine=machine.name,
        mesh={axis: size for axis, size in mesh.shape.items() if size > 1},
        parameters=sum(math.prod(p.shape) for p in model.shape.params.values()),
        kv_bytes_a_token=own.kv_bytes_a_token,
        kv_bytes_on_device=own.kv_bytes,
        memory={
            "parameters": own.parameter_bytes,
            "keys and values": slots * sequence,
            "activations": activations + slots * own.logits_bytes,
        },
        usable_bytes=usable,
        slots=slots,
        context=context,
        greatest_context=max(0, units) * unit,
        greatest_slots=max(0, (left - activations) // (sequence + own.logits_bytes)),
        max_positions=model.config.max_positions,
        piece=most,
        hidden_from=None if rates.costs is None else rates.costs.hidden_from,
        prefill=dataclasses.replace(prefill, pass_q=prefill.pass_q / context),
        decode=rates.decode(own, slots, context),
        warnings=tuple(_warnings(model, machine, mesh, own, context)),
    )


def _warnings(model: PlannedModel, machine: Machine, mesh: AbstractMesh, own: "_Share", context: int) -> list[str]:
    found = lay_out(machine, MeshShape(**dict(mesh.shape)))[1] if isinstance(machine, Topology) else []
    if context > model.config.max_positions:
        found.append(
            f"the model is meant for {model.config.max_positions:,} positions, and a server refuses more; planned are "
            f"{context:,}."
        )
    if own.whole_heads:
        found.append(
            f"{model.config.kv_heads} heads of keys and values do not divide over tensor={own.tensor}: they, and "
            "attention, are whole on every device of tensor."
        )
    if getattr(model.config, "depth", None) is not None:
        found.append("layers that take some tokens count as layers that take all, which is what a server computes.")
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Share:
    """What one device has of a model.

    Attributes:
      ranks: N, devices along `context`.
      tensor: Devices along `tensor`.
      whole_heads: Whether the heads of keys and values do not divide over them.
      parameter_bytes: Of all parameters.
      read_bytes: Of those that every token meets: not of a table of embeddings that is no head, nor of experts.
      expert_bytes: Of experts.
      active: Share of the experts that a token meets.
      elements: Of the matrices of all layers that a token meets.
      head_elements: Of the head.
      unit_bytes: Of a page, with the positions of its places.
      kv_bytes_a_token: Of keys and values of a token, of all devices.
      kv_bytes: On this one in the mean.
      layers: That attend.
      dim: E.
      heads: H, of this device.
      kv_heads: K, likewise.
      width: D.
      window: Tokens that a token sees; None = all.
      itemsize: e.
      logits_bytes: Of a slot, which every device has whole.
    """

    ranks: int
    tensor: int
    whole_heads: bool
    parameter_bytes: int
    read_bytes: int
    expert_bytes: int
    active: float
    elements: float
    head_elements: int
    unit_bytes: int
    kv_bytes_a_token: int
    kv_bytes: float
    layers: int
    dim: int
    heads: int
    kv_heads: int
    width: int
    window: int | None
    itemsize: int
    logits_bytes: int

    @classmethod
    def of(cls, model: PlannedModel, mesh: AbstractMesh) -> "_Share":
        ranks, tensor, c = mesh.shape["context"], mesh.shape["tensor"], model.config
        params, axes = {**model.shape.params, **model.shape.variables}, model.shape.logical_axes
        local = {name: _local(LLM, axes[name], array, mesh) for name, array in params.items()}
        size = {name: count * params[name].dtype.itemsize for name, count in local.items()}
        table, head = "embed/weight", "head/weight" if "head/weight" in params else "embed/weight"
        experts = {name for name in params if "experts" in axes[name]}
        part = experts_of(c)
        active = 1.0 if part is None else part.active / part.count
        # Beside the axis of layers a matrix has two or more.
        matrices = {name for name in params if name.startswith("layers/") and params[name].ndim > 2}
        # Static scales belong to no token.
        of_tokens = [
            (name, array, _local(ACTIVATIONS, of, array, mesh)) for name, array, of in model.cache if len(of) > 2
        ]
        tokens = model.page * ranks
        kv = [(array, count) for name, array, count in of_tokens if name != "positions"]
        keys = [array for name, array, _ in model.cache if name == "kv"]
        whole = bool(c.kv_heads % tensor)
        assert c.vocabulary is not None
        return cls(
            ranks=ranks,
            tensor=tensor,
            whole_heads=whole,
            parameter_bytes=sum(size.values()),
            read_bytes=sum(n for name, n in size.items() if name not in experts and (name != table or head == table)),
            expert_bytes=sum(size[name] for name in experts),
            active=active,
            elements=sum(local[name] * (active if name in experts else 1) for name in matrices),
            head_elements=local[head],
            unit_bytes=sum(count * array.dtype.itemsize for _, array, count in of_tokens),
            kv_bytes_a_token=sum(array.size * array.dtype.itemsize for array, _ in kv) // tokens,
            kv_bytes=sum(count * array.dtype.itemsize for array, count in kv) / tokens,
            layers=sum(array.shape[0] for array in keys),
            dim=params[table].shape[1],
            heads=c.heads if whole else c.heads // tensor,
            kv_heads=c.kv_heads if whole else c.kv_heads // tensor,
            width=keys[0].shape[-1],
            window=getattr(c, "window", None),
            itemsize=np.dtype(params[table].dtype).itemsize,
            logits_bytes=4 * c.vocabulary,
        )

    def piece_bytes(self, tokens: int) -> int:
        """Of the activations of tokens that are read at once.

        The residual stream and what norms make of it, and the results of all matrices of a layer.
        """
        numbers = 4 * self.dim + self.elements / self.layers / self.dim
        return -(-tokens // self.ranks) * round(numbers) * self.itemsize

    def travelling_bytes(self, tokens: int) -> int:
        """Of the keys and values of one layer, gathered from their pages, and of those that come meanwhile."""
        return (1 if self.ranks == 1 else 2) * self.layer_bytes(tokens)

    def layer_bytes(self, tokens: int) -> int:
        """Of the keys and values of one layer as they are computed, this device's part."""
        return -(-tokens // self.ranks) * 2 * self.kv_heads * self.width * self.itemsize

    def seen(self, new: int, cached: int) -> int:
        """Pairs of queries and keys: new tokens after cached ones, each of which sees itself and those before it."""
        within = new if self.window is None else min(max(self.window - cached, 0), new)
        return within * cached + within * (within + 1) // 2 + (new - within) * (self.window or 0)

    def weight_bytes(self, tokens: int) -> float:
        """That so many tokens read: of experts those that at least one of them meets, if all are as likely."""
        return self.read_bytes + self.expert_bytes * (1 - (1 - self.active) ** tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rates:
    """How fast a device of a mesh is.

    Attributes:
      product: FLOP/s of products.
      attention: FLOP/s of attention.
      hbm: Bytes/s of its memory.
      transfer: (kind, axis) -> seconds of a byte.
      costs: For the choice between pass-KV and pass-Q; None = `context` has one device.
    """

    product: float
    attention: float
    hbm: float
    transfer: Callable[[Kind, Literal["context", "tensor"]], float]
    costs: ContextCosts | None

    @classmethod
    def of(cls, machine: Machine, mesh: AbstractMesh, own: _Share) -> "_Rates":
        chip: Chip = machine.chip
        flops = chip.bf16_flops_per_s / chip.devices_per_chip
        transfer = functools.cache(functools.partial(_seconds_of_byte, machine, mesh))
        costs = None
        if own.ranks > 1:
            costs = ContextCosts(
                ranks=own.ranks,
                heads=own.heads,
                kv_heads=own.kv_heads,
                element_bytes=own.itemsize,
                flops_per_s=flops,
                bytes_per_s=1 / transfer("collective-permute", "context"),
            )
        return cls(
            product=flops,
            attention=flops * min(1.0, own.width / chip.mxu_side),
            hbm=chip.hbm_bytes_per_s / chip.devices_per_chip,
            transfer=transfer,
            costs=costs,
        )

    def read(self, own: _Share, new: int, cached: int) -> ServingTime:
        """A piece of a prompt."""
        tokens = -(-new // own.ranks)
        attention_s = self._attention_s(own, own.seen(new, cached))
        travelling_s, exposed_s, pass_q = 0.0, 0.0, False
        if self.costs is not None:
            pass_q = context_choice.by_message_and_return(self.costs, new, cached) == "pass_q"
            if pass_q:
                travelling_s, exposed_s = self._around_s(own, tokens, attention_s)
            else:
                sent = (own.ranks - 1) * own.layers * own.layer_bytes(new + cached)
                travelling_s = sent * self.transfer("collective-permute", "context")
                exposed_s = max(0.0, travelling_s - attention_s)
        return self._time(
            product_s=2 * own.elements * tokens / self.product,
            attention_s=attention_s,
            hbm_s=(own.weight_bytes(tokens) + own.kv_bytes * (new + cached)) / self.hbm,
            tensor_s=self._tensor_s(own, tokens),
            context_s=travelling_s,
            exposed_s=exposed_s,
            pass_q=float(new * pass_q),
        )

    def decode(self, own: _Share, slots: int, context: int) -> ServingTime:
        """One token of each slot."""
        rows, seen = -(-slots // own.ranks), slots * min(context, own.window or context)
        kv_s = own.kv_bytes * seen / self.hbm
        attention_s = self._attention_s(own, seen)
        context_s = exposed_s = 0.0
        if own.ranks > 1:
            around_s, exposed_s = self._around_s(own, rows, max(kv_s, attention_s))
            to_all = own.layers * own.ranks * own.layer_bytes(rows * own.ranks)
            gather_s = to_all * self.transfer("all-gather", "context")
            context_s, exposed_s = around_s + gather_s, exposed_s + gather_s
        return self._time(
            product_s=2 * (own.elements + own.head_elements) * rows / self.product,
            attention_s=attention_s,
            hbm_s=own.weight_bytes(rows) / self.hbm + kv_s,
            tensor_s=self._tensor_s(own, rows),
            context_s=context_s,
            exposed_s=exposed_s,
        )

    def _time(self, **found: float) -> ServingTime:
        busy = max(found["product_s"] + found["attention_s"], found["hbm_s"])
        return ServingTime(**found, seconds=busy + found["tensor_s"] + found["exposed_s"])

    def _attention_s(self, own: _Share, pairs: int) -> float:
        return 4 * own.heads * own.width * own.layers * pairs / own.ranks / self.attention

    def _tensor_s(self, own: _Share, tokens: int) -> float:
        if own.tensor == 1:
            return 0.0
        return 2 * own.layers * tokens * own.dim * own.itemsize * self.transfer("all-reduce", "tensor")

    def _around_s(self, own: _Share, tokens: int, attention_s: float) -> tuple[float, float]:
        """pass-Q of so many queries a device: seconds of all that travels, and of what is not hidden."""
        queries = (own.ranks - 1) * own.layers * tokens * own.heads * own.width * own.itemsize
        round_s = queries * self.transfer("collective-permute", "context")
        results = own.ranks * own.layers * tokens * own.heads * (own.width + 1) * 4
        back_s = results * self.transfer("all-to-all", "context")
        return round_s + back_s, max(0.0, round_s - attention_s) + back_s


def _local(rules: Rules, axes: LogicalAxes, array: jax.ShapeDtypeStruct, mesh: AbstractMesh) -> int:
    """Elements of an array that one device has."""
    return math.prod(NamedSharding(mesh, rules.spec(axes, array.shape, mesh)).shard_shape(array.shape))


def _seconds_of_byte(machine: Machine, mesh: AbstractMesh, kind: Kind, axis: Literal["context", "tensor"]) -> float:
    """Seconds of a byte of what a device gathers, reduces or sends, the larger of what goes in and comes out."""
    if isinstance(machine, Topology):
        layout, _ = lay_out(machine, MeshShape(**dict(mesh.shape)))
        size = 10**9
        moved = Moved(what="", kind=kind, axes=(axis,), payload_bytes=size, count=1, seconds=0.0)
        return moved_seconds(machine, layout, moved) / size
    # Those of `tensor` are next to each other.
    devices = mesh.shape[axis]
    reach = mesh.shape["tensor"] * (devices if axis == "context" else 1)
    rate = machine.chip.link_bytes_per_s if reach <= machine.in_host else machine.chip.dcn_bytes_per_s
    share = 1.0 if kind == "collective-permute" else (2 if kind == "all-reduce" else 1) * (devices - 1) / devices
    return share / rate
