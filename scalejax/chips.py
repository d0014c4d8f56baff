"""Data sheets of chips: memory, peak rates and links.

A plan compares a compiled step with these peaks. Nobody reaches them; they say which resource a step runs out of first
and how far from the limit it may be at best. Figures are per *chip*. Where jax shows several devices per chip (tpu7x:
one per TensorCore), a device has an equal share.

Sources, by the marks in the table:
  [v5e]  cloud.google.com/tpu/docs/v5e          [v5p]  cloud.google.com/tpu/docs/v5p
  [v6e]  cloud.google.com/tpu/docs/v6e          [7x]   cloud.google.com/tpu/docs/tpu7x
  [jax]  `pltpu.get_tpu_info()` of jax 0.10.2 (per TensorCore there); a test compares the table with it.
  [libtpu] "exceeds available HBM" of libtpu 0.0.42.1, per device; a test compares the table with it.
  [h100] [h200] NVIDIA data sheets of the SXM parts, dense (no sparsity), NVLink 4: 18 links of 25 GB/s per direction.
  [h800] The H100 for China: 400 GB/s both ways of NVLink, else the same where float64 is not concerned.
  [a100] NVIDIA A100 data sheet, SXM parts of 40 and 80 GB, dense; NVLink 3: 12 links of 25 GB/s per direction.
"""

import dataclasses

GIB = 1024**3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Peaks of one chip.

    Attributes:
      name: As it stands in a topology name, "v5p".
      device_kind: `jax.Device.device_kind`.
      devices_per_chip: Devices that jax shows for one chip.
      hbm_bytes: Capacity.
      usable_hbm_bytes: What the TPU compiler leaves to a program.
      hbm_bytes_per_s: Bandwidth.
      bf16_flops_per_s: Peak of a bfloat16 matrix product that accumulates in float32.
      int8_ops_per_s: Peak of an int8 matrix product; None = the chip has no faster int8 path than bfloat16.
      f32_flops_per_s: Peak of a float32 matrix product of full precision. A TPU has no float32 matrix unit: "highest"
        precision takes 6 bfloat16 passes, "high" takes 3, the default takes 1 and rounds its inputs to bfloat16.
      mxu_side: Rows and columns of a matrix unit: a product that is narrower or shallower than this leaves part of it
        idle. 1 = not modelled.
      link_bytes_per_s: One link to a neighbour, one direction.
      link_axes: Axes of the torus; an axis has a link to each side. 0 = no torus (every pair at full rate: NVLink).
      dcn_bytes_per_s: Network between slices, a chip's share, one direction.
      full_wrap: An axis of the slice closes to a ring if all its axes are a multiple of this (3D tori), or, if the
        number is negative, if the axis itself has exactly that length (2D: only the full side of a pod closes).
      pod_chips: Largest slice.
      host_block: Shape of the chips of one host in a topology.
      shapes: Shapes that the cloud offers, for suggestions.
    """

    name: str
    device_kind: str
    devices_per_chip: int = 1
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    int8_ops_per_s: float | None
    f32_flops_per_s: float
    mxu_side: int = 1
    link_bytes_per_s: float
    link_axes: int
    dcn_bytes_per_s: float
    full_wrap: int = 0
    pod_chips: int = 1
    host_block: tuple[int, ...] = ()
    shapes: tuple[str, ...] = ()

    def matmul_flops_per_s(self, dtype: str, precision: str = "default") -> float:
        """Peak of a matrix product by the dtype of its inputs and jax's precision ("default", "high", "highest")."""
        if dtype in ("int8", "uint8", "int4", "uint4"):
            return self.int8_ops_per_s or self.bf16_flops_per_s
        if dtype in ("float32", "float64") and precision != "default":
            return self.f32_flops_per_s * (2.0 if precision == "high" else 1.0)
        return self.bf16_flops_per_s

    def wraps(self, shape: tuple[int, ...], axis: int) -> bool:
        """Whether an axis of a slice of this shape closes to a ring."""
        if self.full_wrap < 0:
            return shape[axis] == -self.full_wrap
        # A slice of whole cubes is a full torus ([v5p]: "All 4x4x4 and larger slices (one cube) have full 3D tori").
        return self.full_wrap > 0 and all(size % self.full_wrap == 0 for size in shape)


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")

V5E = Chip(
    name="v5e",
    device_kind="TPU v5 lite",
    hbm_bytes=16 * GIB,  # [v5e] 16 GB; [jax] 17.2e9
    usable_hbm_bytes=int(15.75 * GIB),  # [libtpu]
    hbm_bytes_per_s=819e9,  # [v5e] 819 GB/s
    bf16_flops_per_s=197e12,  # [v5e]
    int8_ops_per_s=393e12,  # [v5e]
    f32_flops_per_s=197e12 / 6,  # six bf16 passes
    mxu_side=128,  # [jax]
    link_bytes_per_s=50e9,  # [v5e] 400 GB/s both ways over 4 ports
    link_axes=2,
    dcn_bytes_per_s=25e9 / 8,  # [v5e] 6.4 Tb/s per pod of 256
    full_wrap=-16,
    pod_chips=256,
    host_block=(2, 2),
    shapes=_FLAT,
)
V5P = Chip(
    name="v5p",
    device_kind="TPU v5",
    hbm_bytes=96 * GIB,  # [v5p] 96 GiB physical, 95 GiB for the user
    usable_hbm_bytes=int(95.74 * GIB),  # [libtpu]
    hbm_bytes_per_s=2765e9,  # [v5p] 2765 GB/s ([jax] has 2.46e12)
    bf16_flops_per_s=459e12,  # [v5p]
    int8_ops_per_s=918e12,  # [jax]
    f32_flops_per_s=459e12 / 6,  # six bf16 passes
    mxu_side=128,  # [jax]
    link_bytes_per_s=100e9,  # [v5p] 1200 GB/s both ways over 6 ports
    link_axes=3,
    dcn_bytes_per_s=50e9 / 8,  # [v5p] 50 Gb/s
    full_wrap=4,
    pod_chips=8960,
    host_block=(2, 2, 1),
    shapes=(*_CUBES, "16x16x24"),
)
V6E = Chip(
    name="v6e",
    device_kind="TPU v6 lite",
    hbm_bytes=32 * GIB,  # [v6e] 32 GB; [jax] 34.4e9
    usable_hbm_bytes=int(31.25 * GIB),  # [libtpu]
    hbm_bytes_per_s=1638e9,  # [v6e]
    bf16_flops_per_s=918e12,  # [v6e]
    int8_ops_per_s=1836e12,  # [v6e]
    f32_flops_per_s=918e12 / 6,  # six bf16 passes
    mxu_side=256,  # [jax]
    link_bytes_per_s=100e9,  # [v6e] 800 GB/s both ways over 4 ports
    link_axes=2,
    dcn_bytes_per_s=100e9 / 8,  # [7x] compares: v6e 100 Gb/s
    full_wrap=-16,
    pod_chips=256,
    host_block=(2, 2),
    shapes=_FLAT,
)
TPU7X = Chip(
    name="tpu7x",
    device_kind="TPU7x",
    devices_per_chip=2,  # [7x] "access two TPU devices instead of the single logical core"
    hbm_bytes=192 * GIB,  # [7x]
    usable_hbm_bytes=2 * int(94.75 * GIB),  # [libtpu]
    hbm_bytes_per_s=7380e9,  # [7x]
    bf16_flops_per_s=2307e12,  # [7x]
    int8_ops_per_s=None,  # [7x] and [jax] name fp8, no int8 path
    f32_flops_per_s=2307e12 / 6,  # six bf16 passes
    mxu_side=256,  # [jax]
    link_bytes_per_s=100e9,  # [7x] 1200 GB/s both ways over 6 ports
    link_axes=3,
    dcn_bytes_per_s=100e9 / 8,  # [7x] 100 Gb/s
    full_wrap=4,
    pod_chips=9216,
    host_block=(2, 2, 1),
    shapes=_CUBES,
)
H100 = Chip(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    hbm_bytes=80 * 10**9,  # [h100]
    usable_hbm_bytes=80 * 10**9,
    hbm_bytes_per_s=3.35e12,  # [h100]
    bf16_flops_per_s=989e12,  # [h100] dense
    int8_ops_per_s=1979e12,  # [h100] dense
    f32_flops_per_s=67e12,  # [h100] float32 outside the tensor cores
    link_bytes_per_s=450e9,  # [h100] 900 GB/s both ways, to any peer through NVSwitch
    link_axes=0,
    dcn_bytes_per_s=400e9 / 8,  # one 400 Gb/s port a GPU, the DGX H100 layout
)
H200 = dataclasses.replace(
    H100,
    name="h200",
    device_kind="NVIDIA H200",
    hbm_bytes=141 * 10**9,  # [h200]
    usable_hbm_bytes=141 * 10**9,
    hbm_bytes_per_s=4.8e12,  # [h200]
)
H800 = dataclasses.replace(
    H100,
    name="h800",
    device_kind="NVIDIA H800",
    link_bytes_per_s=200e9,  # [h800]
)

A100_40GB = Chip(
    name="a100-40gb",
    device_kind="NVIDIA A100-SXM4-40GB",
    hbm_bytes=40 * 10**9,  # [a100]
    usable_hbm_bytes=40 * 10**9,
    hbm_bytes_per_s=1555e9,  # [a100]
    bf16_flops_per_s=312e12,  # [a100] dense
    int8_ops_per_s=624e12,  # [a100] dense
    f32_flops_per_s=19.5e12,  # [a100] float32 outside the tensor cores
    link_bytes_per_s=300e9,  # [a100] 600 GB/s both ways, to any peer through NVSwitch
    link_axes=0,
    dcn_bytes_per_s=200e9 / 8,  # one 200 Gb/s port a GPU, the DGX A100 layout
)
A100_80GB = dataclasses.replace(
    A100_40GB,
    name="a100-80gb",
    device_kind="NVIDIA A100-SXM4-80GB",
    hbm_bytes=80 * 10**9,  # [a100]
    usable_hbm_bytes=80 * 10**9,
    hbm_bytes_per_s=2039e9,  # [a100]
)

GPUS = {chip.name: chip for chip in (A100_40GB, A100_80GB, H100, H200, H800)}
"""GPUs by name."""

TPUS = {chip.name: chip for chip in (V5E, V5P, V6E, TPU7X)}
"""Chips that can be compiled for without being here, by the name in a topology."""


def for_device_kind(device_kind: str) -> Chip | None:
    """The chip behind `jax.Device.device_kind`, or None if the table lacks it."""
    for chip in (*TPUS.values(), *GPUS.values()):
        if chip.device_kind == device_kind:
            return chip
    return None
