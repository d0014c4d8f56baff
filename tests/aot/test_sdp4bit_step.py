"""The step of SDP4Bit on two slices of a TPU and two hosts of GPUs: what crosses between them, and what runs beside."""

import dataclasses

import pytest
from aot import cuda_topology

from scalejax import plan
from scalejax.configs.llm import llama
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.parallel.sdp4bit import Sdp4Bit
from scalejax.plan import topology
from scalejax.plan.compiled import hlo
from scalejax.train.runs import binding

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

SLICES = "v5p:2x2x2,slices=2"
EIGHT, FOUR = 1 + 4 / 128, 1 / 2 + 4 / 128
"""Bytes of a value with its scale."""


def experiment_of(**changes):
    recipe = llama.smoke()
    strategy = Sdp4Bit(weight_group=128, **changes)  # so that the small model fills its groups
    return dataclasses.replace(recipe, strategy=strategy, data=dataclasses.replace(recipe.data, batch_size=16))


def compiled(experiment, mesh):
    step, arguments = binding.bind(experiment, experiment.data.schema(), mesh, abstract=True).repeated_step()
    return step.trace(*arguments).lower().compile()


def check_bytes(collectives):
    """8 bits within, 4 bits between, of gradients; 4 bits of weights; beside these a few sums of what is not cut."""
    swapped = {axis: sum(c.bytes for c in collectives if c.kind == "all-to-all" and c.axes == (axis,)) for axis in AXES}
    values = swapped["fsdp"] / EIGHT
    assert values == 40_960  # of a device, filled up
    # Both rows of a host's pairs, as gradients of an eighth and as what both owners send of a sixteenth.
    assert swapped["replica"] == values / 8 * FOUR + 2 * values / 16 * FOUR
    gathered = sum(c.bytes for c in collectives if c.kind == "all-gather")
    assert gathered == values * FOUR
    rest = [c for c in collectives if c.kind not in ("all-to-all", "all-gather")]
    assert sum(c.bytes for c in rest) < 0.1 * values


AXES = ("replica", "fsdp")


def test_eight_bits_travel_within_a_slice_and_four_between():
    found = plan.plan(experiment_of(), SLICES)
    assert found.mesh == {"replica": 2, "fsdp": 8}
    check_bytes(found.collectives)


@cuda_topology.needs_cuda_compiler
def test_eight_bits_travel_within_a_host_of_gpus_and_four_between():
    mesh = make_mesh(MeshShape(replica=2, fsdp=8), cuda_topology.devices(2, 8))
    check_bytes(plan.explain_sharding(compiled(experiment_of(), mesh), mesh))


def test_the_first_hop_of_one_bucket_runs_while_another_is_between_slices():
    """In the program's order; and no first hop waits for a second one."""
    mesh, _ = topology.make_mesh(topology.parse(SLICES), None)
    module = hlo.parse(compiled(experiment_of(bucket_bytes=40_000), mesh).as_text())
    order = module.computations[module.entry].instructions
    place = {instruction.name: n for n, instruction in enumerate(order)}
    first = [i for i in order if i.opcode.startswith("all-to-all") and not i.opcode.endswith("-done")]
    assert len(first) > 2
    assert {i.arrays[0].dtype for i in first} == {"u8"}
    arrivals = [i for i in order if i.opcode == "recv-done" and i.arrays[0].dtype == "u8"]
    behind = ancestors(order, [i.name for i in first])
    assert not behind & {i.name for i in arrivals}
    sends = {i.attributes.split('rendezvous="')[1].split('"')[0]: place[i.name] for i in order if i.opcode == "send"}
    beside = []
    for i in order:
        if i.opcode == "recv" and i.arrays[0].dtype == "u8":
            name = i.attributes.split('rendezvous="')[1].split('"')[0]
            done = next(place[a.name] for a in arrivals if i.name in a.operands)
            beside += [f.name for f in first if sends[name] < place[f.name] < done]
    assert beside


def ancestors(order, names):
    """Names of all that these instructions wait for."""
    operands = {instruction.name: instruction.operands for instruction in order}
    found, left = set(), list(names)
    while left:
        for name in operands.get(left.pop(), ()):
            if name not in found:
                found.add(name)
                left.append(name)
    return found
