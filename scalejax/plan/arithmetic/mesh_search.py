"""Finds a mesh and a rematerialisation policy for a decoder on a slice: thousands by arithmetic, a few by compiling.

1. All meshes over (`replica`, `fsdp`, `context`, `tensor`), and `expert` where there are experts, with every policy of
   `nn.layers`, judged by `step_model`. What does not divide or cannot fit is dropped with the reason.
2. The fastest are compiled ahead of time, at most `compiles` of them, whole: layers are scanned, and a program of 126
   layers compiles as fast as one of 2.
3. They are ranked by the time that the compiled programs need (`Candidate.step_s`); those that do not fit come last.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from scalejax.errors import UserError
from scalejax.parallel.mesh import MeshShape, mesh_text
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.plan import topology
from scalejax.plan.arithmetic import decoders, published_runs, step_model
from scalejax.plan.arithmetic.step_model import REMATS, Remat, StepEstimate, Training
from scalejax.plan.arithmetic.transformer import Decoder
from scalejax.plan.run import PlanResult, plan_on
from scalejax.plan.topology import Topology
from scalejax.units import size

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment

Number = TypeVar("Number", int, float)

MOST_COMPILES = 5
_SLACK = 1.1
"""Estimates of memory may exceed that of a chip by this factor before a candidate is dropped; the compiler decides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dropped:
    """A combination that was not considered further.

    Attributes:
      mesh: Devices per axis.
      remat: Policy; "any" where none would do.
      reason: One sentence.
      memory_bytes: What it needs on a chip by estimate; None where it was dropped for another reason.
    """

    mesh: MeshShape
    remat: str
    reason: str
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """A combination that may do.

    Attributes:
      mesh: Devices per axis.
      remat: Policy.
      estimate: By arithmetic.
      compiled: By compiling, or None if it was not compiled.
      share: Of the peak that products are taken to reach.
    """

    mesh: MeshShape
    remat: str
    estimate: StepEstimate
    compiled: PlanResult | None = None
    share: float = 1.0

    @property
    def step_s(self) -> float | None:
        """Seconds of a step by the compiled program; None if it does not fit or was not compiled.

        Products at `share` of their peak, or memory where that takes longer, then collectives.
        """
        if self.compiled is None or self.compiled.roofline is None or not self.compiled.memory.fits:
            return None
        line = self.compiled.roofline
        return max(line.compute_s / self.share, line.hbm_s) + line.ici_s + line.dcn_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
      topology: The machine.
      share: Of the peak that products are taken to reach.
      ranked: Compiled candidates, best first; those that do not fit last.
      others: Candidates that were not compiled, by their estimate.
      dropped: What was left out, and why.
    """

    topology: Topology
    share: float
    ranked: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]

    def to_json(self) -> dict[str, object]:
        """The result as plain values."""
        return {
            "topology": self.topology.name,
            "chips": self.topology.chips,
            "share_of_peak": self.share,
            "ranked": [_candidate_json(c) for c in self.ranked],
            "others": [_candidate_json(c) for c in self.others],
            "dropped": [{"mesh": mesh_text(d.mesh), "remat": d.remat, "reason": d.reason} for d in self.dropped],
        }


def search(
    experiment: "Experiment",
    topology_name: str,
    *,
    compiles: int = MOST_COMPILES,
    progress: Callable[[str], None] = lambda line: None,
) -> SearchResult:
    """Searches meshes and rematerialisation policies for an experiment.

    Args:
      experiment: A run of a decoder; its own mesh and policy are not used, its strategy is.
      topology_name: Such as "v6e:16x16".
      compiles: Candidates to compile, 0 to 5.
      progress: Called with a line before each compilation.

    Raises:
      UserError: the model is no decoder, the topology is wrong, libtpu is missing, parameters or gradients travel in a
        block format, or nothing fits.
    """
    if not 0 <= compiles <= MOST_COMPILES:
        raise UserError(f"search: compiles must be 0 to {MOST_COMPILES}; got {compiles}.")
    for field in ("gather_format", "reduce_format"):
        if getattr(experiment.strategy, field, None) is not None:
            raise UserError(
                f"search: strategy.{field} is {getattr(experiment.strategy, field)!r}, and the arithmetic that chooses "
                f"meshes knows dtypes alone. Search with --set strategy.{field}=none, or leave --search out: "
                "`scalejax plan` compiles any strategy."
            )
    strategy = experiment.strategy
    if isinstance(strategy, Sdp4Bit) or getattr(strategy, "compression", None) is not None:
        raise UserError(
            f"search: the arithmetic that chooses meshes does not know what {type(strategy).__name__} compresses. "
            "Search with --set strategy=Fsdp, or leave --search out: `scalejax plan` compiles any strategy."
        )
    machine = topology.parse(topology_name)
    decoder = decoders.decoder_of(experiment)
    dtype = "bfloat16" if experiment.precision.compute == "platform" else experiment.precision.compute

    def training(mesh: MeshShape) -> Training:
        return decoders.training_of(experiment, mesh, machine.devices, compute_dtype=dtype)

    share = published_runs.SHARES.get(machine.chip.name, 1.0)
    candidates, dropped = prune(decoder, training, machine, share=share, remats=decoders.remats_of(experiment.model))
    if not candidates:
        near = min(dropped, key=lambda d: math.inf if d.memory_bytes is None else d.memory_bytes)
        raise UserError(
            f"search: nothing fits on {machine.name}; the nearest: {mesh_text(near.mesh)}, remat {near.remat}: "
            f"{near.reason}. Take more chips or a smaller batch, or put fewer rows through a device at once (--set "
            "gradients.microbatch=1)."
        )
    found = []
    for candidate in candidates[:compiles]:
        progress(f"compiling {mesh_text(candidate.mesh)}, remat {candidate.remat}")
        chosen = decoders.with_model(experiment, remat=candidate.remat)
        found.append(dataclasses.replace(candidate, compiled=plan_on(chosen, machine, candidate.mesh)))
    # Those that do not fit come last.
    ranked = sorted(found, key=lambda c: (c.step_s is None, c.step_s or c.estimate.step_s))
    return SearchResult(
        topology=machine,
        share=share,
        ranked=tuple(ranked),
        others=tuple(candidates[compiles:]),
        dropped=tuple(dropped),
    )


def prune(
    decoder: Decoder,
    training: Callable[[MeshShape], Training],
    machine: Topology,
    *,
    share: float,
    remats: Mapping[str, Remat] = REMATS,
) -> tuple[list[Candidate], list[Dropped]]:
    """Judges every mesh and policy by arithmetic.

    Args:
      decoder: The model.
      training: How it is trained on a mesh; its policy is not used.
      machine: The machine.
      share: Of the peak that products reach.
      remats: Policies by name.

    Returns:
      Candidates, fastest first, and what was dropped.
    """
    candidates: list[Candidate] = []
    dropped: list[Dropped] = []
    room = machine.chip.usable_hbm_bytes
    for mesh in meshes(machine, experts=decoder.experts):
        plain = training(mesh)
        if mesh.replica > machine.slices and "replica" in plain.sharded_over:
            continue  # the strategy makes no difference between this axis and `fsdp`: found without it
        reasons = step_model.check_divides(decoder, plain, machine.devices)
        if decoder.kv_heads % mesh.tensor and mesh.tensor % decoder.kv_heads:
            reasons += (f"kv_heads={decoder.kv_heads} and tensor={mesh.tensor} do not divide each other",)
        if reasons:
            dropped.append(Dropped(mesh=mesh, remat="any", reason="; ".join(reasons)))
            continue
        layout = topology.lay_out(machine, mesh)[0]
        for name, remat in remats.items():
            chosen = dataclasses.replace(plain, remat=remat)
            kinds = step_model.memory_of_device(decoder, chosen, machine.devices)
            needed = sum(kinds.values()) * machine.chip.devices_per_chip
            if needed > _SLACK * room:
                largest = ", ".join(f"{kind} {size(n)}" for kind, n in itertools.islice(kinds.items(), 2))
                reason = f"needs about {size(needed)} of {size(room)}: {largest}"
                dropped.append(Dropped(mesh=mesh, remat=name, reason=reason, memory_bytes=needed))
                continue
            found = step_model.estimate(decoder, chosen, machine, share=share, layout=layout)
            candidates.append(Candidate(mesh=mesh, remat=name, estimate=found, share=share))
    return sorted(candidates, key=lambda c: c.estimate.step_s), dropped


def meshes(machine: Topology, *, experts: int = 1) -> Iterator[MeshShape]:
    """All sizes of (`replica`, `fsdp`, `context`, `tensor`) that make up the devices, slices on `replica`.

    With experts `expert` has sizes too, which divide them.
    """
    inside = machine.devices // machine.slices
    for tensor in _divisors(inside):
        for context in _divisors(inside // tensor):
            for expert in _divisors(math.gcd(inside // tensor // context, experts)):
                left = inside // tensor // context // expert
                for copies in _divisors(left):
                    yield MeshShape(
                        replica=machine.slices * copies,
                        fsdp=left // copies,
                        expert=expert,
                        context=context,
                        tensor=tensor,
                    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _candidate_json(c: Candidate) -> dict[str, object]:
    e = c.estimate
    return {
        "mesh": mesh_text(c.mesh),
        "remat": c.remat,
        "estimated_step_s": e.step_s,
        "estimated_bytes_per_chip": e.memory,
        "estimated_mfu": {"causal": e.mfu("causal"), "full": e.mfu("full")},
        "step_s": c.step_s,
        "compiled": None if c.compiled is None else c.compiled.to_json(),
    }
