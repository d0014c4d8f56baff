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

Experts: of T tokens on a device each takes k of n experts, which have room for C = ceil(f T k / n) of them, f the
capacity factor. All n C places are computed, and exchanged between the devices of `expert`, full or not: n C / devices
of them go to each, to the experts and back, forward, backward and where the forward pass is repeated. Without a
capacity factor there are T k places, and the exchange has so many times an exchange factor. Model FLOPs, and so
utilisation, count T k in any case.

Published runs lie nearer to this sum than to the largest of the parts, which `roofline` gives as a lower bound; a
compiler that hides collectives behind products does better than the sum. Copies of offloaded activations to the host
are taken to be hidden, and their bytes are not counted.
"""

import dataclasses
import functools
import math
from typing import Literal, get_args

from scalejax.errors import UserError, check_at_least
from scalejax.parallel.mesh import AXES, BATCH_AXES, MeshShape
from scalejax.plan.arithmetic.transformer import IN_EXPERTS, Decoder, Pairs, Product
from scalejax.plan.compiled import collectives, roofline
from scalejax.plan.compiled.collectives import Kind
from scalejax.plan.topology import DeviceLayout, Topology, lay_out

Kept = Literal["input", "query", "key_value", "context", "out", "router", "gate_up", "down", "elementwise"]
"""Results within a layer: the residual stream that enters it, of its products, of attention ("context"), and of all
that lies between."""

_ALL: tuple[Kept, ...] = get_args(Kept)


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
    "dots": Remat(kept=("input", "query", "key_value", "out", "router", "gate_up", "down")),
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
      capacity_factor: Of experts: they have room for so many times the tokens that each would get if all got equally
        many. None = for all that come.
      exchange_factor: Of experts with room for all that come: places that travel over `expert`, over those that tokens
        choose. A padded exchange has one size for every two devices; 1 = only what is chosen travels.
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
    capacity_factor: float | None = None
    exchange_factor: float = 1.0
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
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UserError(
                f"Training: capacity_factor must be above 0 and finite, or None; got {self.capacity_factor}. 1.25 is "
                "usual; None drops no token."
            )
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
    seconds = functools.partial(moved_seconds, machine, layout)
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
      places: Of these tokens in MLPs: one each, or those of experts, empty ones too.
      layers: Of a device.
      layer: Parameters of a layer that a device holds when they are gathered.
      experts: Of these, those of experts.
      ends: The same for embedding and head, with the last norm.
      resting: Parameters of a device at rest.
      resting_experts: Of these, those of experts.
    """

    decoder: Decoder
    training: Training
    sizes: dict[str, int]
    tokens: int
    places: int
    layers: int
    layer: int
    experts: int
    ends: int
    resting: int
    resting_experts: int

    @classmethod
    def of(cls, decoder: Decoder, training: Training, devices: int) -> "_Cut":
        sizes = _sizes(training, devices)
        rows = math.prod(sizes[axis] for axis in BATCH_AXES)
        tokens = training.batch * training.sequence // (rows * sizes["context"] * training.parts)
        counts = decoder.layer_parameters
        experts = sum(counts[name] for name in IN_EXPERTS) if decoder.experts > 1 else 0
        # Norms are whole on every device of `tensor`.
        rest = (sum(counts.values()) - experts) // sizes["tensor"] + 2 * decoder.dim
        experts = experts // sizes["expert"] // sizes["tensor"]
        ends = (decoder.end_parameters - decoder.dim) // sizes["tensor"] + decoder.dim
        layers = decoder.layers // sizes["stage"]
        shards = math.prod(sizes[axis] for axis in training.sharded_over)
        shards_of_experts = math.prod(sizes[axis] for axis in _apart(training.sharded_over))
        resting_experts = -(-layers * experts // shards_of_experts)
        return cls(
            decoder=decoder,
            training=training,
            sizes=sizes,
            tokens=tokens,
            places=_places(decoder, training, tokens),
            layers=layers,
            layer=rest + experts,
            experts=experts,
            ends=ends,
            resting=-(-(layers * rest + ends) // shards) + resting_experts,
            resting_experts=resting_experts,
        )

    @property
    def whole(self) -> int:
        """Parameters of all layers that a device has when they are gathered."""
        return self.layers * self.layer + self.ends

    @property
    def stream(self) -> int:
        """Features of the residual stream that a device holds of a token."""
        return self.decoder.dim // (self.sizes["tensor"] if self.training.stream == "sharded" else 1)

    @property
    def placed(self) -> int:
        """Numbers of the tokens at their places in experts; 0 without experts."""
        return self.places * self.stream if self.decoder.experts > 1 else 0

    def results(self) -> dict[Kept, int]:
        """Numbers that a device holds of each result of a layer, for the tokens of one part."""
        d, tensor, tokens = self.decoder, self.sizes["tensor"], self.tokens
        stream = tokens * self.stream
        query, hidden = tokens * d.heads * d.head_dim // tensor, self.places * (d.hidden // tensor)
        # Key and value heads are repeated where `tensor` has more devices.
        pair = tokens * 2 * max(d.kv_heads // tensor, 1) * d.head_dim
        return {
            "input": stream,
            "query": query,
            "key_value": pair,
            # With a float32 log-sum-exp a head.
            "context": query + tokens * (d.heads // tensor) * 4 // self.training.compute_bytes,
            "out": stream,
            "router": tokens * d.experts * 4 // self.training.compute_bytes if d.experts > 1 else 0,  # in float32
            "gate_up": 2 * hidden,
            # Without experts nothing asks for it: the next layer keeps its own input.
            "down": self.placed,
            # Two norms, rotated queries and keys, the sum after attention, tokens at their places in experts, the
            # activated and the gated hidden layer.
            "elementwise": 3 * stream + query + pair // 2 + self.placed + 2 * hidden,
        }

    def kept_bytes(self) -> int:
        results = self.results()
        kept = sum(results[name] for name in self.training.remat.kept)
        # Parts of a batch follow one another; in a pipeline as many are under way as it has stages.
        return self.layers * kept * self.training.compute_bytes * self.sizes["stage"]

    def layer_bytes(self) -> int:
        """Bytes of one layer at the peak of its backward pass, with the gathered parameters."""
        t, d, tensor = self.training, self.decoder, self.sizes["tensor"]
        gathered = 2 * self.layer * t.gather_bytes + self.layer * t.reduce_bytes
        if t.reshard == "keep":
            gathered += max(self.layers - 2, 0) * self.layer * t.gather_bytes
        results = self.results()
        stream, hidden = results["input"], results["gate_up"] // 2
        # The input of both halves and of their norms and the gradient that came in; queries, keys, values and what
        # attention made of them; gate, up and their product, and gradients of two of these; tokens at their places in
        # experts, going and coming back.
        found = 5 * stream + results["query"] + results["key_value"] + results["context"] + 5 * hidden + 2 * self.placed
        if tensor > 1 and t.stream == "sharded":
            found += self.tokens * 2 * d.dim  # what a norm gave, whole, for the products after it
        return gathered + found * t.compute_bytes

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
        once: dict[Product, int] = {}
        for name, flops in d.product_flops().items():
            once[name] = self.places * flops // d.active_experts if name in IN_EXPERTS else self.tokens * flops
        # The weights of a router meet the results of its experts; elsewhere nothing asks for those of "down".
        again = (flops for name, flops in once.items() if not remat.has(name) and (name != "down" or d.experts > 1))
        layer = 3 * sum(once.values()) + sum(again)
        of_a_part = d.layers * layer + self.tokens * 3 * d.head_flops()
        return self.training.batch * self.training.sequence // self.tokens * of_a_part

    def weight_bytes(self) -> int:
        """Of one device: parameters that products read forward, for both gradients and, mostly, once more."""
        return 4 * self.training.parts * (self.layers * self.layer + self.ends) * self.training.compute_bytes

    def attention_flops(self) -> int:
        """Of all devices: 2 products forward, again if "context" is not kept, 5 or 7 backward; whole blocks only."""
        t, d = self.training, self.decoder
        products = 2 + (0 if t.remat.has("context") else 2) + {"fused": 5, "split": 7}[t.attention_backward]
        # Along the diagonal, and where a window begins, they are half hidden.
        blocks = 1 + min(t.attention_block, t.sequence) / min(d.window or t.sequence, t.sequence)
        pair = d.attention_flops(t.sequence, "causal") // 2
        return int(t.batch * t.sequence * d.layers * products * pair * blocks)

    def between_bytes(self) -> int:
        """Bytes of one device: reads and writes of what lies between products."""
        t, d, results = self.training, self.decoder, self.results()
        stream, hidden = results["input"], results["gate_up"] // 2
        rotated = results["query"] + results["key_value"] // 2
        # Norm: in, out. Rotation: in, out. Sum and norm: two in, two out. Gate: two in, one out. Sum: two in, one out.
        # Tokens to their places in experts, and back: in, out.
        once = 9 * stream + 2 * rotated + 3 * hidden + 4 * self.placed
        passes = 3 if t.remat.has("elementwise") else 4
        layers = self.layers * t.parts * passes * once * t.compute_bytes
        # Logits: written, read for their sum, read for the gradient, which is written.
        vocabulary = d.vocabulary // self.sizes["tensor"]
        logits = 4 * t.logits_bytes * self.tokens * t.parts * vocabulary // self.sizes["stage"]
        # The optimizer reads parameter, state and gradient and writes the first two.
        update = self.resting * (2 * t.parameter_bytes + 2 * t.optimizer_bytes + t.gradient_bytes)
        return layers + logits + update


def _apart(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` over which an expert is sharded or copied like other parameters: `expert` gives it one owner."""
    return tuple(axis for axis in axes if axis != "expert")


def _places(decoder: Decoder, training: Training, tokens: int) -> int:
    """Places of so many tokens in the MLPs of a layer."""
    if training.capacity_factor is None or decoder.experts == 1:
        return tokens * decoder.active_experts
    return decoder.experts * math.ceil(training.capacity_factor * tokens * decoder.active_experts / decoder.experts)


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
    rest = cut.layer - cut.experts
    for what, axes, size in (("layers", shards, rest), ("experts", _apart(shards), cut.experts)):
        add(what, "all-gather", axes, size * t.gather_bytes, again * cut.layers * parts)
        add(f"gradients of {what}", "reduce-scatter", axes, size * t.reduce_bytes, cut.layers * sums)
    # A lookup needs no table in its backward pass, and the loss takes both products of the head at once.
    add("embedding and head", "all-gather", shards, cut.ends * t.gather_bytes, parts)
    add("gradients of embedding and head", "reduce-scatter", shards, cut.ends * t.reduce_bytes, sums)
    add("gradients", "all-reduce", copies, (cut.resting - cut.resting_experts) * t.reduce_bytes, sums)
    add("gradients of experts", "all-reduce", _apart(copies), cut.resting_experts * t.reduce_bytes, sums)
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
    pair = cut.results()["key_value"] * sizes["context"] * t.compute_bytes
    add("keys and values", "all-gather", ("context",), pair, (1 if t.remat.has("context") else 2) * layers)
    add("gradients of keys and values", "reduce-scatter", ("context",), pair, layers)
    # To the experts and back, forward and backward, and what of the forward pass the backward pass does not find.
    ways = 4 + (not t.remat.has("elementwise")) + (not t.remat.has("down"))
    travel = cut.placed if t.capacity_factor is not None else math.ceil(t.exchange_factor * cut.placed)
    add("tokens of experts", "all-to-all", ("expert",), travel * t.compute_bytes, ways * layers)
    add("activations of stages", "collective-permute", ("stage",), cut.tokens * cut.stream * 2, 2 * parts)
    return found


def moved_seconds(machine: Topology, layout: DeviceLayout, moved: Moved) -> float:
    """Seconds of collectives on the links of a slice and on the network between slices."""
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
