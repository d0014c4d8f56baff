"""Names of topologies and meshes: read, refused with a near alternative, never guessed."""

import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from scalejax import chips
from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.mesh import MeshShape
from scalejax.plan import topology


@pytest.mark.parametrize(
    ("text", "chip", "shape", "slices", "chip_count", "devices"),
    [
        ("v5e:4x4", "v5e", (4, 4), 1, 16, 16),
        ("v5p:4x8x8", "v5p", (4, 8, 8), 1, 256, 256),
        ("v6e:16x16", "v6e", (16, 16), 1, 256, 256),
        ("tpu7x:2x2x2", "tpu7x", (2, 2, 2), 1, 8, 16),  # two devices a chip
        ("7x:2x2x1", "tpu7x", (2, 2, 1), 1, 4, 8),
        (" V5P:2x2x1,slices=3 ", "v5p", (2, 2, 1), 3, 12, 12),
    ],
)
def test_reads_chip_shape_and_slices(text, chip, shape, slices, chip_count, devices):
    found = topology.parse(text)
    assert (found.chip.name, found.shape, found.slices) == (chip, shape, slices)
    assert (found.chips, found.devices) == (chip_count, devices)
    assert topology.parse(found.name) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v6e-8", "v6e:2x4"),  # the cloud's name for 8 chips
        ("v5p-16", "v5p:2x2x2"),  # which counts TensorCores for v5p
        ("v9:2x2", "chip must be one of tpu7x, v5e, v5p, v6e"),
        ("tpu7:2x2x1", "tpu7x:2x2x2"),
        ("v5p:2x2", "3D torus"),
        ("v5e:16x32", "v5e:16x16"),
        ("v5e:0x4", "positive sizes"),
        ("v5e:4x4,slices=0", "slices is at least 1"),
        ("4x4", "must look like"),
        ("", "must look like"),
    ],
)
def test_refuses_what_is_no_topology_and_names_a_near_one(text, said):
    with pytest.raises(UserError, match="topology: ") as error:
        topology.parse(text)
    assert said in str(error.value)


def test_a_mesh_that_does_not_multiply_names_devices_and_a_size_that_works():
    with pytest.raises(UserError, match=r"multiply to the 8 devices of tpu7x:2x2x1 \(4 chips\)") as error:
        topology.make_mesh(topology.parse("tpu7x:2x2x1"), meshes.parse_mesh("fsdp=4"))
    assert "got fsdp=4. Try fsdp=8" in str(error.value)


def test_only_replica_may_cross_slices():
    with pytest.raises(UserError, match="replica must be a multiple of the 2 slices"):
        topology.make_mesh(topology.parse("v5p:2x2x1,slices=2"), meshes.parse_mesh("fsdp=8"))


def test_the_default_mesh_is_fsdp_inside_and_replica_across_slices():
    assert topology.default_mesh(topology.parse("tpu7x:2x2x1")) == MeshShape(replica=1, fsdp=8)
    assert topology.default_mesh(topology.parse("v5p:4x4x4,slices=2")) == MeshShape(replica=2, fsdp=64)


def test_missing_libtpu_names_the_extra_to_install(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else real(name))
    with pytest.raises(UserError, match=r"pip install 'scalejax\[plan\]'"):
        topology.abstract_devices(topology.parse("v5e:2x2"))


def test_a_libtpu_that_does_not_fit_jax_names_the_right_one(monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"libtpu": "0.0.1", "jax": "9.9"}[name])
    monkeypatch.setattr(topology, "libtpu_wanted", lambda: "0.0.42.*")
    with pytest.raises(UserError, match=r"libtpu 0\.0\.42\.\*; got libtpu 0\.0\.1.*pip install"):
        topology.abstract_devices(topology.parse("v5e:2x2"))


def test_reads_which_libtpu_jax_pins():
    assert topology.libtpu_wanted().startswith("0.0.")


@pytest.mark.slow
def test_importing_the_package_needs_no_libtpu():
    code = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.partition('.')[0] in ('libtpu', 'flax', 'optax', 'rich'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import scalejax.plan\n"
        "scalejax.plan.Topology\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_wrap_around_follows_the_published_rules():
    assert not chips.V5E.wraps((8, 16), 0)
    assert chips.V5E.wraps((8, 16), 1)
    assert all(chips.V5P.wraps((4, 8, 8), axis) for axis in range(3))
    assert not any(chips.V5P.wraps((2, 4, 4), axis) for axis in range(3))


def test_peaks_follow_dtype_and_precision():
    assert chips.V5E.matmul_flops_per_s("bfloat16") == chips.V5E.matmul_flops_per_s("float32") == 197e12
    assert chips.V5E.matmul_flops_per_s("int8") == 393e12
    assert chips.V5P.matmul_flops_per_s("float32", "highest") == 459e12 / 6
    assert chips.V5P.matmul_flops_per_s("float32", "high") == pytest.approx(459e12 / 3)
    assert chips.TPU7X.matmul_flops_per_s("int8") == 2307e12  # no int8 path of its own
    assert chips.for_device_kind("TPU v6 lite") is chips.V6E
    assert chips.for_device_kind("cpu") is None
