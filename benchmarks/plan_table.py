"""Prints plans of language models side by side, as Markdown for docs/parallelism.md.

    scalejax plan llama-pretrain-8b --topology v6e:16x16 --json 8b.json
    python benchmarks/plan_table.py llama-pretrain-8b=8b.json [RECIPE[,PATH=VALUE...]=FILE ...]

Each column is one plan: what the compiler made of the step, and the arithmetic of
`scalejax.plan.arithmetic.step_model` beside it. Overrides that the plan was made with come after the recipe, with
commas between them.
"""

import json
import pathlib
import sys
from typing import Any

from scalejax import configs
from scalejax.parallel import mesh as meshes
from scalejax.plan import topology
from scalejax.plan.arithmetic import decoders, published_runs, step_model
from scalejax.plan.arithmetic.step_model import StepEstimate
from scalejax.units import duration, size


def arithmetic(recipe: str, sets: list[str], plan: dict[str, Any]) -> StepEstimate:
    """The step model's estimate of the step that was planned."""
    experiment: Any = configs.load(recipe, sets)
    machine = topology.parse(plan["topology"])
    shape = meshes.parse_mesh(",".join(f"{axis}={n}" for axis, n in plan["mesh"].items()) or "fsdp=1")
    training = decoders.training_of(experiment, shape, machine.devices, compute_dtype="bfloat16")
    share = published_runs.SHARES.get(machine.chip.name, 1.0)
    return step_model.estimate(decoders.decoder_of(experiment), training, machine, share=share)


def column(recipe: str, sets: list[str], plan: dict[str, Any]) -> dict[str, str]:
    """One plan, {row: cell}."""
    found = arithmetic(recipe, sets, plan)
    rows = {
        "plan": f"`{' '.join([recipe, *sets])}`",
        "machine": f"{plan['topology']}, {plan['chips']} chips",
        "mesh": ", ".join(f"{axis} {n}" for axis, n in plan["mesh"].items()),
        "tokens a step": f"{found.training.batch:,} x {found.training.sequence:,}",
    }
    kinds = plan["bytes_per_chip"]
    named = ("parameters", "optimizer state", "temporaries")
    for kind in named:
        rows[f"{kind}, a chip"] = size(kinds.get(kind, 0))
    total = sum(kinds.values())
    verdict = "" if plan["fits"] else ", refused"
    rows["all of it, of the chip"] = f"{size(total)} of {size(plan['hbm_bytes'])}{verdict}"
    rows["by arithmetic"] = size(found.memory_bytes)
    rows["model FLOPs, causal half"] = f"{plan['model_flops']:.3g}"
    rows["FLOPs in the program"] = f"{plan['flops']:.3g}"
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "collective-permute", "all-to-all"):
        of_kind = [c for c in plan["collectives"] if c["kind"] == kind]
        rows[kind] = "; ".join(f"{c['axis']} {c['count']:,}: {size(c['bytes'])}" for c in of_kind) or "-"
    line = plan["roofline"]
    if line is not None:
        terms = ", ".join(f"{name} {duration(line[f'{name}_s'])}" for name in ("compute", "hbm", "ici"))
        rows["least time"] = f"{duration(plan['predicted_step_s'])} ({terms})"
    rows["expected step, arithmetic"] = f"{found.step_s:.3g} s"
    rows["tokens/s/chip"] = f"{found.tokens_per_s_per_chip:,.0f}"
    rows["MFU, causal half (all pairs)"] = f"{100 * found.mfu('causal'):.1f} % ({100 * found.mfu('full'):.1f} %)"
    return rows


def markdown(columns: list[dict[str, str]]) -> str:
    """Columns side by side."""
    head, *names = dict.fromkeys(name for rows in columns for name in rows)
    lines = ["| | " + " | ".join(rows[head] for rows in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(rows.get(name, "-") for rows in columns) + " |" for name in names]
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Prints the table of RECIPE=FILE arguments."""
    columns = []
    for argument in arguments:
        wanted, _, path = argument.rpartition("=")
        recipe, *sets = wanted.split(",")
        columns.append(column(recipe, sets, json.loads(pathlib.Path(path).read_text())))
    print(markdown(columns))


if __name__ == "__main__":
    main(sys.argv[1:])
