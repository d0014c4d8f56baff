"""What travels to the devices of experts: the offsets of a ragged exchange, carried out in NumPy."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from scalejax import compat
from scalejax.errors import UserError
from scalejax.parallel import expert
from scalejax.parallel import mesh as meshes
from scalejax.parallel.mesh import MeshShape

DEVICES, HERE = 4, 2
SIZES = np.array(
    [[3, 0, 1, 2, 0, 0, 4, 1], [0, 0, 0, 0, 0, 5, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 2, 0, 3, 0, 1, 0, 4]], np.int32
)
"""Rows of each expert on each device."""
SENT, ROOM = 12, 48


@pytest.fixture(scope="module")
def plans():
    """The plan of each device."""
    mesh = meshes.make_mesh(MeshShape(fsdp=1, expert=DEVICES), jax.devices()[:DEVICES])

    def plan(sizes):
        found = expert.Travel.plan(sizes[0], DEVICES, sent=SENT, room=ROOM)
        return jax.tree.map(lambda x: x[None], (found.there, found.back, found.own))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "platform", lambda: "gpu")
        whole = jax.jit(jax.shard_map(plan, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False))
        found = jax.tree.map(np.asarray, whole(SIZES))
    return [jax.tree.map(lambda x, device=device: x[device], found) for device in range(DEVICES)]


def travel(ways, rows, room):
    """What `jax.lax.ragged_all_to_all` does with the rows of all devices."""
    arrived = [np.full(room, -1) for _ in ways]
    for source, way in enumerate(ways):
        for target in range(len(ways)):
            begin, count, to = (int(x[target]) for x in (way.input_offsets, way.send_sizes, way.output_offsets))
            assert count == ways[target].recv_sizes[source]
            arrived[target][to : to + count] = rows[source][begin : begin + count]
    return arrived


def test_rows_arrive_at_the_device_of_their_expert_by_sender_and_come_back(plans):
    # A row is a number that says from where it is and for whom.
    names = [
        np.array([100 * device + 10 * e + i for e, n in enumerate(SIZES[device]) for i in range(n)])
        for device in range(DEVICES)
    ]
    arrived = travel([there for there, _, _ in plans], names, ROOM)
    for device, (_, _, own) in enumerate(plans):
        mine = range(device * HERE, (device + 1) * HERE)
        expected = [x for sender in names for x in sender if x // 10 % 10 in mine]
        assert arrived[device][: len(expected)].tolist() == expected
        assert (arrived[device][len(expected) :] == -1).all()
        assert own[: len(expected)].tolist() == [x // 10 % 10 - device * HERE for x in expected]
        assert (own[len(expected) :] == HERE).all()
    back = travel([back for _, back, _ in plans], arrived, SENT)
    for device, sent in enumerate(names):
        assert back[device][: len(sent)].tolist() == sent.tolist()


def test_platforms_without_a_ragged_exchange_are_named(monkeypatch):
    monkeypatch.setattr(compat, "platform", lambda: "cpu")
    with pytest.raises(UserError, match="exchange='ragged' is for tpu and gpu, and this is a cpu"):
        expert.Travel.plan(SIZES[0], 1, sent=SENT, room=ROOM)
