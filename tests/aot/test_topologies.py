"""The chip table and the meshes against the TPU compiler itself."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax import chips
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.plan import topology
from scalejax.plan.compiled import memory

pytestmark = pytest.mark.aot

SMALL = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


def _mesh(name, mesh=None):
    machine = topology.parse(name)
    return machine, *topology.make_mesh(machine, None if mesh is None else meshes.parse_mesh(mesh))


@pytest.mark.parametrize("name", SMALL)
def test_the_chip_table_agrees_with_jax(name):
    machine, mesh, _ = _mesh(name)
    chip = machine.chip
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()  # per TensorCore
    cores = info.num_cores * chip.devices_per_chip
    assert info.mxu_column_size == chip.mxu_side
    assert mesh.devices.flat[0].device_kind == chip.device_kind
    assert mesh.size == machine.devices == 4 * chip.devices_per_chip
    # Both round published figures; jax has 2.46e12 B/s for v5p where the vendor says 2765 GB/s.
    assert cores * info.hbm_capacity_bytes == pytest.approx(chip.hbm_bytes, rel=0.01)
    assert cores * info.bf16_ops_per_second == pytest.approx(chip.bf16_flops_per_s, rel=0.01)
    assert cores * info.int8_ops_per_second == pytest.approx(chip.int8_ops_per_s or 0.0, rel=0.01)
    bandwidth = 0.13 if chip is chips.V5P else 0.01
    assert cores * info.mem_bw_bytes_per_second == pytest.approx(chip.hbm_bytes_per_s, rel=bandwidth)


@pytest.mark.parametrize("name", SMALL)
def test_the_compiler_leaves_a_program_as_much_memory_as_the_table_says(name):
    machine, mesh, _ = _mesh(name)
    usable = machine.chip.usable_hbm_bytes // machine.chip.devices_per_chip
    rows = 2 * machine.devices * usable // (128 * 4)
    rows -= rows % machine.devices
    x = jax.ShapeDtypeStruct((rows, 128), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    with pytest.raises(Exception, match="RESOURCE_EXHAUSTED") as error:
        jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    stated = str(error.value)
    available = float(stated.split("available HBM (")[1].split("G)")[0])
    assert available * 1024**3 == pytest.approx(usable, abs=0.02 * 1024**3)
    assert memory.needed_bytes(stated) == pytest.approx(2 * usable, rel=0.02)


@pytest.mark.parametrize(
    ("name", "mesh", "shape"),
    [
        ("v5e:1x1", None, {}),
        ("v5e:16x16", "fsdp=16,tensor=16", {"fsdp": 16, "tensor": 16}),
        ("v5p:4x8x8", None, {"fsdp": 256}),
        ("v5p:8x8x16", "replica=16,fsdp=8,tensor=8", {"replica": 16, "fsdp": 8, "tensor": 8}),
        ("tpu7x:2x2x2", "fsdp=8,tensor=2", {"fsdp": 8, "tensor": 2}),
        ("v5p:2x2x2,slices=2", None, {"replica": 2, "fsdp": 8}),
    ],
)
def test_meshes_lie_on_whole_axes(name, mesh, shape):
    _, found, warnings = _mesh(name, mesh)
    assert {axis: size for axis, size in found.shape.items() if size > 1} == shape
    assert warnings == []


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v6e:16x16", "fsdp=64,tensor=4"),
        ("v6e:2x4", "fsdp=8"),
        ("v5p:4x8x8", "fsdp=32,context=2,tensor=4"),
        ("v5e:8x8", "replica=2,fsdp=32"),
        ("tpu7x:2x2x2", "fsdp=4,tensor=4"),
        ("v5p:2x2x2,slices=2", "replica=2,fsdp=8"),
    ],
)
def test_stand_ins_lie_as_the_devices_of_libtpu(name, mesh):
    machine, found, warnings = _mesh(name, mesh)
    layout, alike = topology.lay_out(machine, meshes.parse_mesh(mesh))
    assert layout.devices.shape == found.devices.shape
    for ours, theirs in zip(layout.devices.flat, found.devices.flat, strict=True):
        place = tuple(theirs.coords), theirs.core_on_chip, getattr(theirs, "slice_index", 0)
        assert (ours.coords, ours.core_on_chip, ours.slice_index) == place
    assert warnings == alike


def test_neighbours_of_a_whole_axis_are_one_link_apart():
    _, mesh, _ = _mesh("v5p:4x4x4", "fsdp=4,tensor=16")
    for ring in mesh.devices.reshape(4, 16).T:
        pairs = itertools.pairwise(device.coords for device in ring)
        steps = [sum(min(abs(p - q), 4 - abs(p - q)) for p, q in zip(a, b, strict=True)) for a, b in pairs]
        assert steps == [1, 1, 1]


def test_slices_lie_on_replica_alone():
    _, mesh, _ = _mesh("v5p:2x2x2,slices=2", "replica=4,fsdp=4")
    slices = [[d.slice_index for d in row.flat] for row in mesh.devices.reshape(4, 4)]
    assert slices == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]


def test_a_split_axis_is_allowed_with_a_warning():
    _, mesh, warnings = _mesh("v5e:8x8", "replica=2,fsdp=32")
    assert mesh.size == 64
    assert len(warnings) == 1
    assert "splits a physical axis of v5e:8x8" in warnings[0]


@pytest.mark.parametrize("name", ["v5e:3x3", "v5p:2x3x1"])
def test_a_shape_that_the_compiler_refuses_names_near_ones(name):
    with pytest.raises(UserError, match="libtpu does not know") as error:
        topology.make_mesh(topology.parse(name))
    assert "Near and valid" in str(error.value)
