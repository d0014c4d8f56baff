import types

import jax
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.mesh import MeshShape


def test_whatever_is_left_goes_to_the_open_axis():
    mesh = meshes.make_mesh(MeshShape(tensor=2))
    assert dict(mesh.shape) == {"replica": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 2, "stage": 1}


def test_sizes_that_do_not_multiply_to_the_devices_are_refused():
    with pytest.raises(UserError, match=r"must multiply to the 8 devices at hand; got fsdp=3.*eval,.*: --mesh fsdp=-1"):
        meshes.make_mesh(MeshShape(fsdp=3))


def test_reads_mesh_sizes():
    assert meshes.parse_mesh("fsdp=8, tensor=2") == MeshShape(fsdp=8, tensor=2)
    assert meshes.parse_mesh("tensor=4") == MeshShape(fsdp=1, tensor=4)
    assert meshes.parse_mesh("replica=2,fsdp=-1").resolve(16) == (2, 8, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fdsp=3", "Did you mean fsdp?"),
        ("fsdp:3", "AXIS=SIZE"),
        ("fsdp=two", "AXIS=SIZE"),
        ("fsdp=2,fsdp=3", "fsdp twice"),
        ("", "AXIS=SIZE"),
    ],
)
def test_refuses_what_is_no_mesh(text, said):
    with pytest.raises(UserError, match="mesh: ") as error:
        meshes.parse_mesh(text)
    assert said in str(error.value)


def test_a_batch_that_does_not_divide_names_axes_and_sizes():
    mesh = meshes.make_mesh(MeshShape(replica=2, tensor=2))
    meshes.check_batch(16, mesh)
    with pytest.raises(UserError, match=r"batch_size 6 does not divide over the batch axes: replica=2, fsdp=2 make 4"):
        meshes.check_batch(6, mesh)
    with pytest.raises(
        UserError, match=r"batch_size 12 does not divide over all axes .*tensor=2 make 8.*8 or 16"
    ) as error:
        meshes.check_batch(12, mesh)
    assert "--set data.batch_size=N (eval: --batch-size N)" in str(error.value)
    assert "--set placement.mesh.AXIS=N (eval and plan: --mesh AXIS=N,...)" in str(error.value)
    with pytest.raises(UserError, match="at least 1"):
        meshes.check_batch(0, mesh)


def of_processes(processes, **shape):
    """A mesh whose devices belong to these processes, in its order."""
    devices = np.empty(len(processes), object)
    devices[:] = [
        types.SimpleNamespace(process_index=i, client=types.SimpleNamespace(process_index=lambda: 2)) for i in processes
    ]
    sizes = MeshShape(**shape).resolve(len(processes))
    return types.SimpleNamespace(devices=devices.reshape(sizes), shape=dict(zip(meshes.AXES, sizes, strict=True)))


POD = (0, 0, 1, 1, 1, 1, 0, 2, 3, 3, 3, 3, 2, 2, 2, 0)
"""Processes along the mesh that `make_mesh` gives for v5e:4x4."""


def test_examples_that_lie_by_device_are_brought_into_the_order_in_which_processes_read_them():
    mesh, examples = of_processes(POD, fsdp=8, expert=2), 32
    meshes.check_processes(mesh)
    # Process i reads the i-th quarter and fills its devices one after the other, as jax places process-local data.
    local = {process: iter(np.arange(8) + 8 * process) for process in range(4)}
    by_device = np.array([next(local[process]) for process in POD for _ in range(2)])
    assert not np.array_equal(by_device, np.arange(examples))
    np.testing.assert_array_equal(by_device[meshes.reading_order(mesh, examples)], np.arange(examples))
    assert meshes.local_positions(mesh) == [7, 12, 13, 14]


def test_processes_that_would_read_the_same_examples_are_refused():
    meshes.check_processes(of_processes((1, 1, 0, 0), fsdp=2, tensor=2))
    with pytest.raises(UserError, match=r"fsdp=2, tensor=2: shard 1 of the batch .* the processes 0, 1"):
        meshes.check_processes(of_processes((0, 0, 0, 1), fsdp=2, tensor=2))
    with pytest.raises(UserError, match=r"process 0 has 3, process 1 has 1\. Start each"):
        meshes.check_processes(of_processes((0, 0, 0, 1), fsdp=4))


def test_a_default_mesh_covers_all_devices():
    assert meshes.make_mesh(MeshShape()).size == len(jax.devices())


@pytest.mark.parametrize(
    ("places", "sides"),
    [
        ([(x, y, z) for x in range(4) for y in range(4) for z in range(2)], (4, 4, 2)),
        ([(x, y, 0) for y in range(2) for x in (range(4), range(3, -1, -1))[y]], (2, 4)),
        ([(x, 0, 0) for x in range(4)], (4,)),
        ([(x, 0, 0) for _ in range(2) for x in range(4)], (8,)),
        (None, (8,)),
    ],
    ids=["a torus", "a snake", "a ring", "two slices", "no places"],
)
def test_sides_of_a_torus_are_those_that_its_chips_lie_along(places, sides):
    places = [None] * 8 if places is None else places
    chips = [types.SimpleNamespace() if at is None else types.SimpleNamespace(coords=at) for at in places]
    grid = np.empty((len(chips), 1), object)
    grid[:, 0] = chips
    mesh = types.SimpleNamespace(shape={"fsdp": len(chips), "tensor": 1}, axis_names=("fsdp", "tensor"), devices=grid)
    assert meshes.torus_sides(mesh, "fsdp") == sides
