"""A tiny Llama whose parameters and gradients travel in block formats, beside float32: losses and bytes.

    python benchmarks/wire_formats.py [--steps 200] [--seeds 3] [--markdown benchmarks/results/wire_formats.md]

A model like that of `llama-smoke`, at width 64, on eight virtual devices (fsdp=8, explicit form). Runs of a seed begin
with the same parameters and see the same batches, so that differences are paired. Bytes are read from the compiled
step. No clock is involved.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax starts
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("PJRT_NPROC", "64")  # threads that may wait in exchanges

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax
import numpy as np

from scalejax import optim
from scalejax.bench import machine
from scalejax.configs.llm import llama
from scalejax.data.text.files import TextData, TextSplit
from scalejax.parallel.fsdp import Fsdp
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan import explain_sharding
from scalejax.train import loop
from scalejax.train.experiment import Checkpoints, Experiment
from scalejax.train.runs import binding

ROWS, LENGTH = 16, 64

# How parameters and gradients travel, by name. The second is float32 in another order of sums: how far apart runs come
# that differ by rounding alone.
FLOAT32, OTHER_ORDER = "float32", "float32, sums in another order"
STRATEGIES: dict[str, tuple[MeshShape, Fsdp]] = {
    FLOAT32: (MeshShape(fsdp=8), Fsdp(form="explicit")),
    OTHER_ORDER: (MeshShape(replica=4, fsdp=2), Fsdp(form="explicit", sharding="HYBRID_SHARD")),
} | {
    f"{gather}, {reduce}": (
        MeshShape(fsdp=8),
        Fsdp(form="explicit", gather_format=gather, reduce_format=reduce),
    )
    for gather, reduce in (
        ("bdr_mx9", "bdr_mx9"),
        ("bdr_mx6", "bdr_mx6"),
        ("bdr_mx9", "bdr_mx4"),
        ("mxfp8_e4m3", "mxfp8_e5m2"),
    )
}

PAGE = """\
# Block formats on the wire

`python benchmarks/wire_formats.py --steps {steps} --seeds {seeds}`

{device}, {today}, commit {commit}. The model of `llama-smoke` at
width 64: {count:,} parameters, {steps} steps of {rows} rows of {length} bytes of Python's standard library, AdamW,
FULL_SHARD over eight virtual devices. Master parameters, sums of gradients and the optimizer are float32; parameters
are rounded where they are gathered, gradients where they leave a device. Runs of a seed differ in that alone. No error
feedback. The loss is that of the master parameters, in nats a byte. KiB are payloads of a step on a device: of
parameters (all-gather), of gradients (reduce-scatter, or all-to-all of bytes), and of what is whole on every device
(all-reduce).

TABLE

Differences are those of runs of the same seed: mean, then the smallest and largest over seeds. "Sums in another order"
is float32 under HYBRID_SHARD on replica=4, fsdp=2: the same arithmetic but for the order of sums, so that its
differences are those of any two runs that round differently. Runs in float32 from different seeds differ by
{spread:.3f} at most.
"""


def experiment_of(name: str, seed: int, steps: int) -> Experiment:
    mesh, strategy = STRATEGIES[name]
    small: Any = llama.smoke()
    return dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, dim=64, ffn_dim=128),
        optimizer=optim.AdamW(learning_rate=optim.WarmupCosine(peak=1e-3, warmup=0.05, final=0.1), weight_decay=0.1),
        data=TextData(length=LENGTH, batch_size=ROWS, seed=seed, split=TextSplit(train=0.97, validation=0.003)),
        placement=dataclasses.replace(small.placement, mesh=mesh),
        strategy=strategy,
        seed=seed,
        steps=steps,
        log_every=steps,
        checkpoints=Checkpoints(every=0, best_metric="loss"),
    )


def kibibytes(experiment: Experiment) -> tuple[float, float, float]:
    """Of parameters, of gradients, of the rest, in one step on a device."""
    program = binding.bind(experiment, experiment.data.schema(), make_mesh(experiment.placement.mesh))
    compiled = program.train_step.lower(program.abstract_state(), program.abstract_batch()).compile()
    found = {"all-gather": 0, "all-to-all": 0, "reduce-scatter": 0, "all-reduce": 0}
    for collective in explain_sharding(compiled, program.mesh):
        found[collective.kind] += collective.bytes
    gradients = found["all-to-all"] + found["reduce-scatter"]
    return found["all-gather"] / 2**10, gradients / 2**10, found["all-reduce"] / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--markdown", type=pathlib.Path)
    arguments = parser.parse_args()

    losses = {}
    cache = tempfile.TemporaryDirectory()
    jax.config.update("jax_compilation_cache_dir", cache.name)  # seeds share programs
    for name in STRATEGIES:
        for seed in range(arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                experiment = experiment_of(name, seed, arguments.steps)
                summary = loop.train(experiment, workdir=pathlib.Path(folder) / "run")
            losses[name, seed] = summary["val_loss"]
            print(f"{name}: seed {seed}, {summary['val_loss']:.4f}", flush=True)
    rows = ["| parameters, gradients | KiB of parameters | of gradients | rest | validation loss | minus float32 |"]
    rows.append("|---|---|---|---|---|---|")
    exact = np.array([losses[FLOAT32, seed] for seed in range(arguments.seeds)])
    for name in STRATEGIES:
        gathered, reduced, rest = kibibytes(experiment_of(name, 0, arguments.steps))
        found = np.array([losses[name, seed] for seed in range(arguments.seeds)])
        off = found - exact
        shown = "" if name == FLOAT32 else f"{off.mean():+.4f} ({off.min():+.4f} to {off.max():+.4f})"
        values = ", ".join(f"{value:.4f}" for value in found)
        rows.append(f"| {name} | {gathered:.1f} | {reduced:.1f} | {rest:.2f} | {values} | {shown} |")
    cache.cleanup()
    print("\n".join(rows))
    if arguments.markdown:
        experiment = experiment_of(FLOAT32, 0, arguments.steps)
        program = binding.bind(experiment, experiment.data.schema(), make_mesh(experiment.placement.mesh))
        count = sum(int(np.prod(p.shape)) for p in program.model.params.values())
        text = PAGE.format(
            steps=arguments.steps,
            seeds=arguments.seeds,
            device=machine.device_name(jax.devices()[0]),
            today=machine.today(),
            commit=machine.commit(),
            count=count,
            rows=ROWS,
            length=LENGTH,
            spread=exact.max() - exact.min(),
        )
        arguments.markdown.write_text(text.replace("TABLE", "\n".join(rows)))


if __name__ == "__main__":
    main()
