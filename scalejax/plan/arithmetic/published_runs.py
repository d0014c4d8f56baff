"""Published training runs on TPUs that the step model is calibrated on and judged by.

Speeds stand in MaxText's list of tuned models (docs/reference/models/tiering.md of AI-Hypercomputer/maxtext), which
links a configuration for each; batches, meshes and what is rematerialised are those of the configurations:

  [mt]    github.com/AI-Hypercomputer/maxtext, benchmarks/maxtext_{trillium,v5p}_model_configs.py at the commits that
          the list links, 92e59fdf and 5e6a7caf (September 2025); defaults from configs/base.yml (attention blocks of
          512, unless a configuration has its own; a backward kernel that is split unless sa_use_fused_bwd_kernel;
          AdamW in the dtype of the weights; logits of all positions, in bfloat16).
  [tr]    github.com/AI-Hypercomputer/tpu-recipes, training/{trillium,v5p}: the same with a line of the log. Where the
          configuration stands there alone, it is that of MaxText at tpu-recipes-v0.1.2.

What was published is not always consistent with itself; `note` says where. Utilisation there counts all pairs of
attention, causal or not: with that, and no other convention, tokens a second give the printed TFLOP/s.

One number is fitted: `SHARES`, the share of the peak that products reach, on one run a chip (`CALIBRATED_ON`). All
other runs are held out: they are predicted, and change nothing of the model.
"""

import dataclasses
import math
from typing import Literal

import numpy as np

from scalejax.parallel.mesh import AXES, MeshShape
from scalejax.plan import topology
from scalejax.plan.arithmetic import step_model
from scalejax.plan.arithmetic.step_model import Kept, Remat, StepEstimate, Training
from scalejax.plan.arithmetic.transformer import Decoder
from scalejax.plan.topology import DeviceLayout, Topology

LLAMA31_8B = Decoder(layers=32, dim=4096, hidden=14_336, heads=32, kv_heads=8, head_dim=128, vocabulary=128_256)
LLAMA31_70B = Decoder(layers=80, dim=8192, hidden=28_672, heads=64, kv_heads=8, head_dim=128, vocabulary=128_256)
LLAMA31_405B = Decoder(layers=126, dim=16_384, hidden=53_248, heads=128, kv_heads=8, head_dim=128, vocabulary=128_256)
LLAMA2_70B = dataclasses.replace(LLAMA31_70B, vocabulary=32_000)
MIXTRAL_8X7B = dataclasses.replace(LLAMA31_8B, vocabulary=32_000, experts=8, active_experts=2)
MIXTRAL_8X22B = dataclasses.replace(MIXTRAL_8X7B, layers=56, dim=6144, hidden=16_384, heads=48, vocabulary=32_768)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One run.

    Attributes:
      name: Model and chip.
      decoder: The model.
      training: How it was trained.
      machine: Topology.
      tokens_per_s_per_chip: Measured.
      mfu: As printed, all pairs of attention counted.
      source: Where its configuration stands.
      note: What its sources leave open or contradict.
      layout: Where the devices of the mesh lie: "own", as `topology.make_mesh` places them, or each four along the
        innermost axis in a "square" of 2 x 2 chips, which is the hybrid_ring_64x4 of MaxText.
    """

    name: str
    decoder: Decoder
    training: Training
    machine: str
    tokens_per_s_per_chip: float
    mfu: float
    source: str
    note: str = ""
    layout: Literal["own", "square"] = "own"

    def estimate(self, share: float) -> StepEstimate:
        """The step by the model."""
        machine = topology.parse(self.machine)
        layout = _in_squares(machine, self.training.mesh) if self.layout == "square" else None
        return step_model.estimate(self.decoder, self.training, machine, share=share, layout=layout)


def _in_squares(machine: Topology, mesh: MeshShape) -> DeviceLayout:
    high, wide = machine.shape
    devices = np.array(topology.stand_in_devices(machine)).reshape(machine.slices, high // 2, 2, wide // 2, 2)
    return DeviceLayout(devices.swapaxes(2, 3).reshape(mesh.resolve(machine.devices)), AXES)


def _offloaded(*names: Kept) -> Remat:
    return Remat(kept=(), offloaded=("input", *names))


def _training(rows_per_chip: int, sequence: int, mesh: MeshShape, remat: Remat, **more: object) -> Training:
    chips = math.prod(getattr(mesh, axis) for axis in AXES)
    # "per_device_batch_size" of MaxText counts rows over all chips, those of `tensor` included.
    given = {"batch": rows_per_chip * chips, "sequence": sequence, "mesh": mesh, "remat": remat, **more}
    return Training(loss_positions=None, logits_bytes=2, **given)  # pyright: ignore[reportArgumentType]


RUNS = (
    PublishedRun(
        name="Llama 3.1 8B, v6e",
        decoder=LLAMA31_8B,
        training=_training(
            4,
            8192,
            MeshShape(fsdp=256),
            _offloaded("query", "key_value", "out"),
            attention_block=2048,
            attention_backward="fused",
        ),
        machine="v6e:16x16",
        tokens_per_s_per_chip=7207,
        mfu=0.4546,
        source="[mt] llama3_1_8b_8192; [tr] 4.546 s a step",
    ),
    PublishedRun(
        name="Llama 3.1 70B, v6e",
        decoder=LLAMA31_70B,
        training=_training(
            5,
            8192,
            MeshShape(fsdp=256),
            _offloaded("query", "key_value"),
            attention_block=2048,
            attention_backward="fused",
        ),
        machine="v6e:16x16",
        tokens_per_s_per_chip=960,
        mfu=0.5033,
        source="[mt] llama3_1_70b_8192; [tr] 42.656 s a step",
    ),
    PublishedRun(
        name="Llama 3.1 405B, v6e",
        decoder=LLAMA31_405B,
        training=_training(
            1,
            8192,
            MeshShape(replica=2, fsdp=64, tensor=4),
            _offloaded("query", "key_value", "out"),
            sharded_over=("replica", "fsdp"),
            attention_block=2048,
        ),
        machine="v6e:16x16,slices=2",
        tokens_per_s_per_chip=123,
        mfu=0.3855,
        source="[mt] llama3_1_405b_8192_fsdp_dcn",
        note=(
            "123 tokens/s are 35.2 % and not 38.55 %, which would be 135; a log of this configuration, in an early "
            "form of its recipe, has 58.805 s a step, 139. The list says 256 chips, its configuration two slices of "
            "256, and one would be too small by the memory estimate. The 4 chips of `tensor` lie in squares, as "
            "configured; in lines the prediction would be 143."
        ),
        layout="square",
    ),
    PublishedRun(
        name="Llama 2 70B, v6e",
        decoder=LLAMA2_70B,
        training=_training(
            2,
            4096,
            MeshShape(fsdp=256),
            Remat(offloaded=("query", "key_value")),
            attention_block=2048,
        ),
        machine="v6e:16x16",
        tokens_per_s_per_chip=900,
        mfu=0.438,
        source="[mt] llama2_70b_4096_sc; [tr] 9.052 s a step",
        note="The configuration has 3 rows a chip; the log's 2,097,152 tokens a step are 2, which is taken.",
    ),
    PublishedRun(
        name="Mixtral 8x7B, v6e",
        decoder=MIXTRAL_8X7B,
        training=_training(
            12,
            4096,
            MeshShape(fsdp=256),
            _offloaded("query", "key_value", "out"),
            capacity_factor=1.25,
            attention_block=2048,
        ),
        machine="v6e:16x16",
        tokens_per_s_per_chip=3899,
        mfu=0.3523,
        source="[tr] Mixtral-8x7B-MaxText, mixtral_8x7b_dropped",
        note=(
            "The log beside this configuration has 13.484 s a step, 3,645 tokens/s; 3,897 stands in an older one, of "
            "8,388,608 tokens a step, which are 8 rows a chip. MaxText moves tokens to places by products with a mask, "
            "which are not counted."
        ),
    ),
    PublishedRun(
        name="Mixtral 8x22B, v6e",
        decoder=MIXTRAL_8X22B,
        training=_training(
            8,
            4096,
            MeshShape(fsdp=64, expert=4),
            _offloaded("query", "key_value", "out"),
            capacity_factor=1.25,
            sharded_over=("fsdp", "expert"),
            attention_block=2048,
            parameter_bytes=2,
            optimizer_bytes=4,
            gradient_bytes=2,
        ),
        machine="v6e:16x16",
        tokens_per_s_per_chip=1326,
        mfu=0.362,
        source="[tr] Mixtral-8x22B-MaxText, mixtral_8x22b_dropped; 24.706 s a step",
        note=(
            "The 4 chips of `expert` lie in squares, as configured; in lines the exchange takes twice as long, and the "
            "prediction would be 1,178."
        ),
        layout="square",
    ),
    PublishedRun(
        name="Llama 2 70B, v5p",
        decoder=LLAMA2_70B,
        training=_training(
            4,
            4096,
            MeshShape(fsdp=512),
            Remat(kept=("input", "query", "key_value", "out", "down")),
        ),
        machine="v5p:8x8x8",
        tokens_per_s_per_chip=692,
        mfu=0.654,
        source="[mt] llama2_70b_v5p_128",
        note="692 tokens/s are 67.0 % and not 65.4 %.",
    ),
    PublishedRun(
        name="Mixtral 8x7B, v5p",
        decoder=MIXTRAL_8X7B,
        training=_training(
            36,
            4096,
            MeshShape(fsdp=128),
            Remat(),
            parameter_bytes=2,
            optimizer_bytes=4,
            gradient_bytes=2,
        ),
        machine="v5p:4x4x8",
        tokens_per_s_per_chip=2909,
        mfu=0.5256,
        source="[tr] Mixtral-8X7B-Maxtext, run_mixtral-8x7b.sh",
        note="The list says 256 chips and 8x4x4, which is 128; 128 are taken. Tokens are not dropped.",
    ),
)

CALIBRATED_ON = {"v6e": "Llama 3.1 8B, v6e", "v5p": "Llama 2 70B, v5p"}
"""Of each chip, the run whose configuration leaves least open."""

SHARES = {"v6e": 0.6933, "v5p": 0.8330}
"""Share of the bfloat16 peak that products reach, by chip: `calibrate` of these runs."""


def run(name: str) -> PublishedRun:
    """The run of a name."""
    return next(run for run in RUNS if run.name == name)


def calibrate(run: PublishedRun) -> float:
    """The share at which the model predicts the measured speed of a run."""
    at_peak = run.estimate(1.0)
    tokens = run.training.batch * run.training.sequence
    measured_s = tokens / (run.tokens_per_s_per_chip * at_peak.topology.chips)
    # Only products depend on the share: step = (products + attention) / share + the rest.
    products = at_peak.product_s + at_peak.attention_s
    return products / (measured_s - (at_peak.step_s - products))
