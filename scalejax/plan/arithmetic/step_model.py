"""A training step of a decoder on a slice by arithmetic alone: memory of a chip, bytes moved, time. Compiles nothing.

    training = Training(batch=1024, sequence=8192, mesh=MeshShape(fsdp=256), remat=REMATS["full"])
    found = estimate(llama, training, topology.parse("v6e:16x16"), share=SHARES["v6e"])
    found.memory, found.step_s, found.tokens_per_s_per_chip, found.mfu("causal")

Time is the sum of four parts, nothing overlapped:

1. Products with parameters: FLOPs that are executed, rematerialised ones included, over `share` of the peak. The share
   is the one constant of the model, fitted per chip on one published run (`published_runs`); 1 = the peak itself.
2. Attention: the products of a blockwise kernel, at that rate times the part of the matrix unit that a head fills (its
   products are `head_dim` deep or wide; a 256 x 256 unit is half empty at 128).
3. What lies between products (norms, residuals, rotation, activation function, logits, optimizer): bytes over the
   memory bandwidth. Operands of products stream while these run and cost nothing more.
4. Collectives: their bytes over the links of the torus, `roofline.collective_seconds`, as the mesh lies on it.

Published runs lie nearer to this sum than to the largest of the parts, which `roofline` gives as a lower bound; a
compiler that hides collectives behind products does better than the sum. Copies of offloaded activations to the host
are taken to be hidden, and their bytes are not counted.
"""

import dataclasses
import functools
import math
from typing import Literal

from scalejax.errors import UserError, check_at_least
from scalejax.parallel.mesh import AXES, BATCH_AXES, MeshShape
from scalejax.plan.arithmetic.transformer import Decoder, Pairs
from scalejax.plan.compiled import collectives, roofline
from scalejax.plan.compiled.collectives import Kind
from scalejax.plan.topology import DeviceLayout, Topology, lay_out

Kept = Literal["input", "query", "key_value", "context", "out", "gate_up", "down", "elementwise"]
"""Results within a layer: the residual stream that enters it, of its products, of attention ("context"), and of all
that lies between."""

_ALL: tuple[Kept, ...] = ("input", "query", "key_value", "context", "out", "gate_up", "down", "elementwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat:
    """What a backward pass finds of the forward pass of each layer; the rest is computed again.

    Attributes:
      kept: In the memory of the chip.
      offloaded: In the memory of the host.
    """

    kept: tuple[Kept, ...] = ("input",)
    offloaded: tuple[Kept, ...] = ()

    def has(self, name: Kept) -> bool:
        """Whether it is found, on the chip or on the host."""
        return name in self.kept or name in self.offloaded


REMATS = {
    "none": Remat(kept=_ALL),
    "dots": Remat(kept=("input", "query", "key_value", "out", "gate_up", "down")),
    "full": Remat(),
}
"""The choices of `nn.layers.Remat`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a decoder is trained.

    Attributes:
      batch: Rows of a step, all devices together.
      sequence: Positions of a row.
      mesh: Devices per axis.
      remat: What is kept of a layer.
      sharded_over: Axes over which parameters, gradients and optimizer state are sharded, besides `tensor`, `stage`
        and, for experts, `expert`. Over the other batch axes they are replicated and gradients are summed.
      reshard: "after_forward" gathers a layer again for its backward pass; "keep" holds what was gathered.
      parts: Parts of a batch whose gradients add up before an update; under `stage` they fill the pipeline.
      accumulate: "communicate" sums gradients over devices in every part; "local" holds whole ones and sums them once.
      stream: Layout of norms and residuals under `tensor`: "sharded" cuts positions, "whole" computes them on every
        device of the axis.
      compute_bytes: Of a parameter or activation in products.
      gather_bytes: Of a parameter on its way to a device.
      reduce_bytes: Of a gradient on its way.
      parameter_bytes: Of a master parameter at rest.
      gradient_bytes: Of a gradient at rest.
      optimizer_bytes: Of the state of a parameter; AdamW has two float32.
      optimizer_rests: Where that state lies between steps. From the host it comes one array after the other; the time
        of these copies is not counted.
      loss_positions: Positions of a row whose logits exist at one time; None = all.
      logits_bytes: Of a logit.
      attention_block: Side of the square blocks in which attention skips what the causal mask hides.
      attention_backward: "fused" computes scores once for all gradients (5 products), "split" once for queries and
        once for keys and values (7).
    """

    batch: int
    sequence: int
    mesh: MeshShape
    remat: Remat = REMATS["full"]
    sharded_over: tuple[str, ...] = ("fsdp",)
    reshard: Literal["after_forward", "keep"] = "after_forward"
    parts: int = 1
    accumulate: Literal["communicate", "local"] = "communicate"
    stream: Literal["sharded", "whole"] = "sharded"
    compute_bytes: int = 2
    gather_bytes: int = 2
    reduce_bytes: int = 2
    parameter_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    optimizer_rests: Literal["device", "host"] = "device"
    loss_positions: int | None = 1024
    logits_bytes: int = 4
    attention_block: int = 512
    attention_backward: Literal["fused", "split"] = "split"

    def __post_init__(self) -> None:
        for name in ("batch", "sequence", "parts"):
            check_at_least(f"Training: {name}", getattr(self, name), 1)
        for axis in self.sharded_over:
            if axis not in BATCH_AXES:
                raise UserError(f"Training: sharded_over must name batch axes ({', '.join(BATCH_AXES)}); got {axis!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """Equal collectives of a step, on one device.

    Attributes:
      what: For people.
      kind: As in `collectives.Collective`.
      axes: Mesh axes along which it runs.
      payload_bytes: What a device gathers, reduces, scatters or sends, once.
      count: How often in a step.
      seconds: All of them on the links.
    """

    what: str
    kind: Kind
    axes: tuple[str, ...]
    payload_bytes: int
    count: int
    seconds: float

    @property
    def bytes(self) -> int:
        """Payload of all executions."""
        return self.payload_bytes * self.count


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """The time and memory of a step, by estimate.

    Attributes:
      decoder: The model.
      training: How it is trained.
      topology: The machine.
      memory: Bytes of a chip by kind; buffers of collectives, layout and fragmentation of the compiler left out.
      product_s: Products with parameters.
      attention_s: Attention.
      between_s: What lies between products.
      moved: Collectives.
      bubble_s: Idle time of a pipeline.
    """

    decoder: Decoder
    training: Training
    topology: Topology
    memory: dict[str, int]
    product_s: float
    attention_s: float
    between_s: float
    moved: tuple[Moved, ...]
    bubble_s: float

    @property
    def memory_bytes(self) -> int:
        """Bytes of all kinds on a device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether they fit into what the compiler leaves to a program."""
        return self.memory_bytes <= self.topology.chip.usable_hbm_bytes

    @property
    def collective_s(self) -> float:
        """Seconds of all collectives of a step."""
        return math.fsum(moved.seconds for moved in self.moved)

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.product_s + self.attention_s + self.between_s + self.collective_s + self.bubble_s

    @property
    def tokens_per_s_per_chip(self) -> float:
        """Tokens of a step over its time and the chips."""
        return self.training.batch * self.training.sequence / self.step_s / self.topology.chips

    def mfu(self, attention: Pairs) -> float:
        """Model FLOPs over time, chips and the bfloat16 peak, under a convention for attention."""
        flops = self.decoder.model_flops_per_token(self.training.sequence, attention=attention)
        return self.tokens_per_s_per_chip * flops / self.topology.chip.bf16_flops_per_s


def check_divides(decoder: Decoder, training: Training, devices: int) -> tuple[str, ...]:
    """Why a model and a batch cannot be cut over a mesh: one sentence each, empty if they can."""
    sizes = _sizes(training, devices)
    rows = math.prod(sizes[axis] for axis in BATCH_AXES)
    reasons = []
    for what, size, count, axes in (
        ("batch", training.batch, rows * training.parts, "replica x fsdp x expert x parts"),
        ("sequence", training.sequence, sizes["context"] * sizes["tensor"], "context x tensor"),
        ("heads", decoder.heads, sizes["tensor"], "tensor"),
        ("hidden", decoder.hidden, sizes["tensor"], "tensor"),
        ("vocabulary", decoder.vocabulary, sizes["tensor"], "tensor"),
        ("dim", decoder.dim, math.prod(sizes[axis] for axis in training.sharded_over), "+".join(training.sharded_over)),
        ("layers", decoder.layers, sizes["stage"], "stage"),
        ("experts", decoder.experts, sizes["expert"], "expert"),
    ):
        if count > 1 and size % count and not (what == "experts" and decoder.experts == 1):
            reasons.append(f"{what}={size} does not divide by {axes}={count}")
    return tuple(reasons)


def estimate(
    decoder: Decoder, training: Training, machine: Topology, *, share: float = 1.0, layout: DeviceLayout | None = None
) -> StepEstimate:
    """Estimates a step.

    Args:
      decoder: The model.
      training: How it is trained.
      machine: The slices it is trained on.
      share: Of the bfloat16 peak that products reach, in (0, 1]. 1 = the least time.
      layout: Where each device of the mesh lies; None = as `topology.make_mesh` would.

    Raises:
      UserError: the mesh has not the devices of the machine, or something does not divide.
    """
    if not 0 < share <= 1:
        raise UserError(f"estimate: share must lie above 0 and at most at 1; got {share}. See published_runs.SHARES.")
    reasons = check_divides(decoder, training, machine.devices)
    if reasons:
        raise UserError(f"estimate: {'; '.join(reasons)}. Change the mesh or the model.")
    cut = _Cut.of(decoder, training, machine.devices)
    layout = layout or lay_out(machine, training.mesh)[0]
    seconds = functools.partial(_seconds, machine, layout)
    moved = tuple(
        dataclasses.replace(m, seconds=seconds(m)) for m in _moved(cut) if m.count and m.payload_bytes and m.axes
    )
    chip, devices = machine.chip, machine.devices
    rate = share * chip.bf16_flops_per_s / chip.devices_per_chip
    fill = min(1.0, decoder.head_dim / chip.mxu_side)
    # Few tokens a device: products wait for their parameters, which each pass over a layer reads once.
    weights_s = cut.weight_bytes() * chip.devices_per_chip / chip.hbm_bytes_per_s
    product_s = max(cut.product_flops() / devices / rate, weights_s)
    attention_s = cut.attention_flops() / devices / (rate * fill)
    between_s = cut.between_bytes() * chip.devices_per_chip / chip.hbm_bytes_per_s
    # Each of the stages waits (stages - 1) parts for the first and the last one; collectives of layers wait with them.
    busy = product_s + attention_s + between_s
    stages = cut.sizes["stage"]
    kinds = memory_of_device(decoder, training, machine.devices)
    return StepEstimate(
        decoder=decoder,
        training=training,
        topology=machine,
        memory={kind: count * chip.devices_per_chip for kind, count in kinds.items()},
        product_s=product_s,
        attention_s=attention_s,
        between_s=between_s,
        moved=moved,
        bubble_s=busy * (stages - 1) / training.parts,
    )


def memory_of_device(decoder: Decoder, training: Training, devices: int) -> dict[str, int]:
    """Bytes of one device by kind, largest first.

    "parameters", "optimizer state" and "gradients" are shards at rest; "activations" what is kept of all layers for the
    backward pass. What is at work is the larger of two, which do not meet: "a layer" has the parameters that are
    gathered for one layer and the next, and results and gradients of one; "logits" those of one slice, with the head.
    """
    cut = _Cut.of(decoder, training, devices)
    kinds = {
        "parameters": cut.resting * training.parameter_bytes,
        "optimizer state": cut.resting * training.optimizer_bytes if training.optimizer_rests == "device" else 0,
        "gradients": (cut.resting if training.accumulate == "communicate" else cut.whole) * training.gradient_bytes,
        "activations": cut.kept_bytes(),
    }
    layer, logits = cut.layer_bytes(), cut.logits_bytes()
    kinds["a layer at work" if layer > logits else "logits at work"] = max(layer, logits)
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _sizes(training: Training, devices: int) -> dict[str, int]:
    return {axis: size for axis, size in zip(AXES, training.mesh.resolve(devices), strict=True)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Cut:
    """A model and a batch, cut over a mesh.

    Attributes:
      sizes: Devices per mesh axis.
      tokens: Of a device in one part of the batch; positions are cut over `context`, features over `tensor`.
      layers: Of a device.
      layer: Parameters of a layer that a device holds when they are gathered.
      ends: The same for embedding and head, with the last norm.
      resting: Parameters of a device at rest.
    """

    decoder: Decoder
    training: Training
    sizes: dict[str, int]
    tokens: int
    layers: int
    layer: int
    ends: int
    resting: int

    @classmethod
    def of(cls, decoder: Decoder, training: Training, devices: int) -> "_Cut":
        sizes = _sizes(training, devices)
        rows = math.prod(sizes[axis] for axis in BATCH_AXES)
        counts = decoder.layer_parameters
        experts = (counts["gate_up"] + counts["down"]) if decoder.experts > 1 else 0
        rest = sum(counts.values()) - experts
        # Norms are whole on every device of `tensor`.
        layer = (rest + experts // sizes["expert"]) // sizes["tensor"] + 2 * decoder.dim
        ends = (decoder.end_parameters - decoder.dim) // sizes["tensor"] + decoder.dim
        shards = math.prod(sizes[axis] for axis in training.sharded_over)
        layers = decoder.layers // sizes["stage"]
        # Experts that are striped over `expert` are not cut over it once more.
        again = sizes["expert"] if "expert" in training.sharded_over else 1
        owned = experts // sizes["expert"] // sizes["tensor"] * again
        resting = layers * (layer - experts // sizes["expert"] // sizes["tensor"] + owned) + ends
        return cls(
            decoder=decoder,
            training=training,
            sizes=sizes,
            tokens=training.batch * training.sequence // (rows * sizes["context"] * training.parts),
            layers=layers,
            layer=layer,
            ends=ends,
            resting=-(-resting // shards),
        )

    @property
    def whole(self) -> int:
        """Parameters of all layers that a device has when they are gathered."""
        return self.layers * self.layer + self.ends

    def widths(self) -> dict[Kept, int]:
        """Numbers a token that a device holds of each result of a layer."""
        d, tensor = self.decoder, self.sizes["tensor"]
        stream = d.dim // (tensor if self.training.stream == "sharded" else 1)
        active = d.active_experts
        query, hidden = d.heads * d.head_dim // tensor, active * d.hidden // tensor
        # Key and value heads are repeated where `tensor` has more devices.
        pair = 2 * max(d.kv_heads // tensor, 1) * d.head_dim
        return {
            "input": stream,
            "query": query,
            "key_value": pair,
            "context": query + 2 * (d.heads // tensor),  # with a float32 log-sum-exp a head
            "out": stream,
            "gate_up": 2 * hidden,
            "down": stream * active,
            # Two norms, rotated queries and keys, the sum after attention, the activated and the gated hidden layer.
            "elementwise": 3 * stream + query + pair // 2 + 2 * hidden,
        }

    def kept_bytes(self) -> int:
        # Without experts nothing asks for the result of "down": the next layer keeps its own input.
        asked: list[Kept] = [name for name in self.training.remat.kept if name != "down" or self.decoder.experts > 1]
        kept = sum(self.widths()[name] for name in asked)
        # Parts of a batch follow one another; in a pipeline as many are under way as it has stages.
        return self.layers * self.tokens * kept * self.training.compute_bytes * self.sizes["stage"]

    def layer_bytes(self) -> int:
        """Bytes of one layer at the peak of its backward pass, with the gathered parameters."""
        t, d, tensor = self.training, self.decoder, self.sizes["tensor"]
        gathered = 2 * self.layer * t.gather_bytes + self.layer * t.reduce_bytes
        if t.reshard == "keep":
            gathered += max(self.layers - 2, 0) * self.layer * t.gather_bytes
        widths = self.widths()
        stream, hidden = widths["input"], widths["gate_up"] // 2
        # The input of both halves and of their norms and the gradient that came in; queries, keys, values and what
        # attention made of them; gate, up and their product, and gradients of two of these.
        results = 5 * stream + widths["query"] + widths["key_value"] + widths["context"] + 5 * hidden
        if tensor > 1 and t.stream == "sharded":
            results += 2 * d.dim  # what a norm gave, whole, for the products after it
        if d.experts > 1:
            results += 2 * d.active_experts * stream  # tokens as their experts see them
        return gathered + self.tokens * results * t.compute_bytes

    def logits_bytes(self) -> int:
        """Of logits and their gradient in the dtype of products, with the head gathered and its gradient."""
        t, d, tensor = self.training, self.decoder, self.sizes["tensor"]
        share = min(t.loss_positions or t.sequence, t.sequence) / t.sequence
        logits = int(self.tokens * share) * (d.vocabulary // tensor)
        head = d.vocabulary * d.dim // tensor
        return (t.logits_bytes + t.compute_bytes) * logits + (t.compute_bytes + t.gradient_bytes) * head

    def product_flops(self) -> int:
        """FLOPs of the products on all devices: forward, backward, and what is computed again."""
        d, remat = self.decoder, self.training.remat
        once = d.product_flops()
        layer = 3 * sum(once.values())
        layer += sum(once[name] for name in ("query", "key_value", "out", "gate_up") if not remat.has(name))
        if d.experts > 1:
            # The weights of a router meet the results of its experts; elsewhere nothing asks for those of "down".
            layer += once["router"] + (0 if remat.has("down") else once["down"])
        return self.training.batch * self.training.sequence * (d.layers * layer + 3 * d.head_flops())

    def weight_bytes(self) -> int:
        """Of one device: parameters that products read forward, for both gradients and, mostly, once more."""
        return 4 * self.training.parts * (self.layers * self.layer + self.ends) * self.training.compute_bytes

    def attention_flops(self) -> int:
        """Of all devices: 2 products forward, again if "context" is not kept, 5 or 7 backward; whole blocks only."""
        t, d = self.training, self.decoder
        products = 2 + (0 if t.remat.has("context") else 2) + {"fused": 5, "split": 7}[t.attention_backward]
        blocks = 1 + min(t.attention_block, t.sequence) / t.sequence  # along the diagonal they are half hidden
        pair = d.attention_flops(t.sequence, "causal") // 2
        return int(t.batch * t.sequence * d.layers * products * pair * blocks)

    def between_bytes(self) -> int:
        """Bytes of one device: reads and writes of what lies between products."""
        t, d, widths = self.training, self.decoder, self.widths()
        stream, hidden = widths["input"], widths["gate_up"] // 2
        rotated = widths["query"] + widths["key_value"] // 2
        # Norm: in, out. Rotation: in, out. Sum and norm: two in, two out. Gate: two in, one out. Sum: two in, one out.
        once = 9 * stream + 2 * rotated + 3 * hidden
        if d.experts > 1:
            once += 4 * d.active_experts * stream  # tokens to their experts and back
        passes = 3 if t.remat.has("elementwise") else 4
        layers = self.layers * self.tokens * t.parts * passes * once * t.compute_bytes
        # Logits: written, read for their sum, read for the gradient, which is written.
        vocabulary = d.vocabulary // self.sizes["tensor"]
        logits = 4 * t.logits_bytes * self.tokens * t.parts * vocabulary // self.sizes["stage"]
        # The optimizer reads parameter, state and gradient and writes the first two.
        update = self.resting * (2 * t.parameter_bytes + 2 * t.optimizer_bytes + t.gradient_bytes)
        return layers + logits + update


def _moved(cut: _Cut) -> list[Moved]:
    """Collectives of a step on one device; seconds are filled in later."""
    t, d, sizes, parts = cut.training, cut.decoder, cut.sizes, cut.training.parts
    shards = tuple(axis for axis in t.sharded_over if sizes[axis] > 1)
    copies = tuple(axis for axis in BATCH_AXES if sizes[axis] > 1 and axis not in t.sharded_over)
    found = []

    def add(what: str, kind: Kind, axes: tuple[str, ...], payload: int, count: int) -> None:
        if all(sizes[axis] > 1 for axis in axes):
            found.append(Moved(what=what, kind=kind, axes=axes, payload_bytes=payload, count=count, seconds=0.0))

    sums = parts if t.accumulate == "communicate" else 1
    again = 2 if t.reshard == "after_forward" else 1
    if shards:
        add("layers", "all-gather", shards, cut.layer * t.gather_bytes, again * cut.layers * parts)
        # A lookup needs no table in its backward pass, and the loss takes both products of the head at once.
        add("embedding and head", "all-gather", shards, cut.ends * t.gather_bytes, parts)
        add("gradients of layers", "reduce-scatter", shards, cut.layer * t.reduce_bytes, cut.layers * sums)
        add("gradients of embedding and head", "reduce-scatter", shards, cut.ends * t.reduce_bytes, sums)
    if copies:
        add("gradients", "all-reduce", copies, cut.resting * t.reduce_bytes, sums)
    stream = cut.tokens * d.dim * t.compute_bytes
    layers = cut.layers * parts
    # Results of "out" that are not kept are summed over `tensor` once more.
    more = 0 if t.remat.has("out") else 1
    if t.stream == "sharded":
        # Before attention and the MLP, again for their backward pass, and the gradients of "out" and "down".
        add("residual stream", "all-gather", ("tensor",), stream, 6 * layers + 2 * parts)
        add("residual stream", "reduce-scatter", ("tensor",), stream, (4 + more) * layers + 2 * parts)
    else:
        add("residual stream", "all-reduce", ("tensor",), stream, (4 + more) * layers + 2 * parts)
    pair = cut.widths()["key_value"] * cut.tokens * sizes["context"] * t.compute_bytes
    add("keys and values", "all-gather", ("context",), pair, (1 if t.remat.has("context") else 2) * layers)
    add("gradients of keys and values", "reduce-scatter", ("context",), pair, layers)
    if d.experts > 1:
        routed = cut.tokens * d.active_experts * cut.widths()["input"] * t.compute_bytes
        add("tokens of experts", "all-to-all", ("expert",), routed, 6 * layers)
    add("activations of stages", "collective-permute", ("stage",), cut.tokens * cut.widths()["input"] * 2, 2 * parts)
    return found


def _seconds(machine: Topology, layout: DeviceLayout, moved: Moved) -> float:
    groups = _groups(layout, moved.axes)
    collective = collectives.Collective(
        kind=moved.kind,
        axes=moved.axes,
        group_size=len(groups[0]),
        bytes=moved.bytes,
        count=moved.count,
        minimum_bytes=0,
        trip_count_known=True,
        groups=groups,
    )
    return sum(roofline.collective_seconds(collective, machine, layout))


@functools.lru_cache(maxsize=256)
def _groups(layout: DeviceLayout, axes: tuple[str, ...]) -> collectives.Groups:
    return collectives.positions_along(axes, layout)
