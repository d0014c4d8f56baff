"""Prints what serving Llama 3 takes on slices of TPUs and on the GPUs of a published run, as Markdown.

    python benchmarks/llm_serving_plans.py > benchmarks/results/llm_serving_plans.md

Arithmetic only: needs no accelerator and no compiler for one, and takes seconds.
"""

import dataclasses
import functools
import math
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from scalejax.inference import abstract_model
from scalejax.inference.loop import PIECE
from scalejax.models.llm.llama3.config import SIZES
from scalejax.plan import serving
from scalejax.plan.planner_machines import Gpus
from scalejax.plan.serving import Machine, PlannedModel, ServingPlan
from scalejax.units import duration, size

COMMAND = "python benchmarks/llm_serving_plans.py > benchmarks/results/llm_serving_plans.md"
MODELS = {"8B": "3.1-8b", "405B": "3.1-405b"}
LENGTHS = {"128k": 2**17, "1M": 2**20}
TPUS = {
    "v5p:4x4x4": ("context=64", "context=16,tensor=4", "context=8,tensor=8", "context=4,tensor=16"),
    "v5p:8x8x16": ("context=128,tensor=8", "context=64,tensor=16"),
}
SLOTS = 8

# Yang et al. 2025, arXiv 2411.01783, section 4 and figure 8: T -> hosts of 8 GPUs -> seconds.
PAPER = {128_000: {1: 42.010, 2: 21.042, 4: 10.950, 8: 5.85, 16: 3.8}, 1_000_000: {16: 77.0}}
REACHED = 502 / 800
"""TFLOP/s a GPU that the paper reports for 1M tokens, of the peak that it gives for its 500 W parts."""


@functools.cache
def model_of(name: str, machine: Machine, mesh: str, *, float8_mlp: bool = False) -> PlannedModel:
    """A size of Llama 3 in bfloat16, the matrices of its MLPs in a byte where asked for."""
    config = SIZES[MODELS[name]]
    laid_out = serving.serving_mesh(machine, mesh, config.kv_heads)
    shape, cache = abstract_model.arrays_of(config, laid_out, dtype="bfloat16", page=64, kv_dtype="compute")
    if float8_mlp:
        params = {
            path: jax.ShapeDtypeStruct(p.shape, jnp.float8_e4m3fn) if "/mlp/" in path else p
            for path, p in shape.params.items()
        }
        shape = dataclasses.replace(shape, params=params)
    return PlannedModel(config, shape, cache, 64)


def planned(name: str, machine: Machine, mesh: str, context: int, slots: int, piece: int, **how: bool) -> ServingPlan:
    """One of them on a machine."""
    laid_out = serving.serving_mesh(machine, mesh, SIZES[MODELS[name]].kv_heads)
    model = model_of(name, machine, mesh, **how)
    return serving.plan_serving(model, machine, laid_out, slots=slots, context=context, piece=piece)


def _table(header: str, rows: list[list[str]]) -> str:
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _marked(mesh: str, found: ServingPlan) -> str:
    return f"{mesh} *" if any("splits a physical axis" in warning for warning in found.warnings) else mesh


def room() -> str:
    """What fits on the TPUs."""
    rows = []
    for name in MODELS:
        for topology, meshes in TPUS.items():
            machine = serving.parse_machine(topology)
            for mesh in meshes:
                found = {label: planned(name, machine, mesh, n, SLOTS, PIECE) for label, n in LENGTHS.items()}
                first = found["128k"]
                rows.append(
                    [
                        name,
                        topology,
                        _marked(mesh, first),
                        size(first.memory["parameters"]),
                        f"{first.kv_bytes_on_device:,.6g}",
                        f"{first.greatest_context:,}" if first.greatest_context else "none: the parameters do not fit",
                        *(f"{one.greatest_slots:,}" for one in found.values()),
                    ]
                )
    header = (
        "model | topology | mesh | parameters of a chip | bytes of a token's keys and values on a chip | longest "
        "sequence | sequences of 128k | of 1M"
    )
    return _table(header, rows)


def times() -> str:
    """Least times on the TPUs."""
    rows = []
    for name in MODELS:
        for topology, meshes in TPUS.items():
            machine = serving.parse_machine(topology)
            for mesh in meshes:
                for label, length in LENGTHS.items():
                    one, many = (planned(name, machine, mesh, length, slots, PIECE) for slots in (1, SLOTS))
                    if not one.fits:
                        rows.append([name, topology, _marked(mesh, one), label, "does not fit", *[""] * 6])
                        continue
                    read = one.prefill
                    rows.append(
                        [
                            name,
                            topology,
                            _marked(mesh, one),
                            label,
                            duration(read.seconds),
                            duration(read.product_s + read.attention_s),
                            duration(read.tensor_s) if read.tensor_s else "0",
                            f"{duration(read.context_s)}, {duration(read.exposed_s) if read.exposed_s else '0'}",
                            f"{100 * read.pass_q:.0f} %",
                            duration(one.decode.seconds),
                            f"{many.tokens_per_s:,.0f}" if many.fits else f"{SLOTS} do not fit",
                        ]
                    )
    header = (
        "model | topology | mesh | prompt | prefill | of which products | sums over tensor | transfers over context, "
        f"not hidden | read by pass-Q | a token of one | tokens/s of {SLOTS}"
    )
    return _table(header, rows)


def _gpus(hosts: int, *, paper: bool) -> Gpus:
    machine = serving.parse_machine(f"h100:{hosts}x8")
    assert isinstance(machine, Gpus)
    if not paper:
        return machine
    # Section 4: 96 GB of HBM2e, 2.4 TB/s, 500 W.
    chip = dataclasses.replace(
        machine.chip,
        hbm_bytes=96 * 10**9,
        usable_hbm_bytes=96 * 10**9,
        hbm_bytes_per_s=2.4e12,
        bf16_flops_per_s=800e12,
    )
    return dataclasses.replace(machine, chip=chip)


def beside_the_paper() -> str:
    """Prefill of 405B on the paper's machine, in one piece as there."""
    rows = []
    for length, measured in PAPER.items():
        for hosts, seconds in measured.items():
            mesh = f"context={hosts},tensor=8"
            piece = math.ceil(length / hosts)
            ours, theirs = (
                planned("405B", _gpus(hosts, paper=paper), mesh, length, 1, piece, float8_mlp=True)
                for paper in (False, True)
            )
            read = theirs.prefill
            reached = (read.product_s + read.attention_s) / REACHED + read.tensor_s + read.exposed_s
            rows.append(
                [
                    f"{length:,}",
                    f"{hosts} x 8",
                    f"{seconds:g} s",
                    duration(ours.prefill.seconds),
                    duration(read.seconds),
                    duration(reached),
                    f"{100 * (reached / seconds - 1):+.0f} %",
                    f"{duration(read.context_s) if read.context_s else '0'}, "
                    f"{duration(read.exposed_s) if read.exposed_s else '0'}",
                    f"{size(theirs.total_bytes)}, {'fits' if theirs.fits else 'does not fit'}",
                ]
            )
    header = (
        "tokens | hosts x GPUs | published | least, by the data sheet of the H100 | least, by the paper's peaks | at "
        "the share reached | off | transfers over context, not hidden | memory of a GPU"
    )
    return _table(header, rows)


def tokens_beside_the_paper() -> str:
    """A token of 405B with 128k tokens before it, on the paper's machine."""
    rows = []
    for hosts, measured in {1: 46.26, 2: 60.23, 4: 71.31}.items():
        mesh = f"context={hosts},tensor=8"
        found = planned("405B", _gpus(hosts, paper=True), mesh, 128_000, 1, 2**17, float8_mlp=True).decode
        rows.append([f"{hosts} x 8", f"{measured} ms", duration(found.seconds), duration(found.hbm_s)])
    return _table("hosts x GPUs | published | least | of which memory", rows)


def main() -> None:
    """Prints all of it."""
    whole = planned("405B", _gpus(16, paper=False), "context=16,tensor=8", 2**17, 1, PIECE)
    longer = planned("8B", serving.parse_machine("v5p:4x4x4"), "context=8,tensor=8", 2**17, 1, 4 * PIECE)
    left = planned("405B", serving.parse_machine("v5p:4x4x4"), "context=8,tensor=8", 2**17, 1, PIECE)
    from_tokens = {
        name: planned(name, serving.parse_machine("v5p:4x4x4"), "context=8,tensor=8", 2**17, 1, PIECE).hidden_from or 0
        for name in MODELS
    }
    hidden = " and ".join(f"{tokens / 8:,.0f} for {name}" for name, tokens in from_tokens.items())
    print(f"""# Serving Llama 3, by arithmetic

`scalejax.plan.serving` (`scalejax plan MODEL --serve`) for the 8B and 405B of Llama 3.1 in bfloat16, 2026-11-26.
Nothing ran here: peaks of data sheets, and the start of a transfer or of a kernel costs nothing, so every time is a
lower bound. 128k is 131,072 tokens, 1M 1,048,576. The models are meant for 131,072 positions: a server refuses a longer
prompt, and 1M is what a model that is stretched so far would take.

`{COMMAND}`

## What fits

Prompts are read in pieces of {PIECE} tokens on each chip along `context`, as `scalejax serve` does. The 8 heads of keys
and values do not divide over tensor=16: they are whole on every chip of it, and so is attention.

{room()}

Every chip along `context` has the parameters of its place along `tensor`: 405B does not fit with tensor=4 or less, and
with tensor=8 it leaves {size(left.usable_bytes - left.memory["parameters"])} of a chip of v5p.
A mesh with * splits an axis of the torus, so that some neighbours are more than one link apart; that is not in the
times.

## Least times

{times()}

From T* new tokens on pass-KV hides its transfers: {hidden}
for each chip along `context` (v5p). Where pieces are shorter, Algorithm 5 sends queries round instead as soon as there
are enough cached tokens, and their results come back in an all-to-all behind which nothing hides. With pieces of
{4 * PIECE:,} tokens on each chip, 128k of 8B over context=8,tensor=8 take {duration(longer.prefill.seconds)}.

## Beside the paper

Yang et al. 2025 (arXiv 2411.01783; tables 6 and 7, figure 8) measured prefill of 405B with the MLPs in FP8 on hosts of
8 H100 with 96 GB at 2.4 TB/s and 500 W, whose peak they give as 800 TFLOP/s: `tensor` in a host, `context` over hosts
at 400 Gb/s a GPU, in one piece. They reach {100 * REACHED:.0f} % of that peak with 1M tokens on 128 GPUs, and that one
share makes the column "at the share reached": its last row is fitted, the others are not. Products in FP8 count at the
rate of bfloat16.

{beside_the_paper()}

The H100 of the data sheet has 80 GB: with all parameters in bfloat16 it does not hold 405B at tensor=8
({size(whole.memory["parameters"])} of {size(whole.usable_bytes)}).

A token with 128,000 before it, batch 1 (tables 6 and 7). Published times grow with hosts, the bound does not: what each
transfer and kernel takes to start is not in it, so it does not say whether `context` is of use to a decoder.

{tokens_beside_the_paper()}""")


if __name__ == "__main__":
    main()
