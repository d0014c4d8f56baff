"""Prints how the step model of language models agrees with published runs, as Markdown for benchmarks/results.

    python benchmarks/llm_plans.py > benchmarks/results/llm_plans.md

Arithmetic only: needs no TPU, no TPU compiler, and takes seconds.
"""

import dataclasses

from scalejax.parallel.mesh import AXES, MeshShape, mesh_text
from scalejax.plan import topology
from scalejax.plan.arithmetic import mesh_search, step_model
from scalejax.plan.arithmetic import published_runs as runs
from scalejax.plan.arithmetic.step_model import Training
from scalejax.units import size

COMMAND = "python benchmarks/llm_plans.py > benchmarks/results/llm_plans.md"


def _table(header: str, rows: list[list[str]]) -> str:
    lines = [f"| {header} |", "|" + "---|" * (header.count("|") + 1), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def _mesh(run: runs.PublishedRun) -> str:
    shape = run.training.mesh
    return " x ".join(f"{axis} {n}" for axis in AXES if (n := getattr(shape, axis)) > 1)


def _chip(run: runs.PublishedRun) -> str:
    return run.machine.partition(":")[0]


def _off(found: float, wanted: float) -> str:
    return f"{100 * (found / wanted - 1):+.1f} %"


def predictions() -> str:
    """Speed of each run, published and predicted."""
    rows = []
    for run in runs.RUNS:
        found = run.estimate(runs.SHARES[_chip(run)])
        rows.append(
            [
                run.name,
                run.machine,
                _mesh(run),
                f"{run.training.batch} x {run.training.sequence:,}",
                f"{run.tokens_per_s_per_chip:,}",
                f"{found.tokens_per_s_per_chip:,.0f}",
                "fitted" if run.name in runs.CALIBRATED_ON.values()
                else _off(found.tokens_per_s_per_chip, run.tokens_per_s_per_chip),
                f"{100 * run.mfu:.1f} %",
                f"{100 * found.mfu('full'):.1f} %",
                f"{100 * found.mfu('causal'):.1f} %",
            ]
        )  # fmt: skip
    header = (
        "run | topology | mesh | batch | published tokens/s/chip | predicted | off | published MFU (all pairs) | "
        "predicted | predicted, causal half"
    )
    return _table(header, rows)


def parts() -> str:
    """What a predicted step consists of."""
    rows = []
    for run in runs.RUNS:
        found = run.estimate(runs.SHARES[_chip(run)])
        room = f"{size(found.memory_bytes)} of {size(found.topology.chip.usable_hbm_bytes)}"
        seconds = (found.product_s, found.attention_s, found.between_s, found.collective_s, found.step_s)
        rows.append([run.name, *(f"{s:.2f}" for s in seconds), room])
    return _table("run | products, s | attention | between products | collectives | step | memory of a chip", rows)


def choices() -> str:
    """The error of every run under the share of every other of its chip."""
    rows = []
    for fitted in runs.RUNS:
        share = runs.calibrate(fitted)
        alike = [run for run in runs.RUNS if _chip(run) == _chip(fitted) and run is not fitted]
        errors = (
            f"{run.name.partition(',')[0]} {_off(run.estimate(share).tokens_per_s_per_chip, run.tokens_per_s_per_chip)}"
            for run in alike
        )
        rows.append([fitted.name, f"{share:.3f}", ", ".join(errors)])
    return _table("fitted on | share | error of the others, tokens/s", rows)


def searched() -> str:
    """The best mesh and policy by the same model, for the batch of each run, its own policy among them.

    Devices lie as `topology.make_mesh` places them, those of the run too.
    """
    rows = []
    for run in runs.RUNS:
        machine, share = topology.parse(run.machine), runs.SHARES[_chip(run)]

        def training(mesh: MeshShape, run: runs.PublishedRun = run) -> Training:
            return dataclasses.replace(run.training, mesh=mesh)

        remats = {**step_model.REMATS, "its own": run.training.remat}
        candidates, dropped = mesh_search.prune(run.decoder, training, machine, share=share, remats=remats)
        best = candidates[0]
        rows.append(
            [
                run.name,
                f"{dataclasses.replace(run, layout='own').estimate(share).step_s:.2f}",
                f"{best.estimate.step_s:.2f}",
                f"{mesh_text(best.mesh)}, {best.remat}",
                f"{len(candidates)} of {len(candidates) + len(dropped)}",
            ]
        )
    header = "run | its own mesh and policy, s | the best found | which | candidates that divide and fit"
    return _table(header, rows)


def main() -> None:
    """Prints all of it."""
    shares = " and ".join(
        f"{share:.3f} on {chip} (from {runs.CALIBRATED_ON[chip].partition(',')[0]})"
        for chip, share in runs.SHARES.items()
    )
    notes = "\n".join(f"- {run.name}: {run.source}. {run.note}".rstrip() for run in runs.RUNS)
    print(f"""# Predicted speed of language models

`scalejax.plan.arithmetic.step_model` against runs that MaxText published (`published_runs` beside it says where each
figure and each setting stands). Fitted is one number a chip, the share of the bfloat16 peak that products reach:
{shares}. Everything else is arithmetic on data sheets. Nothing ran here;
published figures as they stood on 2026-11-21.

`{COMMAND}`

{predictions()}

The published utilisation counts all pairs of attention; the last column counts the half that a causal mask leaves.

## Where the time goes

{parts()}

## Had another run been fitted

{choices()}

## What a search finds

Devices lie as `topology.make_mesh` places them, those of the runs too.

{searched()}

## Sources, and what they leave open

{notes}
- Not modelled: collectives that hide behind products, copies of offloaded activations to the host, buffers and
  layouts of the compiler. The memory column is an estimate before any compilation.""")


if __name__ == "__main__":
    main()
