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


def test_buckets_do_not_wait_for_each_other_and_work_goes_on_while_they_are_between_slices():
    mesh, _ = topology.make_mesh(topology.parse(SLICES), None)
    module = hlo.parse(compiled(experiment_of(bucket_bytes=40_000), mesh).as_text())
    order = module.computations[module.entry].instructions
    place = {instruction.name: n for n, instruction in enumerate(order)}
    within = [i for i in order if i.opcode.startswith("all-to-all") and not i.opcode.endswith("-done")]
    assert len(within) == 5  # the first hops of five buckets
    assert {i.arrays[0].dtype for i in within} == {"u8"}
    arrivals = [i for i in order if i.opcode == "recv-done" and i.arrays[0].dtype == "u8"]
    assert not ancestors(order, [i.name for i in within]) & {i.name for i in arrivals}
    # In the program's order: kernels of gradients, and gathers of weights, between a message's start and its arrival.
    starts = {rendezvous(i): place[i.name] for i in order if i.opcode == "send"}
    beside = set()
    for receive in order:
        if receive.opcode == "recv" and receive.arrays[0].dtype == "u8":
            end = next(place[i.name] for i in arrivals if receive.name in i.operands)
            beside |= {i.name.split(".")[0] for i in order[starts[rendezvous(receive)] : end]}
    assert {"group_requantize", "group_quantize", "all-gather"} <= beside


def rendezvous(instruction):
    return instruction.attributes.split('rendezvous="')[1].split('"')[0]


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
