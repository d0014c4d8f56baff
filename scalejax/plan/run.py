"""Compiles the step of an experiment for a topology and reads from it what it needs and how fast it can be."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from scalejax.numerics import flops
from scalejax.parallel.links import SentBytes
from scalejax.plan import topology
from scalejax.plan.compiled import collectives, hlo, memory, roofline, traffic
from scalejax.plan.compiled.collectives import Collective
from scalejax.plan.compiled.memory import MemoryPlan
from scalejax.plan.compiled.roofline import Roofline
from scalejax.plan.topology import Topology
from scalejax.units import size

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from scalejax.parallel.mesh import MeshShape
    from scalejax.train.experiment import Experiment
    from scalejax.train.step import Jitted


class StepProgram(Protocol):
    """The part of `train.step.Program` that a plan needs."""

    @property
    def mesh(self) -> "Mesh": ...

    def repeated_step(self) -> "tuple[Jitted[..., object], tuple[object, ...]]":
        """The jitted function that a run calls in every step, and its arguments as shapes: first the state, donated."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The needs of a step on a topology: memory, products, collectives, time.

    Attributes:
      topology: The machine.
      mesh: Devices per mesh axis, axes of size 1 left out.
      memory: Bytes per chip by kind, and whether they fit.
      flops: FLOPs of the matrix products of one step, all devices together, recomputation included.
      model_flops: FLOPs that the model defines for one step, nothing recomputed or repeated.
      collectives: By kind and axis; empty if the step did not compile.
      roofline: Seconds per resource, or None if the step did not compile.
      unsharded: Parameters that the rules would shard if their sizes divided: (name, shape, reason).
      compile_s: Time to trace, lower and compile, here.
      warnings: What may make the figures wrong.
    """

    topology: Topology
    mesh: dict[str, int]
    memory: MemoryPlan
    flops: int
    model_flops: int
    collectives: tuple[Collective, ...]
    roofline: Roofline | None
    unsharded: tuple[tuple[str, tuple[int, ...], str], ...]
    compile_s: float
    warnings: tuple[str, ...]

    @property
    def mfu(self) -> float | None:
        """Share of the bfloat16 peak that the model's FLOPs have at the predicted time: an upper bound."""
        if self.roofline is None or not self.roofline.predicted_step_s:
            return None
        peak = self.topology.chips * self.topology.chip.bf16_flops_per_s
        return self.model_flops / (self.roofline.predicted_step_s * peak)

    @property
    def sent(self) -> SentBytes:
        """The least that a device sends in a step, within its index of `replica` and to others."""
        return collectives.sent(self.collectives, self.mesh)

    def to_json(self) -> dict[str, object]:
        """The result as plain values; bytes of collectives are per device, `flops` are of all chips."""
        line = self.roofline
        return {
            "topology": self.topology.name,
            "chips": self.topology.chips,
            "devices": self.topology.devices,
            "mesh": self.mesh,
            "fits": self.memory.fits,
            "bytes_per_chip": self.memory.bytes_per_chip,
            "hbm_bytes": self.memory.hbm_bytes,
            "flops": self.flops,
            "model_flops": self.model_flops,
            "collectives": [
                {
                    "kind": c.kind,
                    "axis": c.axis,
                    "bytes": c.bytes,
                    "count": c.count,
                    "group_size": c.group_size,
                    "minimum_bytes": c.minimum_bytes,
                }
                for c in self.collectives
            ],
            "sent_bytes": dataclasses.asdict(self.sent),
            "roofline": None if line is None else {**dataclasses.asdict(line), "limit": line.limit},
            "predicted_step_s": None if line is None else line.predicted_step_s,
            "mfu": self.mfu,
            "unsharded": [{"name": n, "shape": list(s), "reason": r} for n, s, r in self.unsharded],
            "compile_s": self.compile_s,
            "compiler_message": self.memory.message,
            "warnings": list(self.warnings),
        }


def plan(experiment: "Experiment", topology_name: str, mesh: "str | MeshShape | None" = None) -> PlanResult:
    """Compiles the step that a run calls, with its compiler options, for a topology that need not be here.

    Args:
      experiment: The run; its own `placement.mesh` is not used, since it is meant for the machine at hand.
      topology_name: Such as "v5p:2x2x1"; see `scalejax.plan.topology`.
      mesh: Devices per axis, as "fsdp=8,tensor=2" or as the mesh of a recipe. None = a slice's devices on `fsdp`,
        slices on `replica`.

    Raises:
      UserError: the topology or the mesh is wrong, libtpu is missing, or the batch does not divide over the mesh.
    """
    from scalejax.parallel import mesh as meshes

    machine = topology.parse(topology_name)
    return plan_on(experiment, machine, meshes.parse_mesh(mesh) if isinstance(mesh, str) else mesh)


def plan_on(experiment: "Experiment", machine: Topology, mesh: "MeshShape | None") -> PlanResult:
    """Compiles the step of an experiment on a mesh of a topology; see `plan`.

    Raises:
      UserError: as `plan`.
    """
    from scalejax.parallel.embedding.plan.memory import describe_largest
    from scalejax.train.runs import binding

    device_mesh, warnings = topology.make_mesh(machine, mesh)
    schema = experiment.data.schema()
    data = experiment.data.build() if binding.bound_task(experiment, schema).planned_from == "data" else None
    program = binding.bind(experiment, schema, device_mesh, data, abstract=True)
    shapes = {name: x.shape for name, x in program.abstract_batch().fields.items() if hasattr(x, "shape")}
    result = plan_program(
        program,
        machine,
        model_flops=int(program.task.work(shapes).flops) or None,
        unsharded=tuple((p.name, p.shape, p.reason) for p in program.placements if p.reason),
        warnings=tuple(warnings),
    )
    if result.memory.fits or program.collection is None or not program.collection.stacks:
        return result
    largest = describe_largest(program.collection.stacks, device_mesh.size)
    note = f"{largest}. `scalejax shard` plans tables by memory and time."
    return dataclasses.replace(result, warnings=(*result.warnings, note))


def plan_program(
    program: StepProgram,
    machine: Topology,
    *,
    model_flops: int | None = None,
    unsharded: tuple[tuple[str, tuple[int, ...], str], ...] = (),
    warnings: tuple[str, ...] = (),
) -> PlanResult:
    """Compiles the step of a program whose mesh lies on a topology.

    Args:
      program: The step and its abstract arguments.
      machine: The topology of its mesh.
      model_flops: FLOPs that the model defines for one step; None = those that are traced.
      unsharded: See `PlanResult`.
      warnings: To hand on.
    """
    import jax

    start = time.perf_counter()
    step, (state, *rest) = program.repeated_step()
    traced = step.trace(state, *rest)
    counted = flops.count(traced)
    away = sum(memory.bytes_per_device(leaf) for leaf in jax.tree.leaves(state) if memory.rests_on_host(leaf))
    found: tuple[Collective, ...] = ()
    line = None
    notes = list(warnings)
    if away:
        notes.append(
            f"{size(away)} a device rest in host memory between steps; the time that copies take is not predicted."
        )
    if counted.unbounded_loops:
        notes.append(f"{counted.unbounded_loops} loops run as often as the data say; their FLOPs count once.")
    try:
        with no_compile_cache():
            compiled = traced.lower().compile()
    except Exception as error:  # the type of an out-of-memory error differs between jax versions
        room = memory.of_failure(state, rest, error, machine.chip)
    else:
        room = memory.of_compiled(state, rest, compiled, machine.chip)
        module = hlo.parse(compiled.as_text())
        moved = traffic.of_module(module)
        each = collectives.of_module(module, program.mesh)
        line = roofline.predict(machine, program.mesh, counted, moved, each)
        found = tuple(collectives.total(each))
        notes += [f"a loop runs as often as the data say; its bytes count once: {x}" for x in moved.unbounded_loops]
    return PlanResult(
        topology=machine,
        mesh={axis: size for axis, size in program.mesh.shape.items() if size > 1},
        memory=room,
        flops=counted.total,
        model_flops=counted.total if model_flops is None else model_flops,
        collectives=found,
        roofline=line,
        unsharded=unsharded,
        compile_s=time.perf_counter() - start,
        warnings=tuple(notes),
    )


@contextlib.contextmanager
def no_compile_cache() -> Iterator[None]:
    """jax can write a program for absent devices to its cache but not read it back: it warns and compiles again."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax asks the flag once a process, and may have asked already
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
