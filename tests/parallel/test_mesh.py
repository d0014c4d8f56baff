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


def test_processes_are_consecutive_along_the_mesh():
    mesh = meshes.make_mesh(MeshShape())
    meshes.check_processes(mesh)

    devices = np.empty(8, object)
    devices[:] = [types.SimpleNamespace(process_index=i % 2) for i in range(8)]
    shuffled = types.SimpleNamespace(devices=devices)
    with pytest.raises(UserError, match="process 0 comes back"):
        meshes.check_processes(shuffled)


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
