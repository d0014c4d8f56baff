"""Memory that cannot suffice, found by arithmetic before anything is compiled or allocated.

    check_fits(experiment, mesh)        # UserError: what is largest, and the nearest change that would do

Counted is what a step cannot do without: parameters, their gradients, optimizer state (unless it rests in host memory),
and the activations that are kept for the backward pass. What is at work within a layer comes on top: a run that passes
may still not fit, one that is refused cannot.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jax.sharding import Mesh

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.ddp import Ddp
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import AXES, BATCH_AXES, MeshShape
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.plan.arithmetic import decoders, step_model
from scalejax.plan.arithmetic.decoders import DecoderConfig
from scalejax.plan.arithmetic.step_model import Training
from scalejax.units import size

if TYPE_CHECKING:
    from scalejax.train.experiment import Experiment

_AT_REST = ("parameters", "optimizer state", "gradients")
_NEEDED = (*_AT_REST, "activations")


def needed_bytes(experiment: "Experiment", mesh: Mesh) -> dict[str, int]:
    """Bytes that one device cannot do without, by kind, largest first.

    Raises:
      UserError: the model is no decoder.
    """
    return _needed(experiment, _shape_of(mesh), mesh)


def check_fits(experiment: "Experiment", mesh: Mesh, *, memory_bytes: int | None = None) -> None:
    """Refuses a run whose memory cannot suffice.

    Args:
      experiment: A run. Models that are no decoders (`decoders.find_decoder`) are let through, and runs that train a
        part of one: what they keep is not known before their step is compiled.
      mesh: The devices.
      memory_bytes: Of a device; None = what the devices of this process say. Where they say nothing, nothing is
        refused.

    Raises:
      UserError: names the largest kinds and the nearest change that would do.
    """
    if memory_bytes is None:
        memory_bytes = meshes.device_memory_bytes(mesh)
    if memory_bytes is None or experiment.trainable != ".*" or decoders.find_decoder(experiment) is None:
        return
    shape = _shape_of(mesh)
    kinds = _needed(experiment, shape, mesh)
    total = sum(kinds.values())
    if total <= memory_bytes:
        return
    largest = ", ".join(f"{kind} {size(count)}" for kind, count in kinds.items() if count)
    raise UserError(
        f"Memory cannot suffice: a device has {size(memory_bytes)}, and the step needs at least {size(total)} (by "
        f"estimate, before compiling): {largest}. {_remedy(experiment, shape, mesh, memory_bytes)}"
    )


def _shape_of(mesh: Mesh) -> MeshShape:
    return MeshShape(**{axis: mesh.shape.get(axis, 1) for axis in AXES})


def _needed(experiment: "Experiment", shape: MeshShape, mesh: Mesh) -> dict[str, int]:
    found = step_model.memory_of_device(decoders.decoder_of(experiment), _training(experiment, shape, mesh), mesh.size)
    return {kind: found[kind] for kind in found if kind in _NEEDED}


def _host_is_apart(mesh: Mesh) -> bool:
    """Whether devices have a memory of their own."""
    return mesh.devices.flat[0].platform != "cpu"


def _training(experiment: "Experiment", shape: MeshShape, mesh: Mesh) -> Training:
    from scalejax.train.precision import dtypes_of

    dtype = dtypes_of(experiment.precision, mesh).compute
    return decoders.training_of(experiment, shape, mesh.size, compute_dtype=dtype)


def _remedy(experiment: "Experiment", shape: MeshShape, mesh: Mesh, memory_bytes: int) -> str:
    """The first change that makes it fit, or how many devices would."""
    for text, changed, other in _changes(experiment, shape, mesh):
        total = sum(_needed(changed, other, mesh).values())
        if total <= memory_bytes:
            return f"It needs {size(total)} with {text}."
    whole = dataclasses.replace(_training(experiment, shape, mesh), mesh=MeshShape(fsdp=1), parts=1)
    at_rest = step_model.memory_of_device(decoders.decoder_of(experiment), whole, devices=1)
    devices = -(-sum(at_rest[kind] for kind in _AT_REST) // memory_bytes)
    return (
        "No other strategy, rematerialisation, part of the batch or offload makes it fit; parameters, gradients and "
        f"optimizer state alone fill {devices} such devices. Use more devices, or a smaller model."
    )


def _changes(experiment: "Experiment", shape: MeshShape, mesh: Mesh) -> Iterator[tuple[str, "Experiment", MeshShape]]:
    """Changes that save memory, those that cost least time first; each comes on top of the ones before it."""
    model = experiment.model
    assert isinstance(model, DecoderConfig)
    strategy, sharded = experiment.strategy, ""
    if isinstance(strategy, Ddp | Sdp4Bit):
        experiment, sharded = dataclasses.replace(experiment, strategy=Fsdp()), "--set strategy=Fsdp "
    elif strategy.sharding in ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"):
        experiment = dataclasses.replace(experiment, strategy=dataclasses.replace(strategy, sharding="FULL_SHARD"))
        sharded = "--set strategy.sharding=FULL_SHARD "
    if sharded:
        yield sharded.rstrip(), experiment, shape
    for remat in ("dots", "full"):
        if model.remat != remat and (model.remat, remat) != ("full", "dots"):
            experiment = decoders.with_model(experiment, remat=remat)
            yield f"{sharded}--set model.remat={remat}", experiment, shape
    full = "" if model.remat == "full" else " --set model.remat=full"
    sizes = {axis: getattr(shape, axis) for axis in AXES}
    for factor in (1, 2, 4, 8):
        if sizes["fsdp"] % factor:
            continue
        other = MeshShape(**{**sizes, "fsdp": sizes["fsdp"] // factor, "context": sizes["context"] * factor})
        rows = experiment.data.batch_size // math.prod(getattr(other, axis) for axis in BATCH_AXES)
        meshed = (
            ""
            if factor == 1
            else f"--set placement.mesh.fsdp={other.fsdp} --set placement.mesh.context={other.context} "
        )
        for n in range(min(rows, decoders.most_rows(experiment)) - (factor == 1), 0, -1):
            if rows % n == 0:
                yield f"{sharded}{meshed}--set gradients.microbatch={n}{full}", _in_parts(experiment, n), other
    if experiment.placement.offload == "none" and _host_is_apart(mesh):
        placement = dataclasses.replace(experiment.placement, offload="optimizer")
        changed = dataclasses.replace(_in_parts(experiment, 1), placement=placement)
        yield f"{sharded}--set placement.offload=optimizer --set gradients.microbatch=1{full}", changed, shape


def _in_parts(experiment: "Experiment", microbatch: int) -> "Experiment":
    gradients = dataclasses.replace(experiment.gradients, microbatch=microbatch)
    return dataclasses.replace(experiment, gradients=gradients)
