"""A plan as tables on a terminal."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from scalejax.parallel import links
from scalejax.parallel.mesh import mesh_text
from scalejax.plan.arithmetic.mesh_search import Candidate, SearchResult
from scalejax.plan.arithmetic.tower_steps import LOCAL_BATCH
from scalejax.plan.gpu_steps import LEAST_S, GpuPlan
from scalejax.plan.run import PlanResult
from scalejax.plan.serving import ServingPlan, ServingTime
from scalejax.units import duration, size

if TYPE_CHECKING:
    from rich.console import Console

_BAR = 30
_MOST = 8
_TERMS = {"compute": "matrix products", "hbm": "memory", "ici": "links between chips", "dcn": "network between slices"}


def render(result: PlanResult | SearchResult | ServingPlan | GpuPlan, console: "Console") -> None:
    """Prints a plan or a search as tables."""
    if isinstance(result, SearchResult):
        _render_search(result, console)
    elif isinstance(result, ServingPlan):
        _render_serving(result, console)
    elif isinstance(result, GpuPlan):
        _render_gpus(result, console)
    else:
        _render_plan(result, console)


def _render_plan(result: PlanResult, console: "Console") -> None:
    """Prints what fits, what moves, and what a step waits for."""
    machine, room = result.topology, result.memory
    mesh = ", ".join(f"{axis}={size}" for axis, size in result.mesh.items()) or "one device"
    console.print(f"[bold]{machine.name}[/bold]: {machine.chips} chips, {machine.devices} devices, mesh {mesh}")
    for warning in result.warnings:
        console.print(f"[yellow]Warning:[/yellow] {escape(warning)}")
    console.print(_memory("Memory of a chip", room.bytes_per_chip, room.hbm_bytes))
    console.print(f"{_verdict(room.fits)}: {size(room.total_bytes)} of {size(room.hbm_bytes)} a chip")
    if room.message:
        console.print(f"The compiler: {room.message}", markup=False)
    if result.roofline is not None:
        console.print(_collectives(result))
        console.print(links.described("the step", {"": result.sent}))
        console.print(_roofline(result))
        console.print(
            f"predicted step: at least {duration(result.roofline.predicted_step_s)}, limited by "
            f"{_TERMS[result.roofline.limit]}; at most {100 * (result.mfu or 0):.3g} % of peak FLOP/s "
            f"({result.model_flops:.4g} model FLOPs a step)"
        )
    if result.unsharded:
        console.print(_unsharded(result))
    console.print(f"compiled in {result.compile_s:.1f} s")


def _render_search(result: SearchResult, console: "Console") -> None:
    """Prints what was compiled, what arithmetic ranks behind it, and what was dropped."""
    machine = result.topology
    console.print(f"[bold]{machine.name}[/bold]: {machine.chips} chips; products at {result.share:.3g} of their peak")
    if result.ranked:
        console.print(_ranked(result))
    if result.others:
        console.print(_others(result.others[:_MOST]))
        if len(result.others) > _MOST:
            console.print(f"... and {len(result.others) - _MOST} more by arithmetic alone (--json has them)")
    if result.dropped:
        console.print(_dropped(result))
    for candidate in result.ranked:
        for warning in candidate.compiled.warnings if candidate.compiled else ():
            console.print(f"[yellow]Warning:[/yellow] {escape(_stated(candidate))}: {escape(warning)}")


def _stated(candidate: Candidate) -> str:
    return f"{mesh_text(candidate.mesh)}, remat {candidate.remat}"


def _ranked(result: SearchResult) -> Table:
    table = Table(title="Compiled, best first", title_justify="left")
    for name in ("mesh, rematerialisation", "memory", "products", "memory s", "links", "step", "MFU", "by arithmetic"):
        table.add_column(name, justify="left" if name.startswith("mesh") else "right")
    for c in result.ranked:
        assert c.compiled is not None
        line, room = c.compiled.roofline, c.compiled.memory
        need = f"{size(room.total_bytes)}{'' if room.fits else ' (does not fit)'}"
        terms = ["", "", ""] if line is None else [duration(line.compute_s), duration(line.hbm_s), duration(line.ici_s)]
        step, mfu = "", ""
        if c.step_s is not None:
            peak = result.topology.chips * result.topology.chip.bf16_flops_per_s
            step, mfu = duration(c.step_s), f"{100 * c.compiled.model_flops / (c.step_s * peak):.1f} %"
        table.add_row(_stated(c), need, *terms, step, mfu, duration(c.estimate.step_s))
    return table


def _others(others: Sequence[Candidate]) -> Table:
    table = Table(title="Not compiled, by arithmetic", title_justify="left")
    for name in ("mesh, rematerialisation", "memory", "step", "MFU"):
        table.add_column(name, justify="left" if name.startswith("mesh") else "right")
    for c in others:
        e = c.estimate
        table.add_row(_stated(c), size(e.memory_bytes), duration(e.step_s), f"{100 * e.mfu('causal'):.1f} %")
    return table


def _dropped(result: SearchResult) -> Table:
    table = Table(title=f"Dropped by arithmetic: {len(result.dropped)}", title_justify="left")
    for name in ("mesh", "rematerialisation", "why"):
        table.add_column(name)
    for d in result.dropped[:_MOST]:
        table.add_row(mesh_text(d.mesh), d.remat, escape(d.reason))
    if len(result.dropped) > _MOST:
        table.add_row("...", "", f"{len(result.dropped) - _MOST} more (--json has them)")
    return table


def _render_serving(result: ServingPlan, console: "Console") -> None:
    """Prints what a served model needs, how much more would fit, and the least times."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in result.mesh.items()) or "one device"
    console.print(f"[bold]{result.machine}[/bold]: mesh {mesh}; {result.parameters:,} parameters")
    for warning in result.warnings:
        console.print(f"[yellow]Warning:[/yellow] {escape(warning)}")
    console.print(_memory("Memory of a device", result.memory, result.usable_bytes))
    sequences = f"{result.slots:,} of {result.context:,} tokens"
    console.print(
        f"{_verdict(result.fits)}: {size(result.total_bytes)} of {size(result.usable_bytes)} a device, with {sequences}"
    )
    console.print(
        f"keys and values of a token: {result.kv_bytes_a_token:,} bytes, of which a device has "
        f"{result.kv_bytes_on_device:,.6g}"
    )
    console.print(
        f"at most {result.greatest_context:,} tokens in one sequence alone, or {result.greatest_slots:,} sequences of "
        f"{result.context:,}"
    )
    console.print(_serving_times(result))
    console.print(
        f"a prompt of {result.context:,} tokens: at least {duration(result.prefill.seconds)}, "
        f"{result.context / result.prefill.seconds:,.0f} tokens a second"
    )
    console.print(
        f"a token of each of {sequences}: at least {duration(result.decode.seconds)}, "
        f"{result.tokens_per_s:,.0f} tokens a second"
    )
    if result.hidden_from is not None:
        console.print(
            f"pieces of {result.piece:,} tokens, {100 * result.prefill.pass_q:.3g} % of them by pass-Q; pass-KV hides "
            f"its transfers from {result.hidden_from:,.0f} new tokens on (equation 2)"
        )


def _serving_times(result: ServingPlan) -> Table:
    table = Table(title="Least time", title_justify="left")
    table.add_column("resource")
    for name in ("a prompt", "a token"):
        table.add_column(name, justify="right")
    named = {
        "matrix products": "product_s",
        "attention": "attention_s",
        "memory": "hbm_s",
        "sums over tensor": "tensor_s",
        "transfers over context": "context_s",
        "... of which nothing hides": "exposed_s",
    }

    def shown(time: ServingTime, field: str) -> str:
        return duration(value) if (value := getattr(time, field)) else "0"

    for name, field in named.items():
        table.add_row(name, shown(result.prefill, field), shown(result.decode, field))
    return table


def _render_gpus(result: GpuPlan, console: "Console") -> None:
    """Prints steps by strategy of the dense part and by route of the tables."""
    work, towers = result.work, result.work.towers
    console.print(
        f"[bold]{result.machine}[/bold]: {result.examples:,} examples a GPU; {work.parameters:,} dense parameters, "
        f"{work.flops / 1e6:.4g} MFLOP an example forward, pooled vectors of {work.width:,} numbers"
    )
    if towers is not None:
        console.print(
            f"over {towers.count} towers {towers.flops / 1e6:.4g} MFLOP, and {towers.compression:.3g} times fewer "
            "numbers between them"
        )
    dense = Table(title="Dense part, tables left out", title_justify="left")
    dense.add_column("strategy")
    for name in ("a step", "exposed communication", "state of a GPU", ""):
        dense.add_column(name, justify="right")
    for kind, found in result.dense.items():
        memory = size(int(found.memory_bytes))
        dense.add_row(kind, duration(found.step_s), duration(found.exposed_s), memory, _verdict(found.fits))
    routes = Table(title="Step by route of the tables, gradients of the dense part hidden", title_justify="left")
    for name in ("route", "a step", "flat / this"):
        routes.add_column(name, justify="left" if name == "route" else "right")
    steps = result.steps_by_route()
    for route, seconds in steps.items():
        routes.add_row(route, duration(seconds), f"{steps['flat'] / seconds:.2f}")
    console.print(dense, routes)
    if min(steps.values()) < LEAST_S:
        console.print(
            f"[yellow]Warning:[/yellow] steps under {duration(LEAST_S)} are longer than this: how long launches and "
            f"collectives take at least is not in it. Published ones have {LOCAL_BATCH:,} examples a GPU: raise "
            "data.batch_size."
        )
    console.print(
        "by arithmetic from published figures of hosts of 8 GPUs, with parameters and gradients in 16 bits on their "
        "way and 16 bytes of state a parameter; docs/systems.md says how far it is from published steps"
    )


def _verdict(fits: bool) -> str:
    return "[green]fits[/green]" if fits else "[red]does not fit[/red]"


def _memory(title: str, kinds: Mapping[str, int], total: int) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    table.add_column("share of HBM")
    for kind, count in kinds.items():
        share = count / total
        filled = min(_BAR, round(share * _BAR))
        table.add_row(kind, size(count), f"{'█' * filled}{'·' * (_BAR - filled)} {100 * share:.2f} %")
    return table


def _collectives(result: PlanResult) -> Table:
    table = Table(title="Collectives of a step, per device", title_justify="left")
    for name in ("kind", "axis", "devices", "count", "bytes", "least to send"):
        table.add_column(name, justify="left" if name in ("kind", "axis") else "right")
    for c in result.collectives:
        table.add_row(c.kind, c.axis, str(c.group_size), str(c.count), size(c.bytes), size(c.minimum_bytes))
    if not result.collectives:
        table.add_row("none", "", "", "", "", "")
    return table


def _roofline(result: PlanResult) -> Table:
    assert result.roofline is not None
    table = Table(title="Least time of a step", title_justify="left")
    table.add_column("resource")
    table.add_column("time", justify="right")
    for term, meaning in _TERMS.items():
        value = getattr(result.roofline, f"{term}_s")
        mark = " <- limit" if term == result.roofline.limit else ""
        table.add_row(meaning, f"{duration(value) if value else '0'}{mark}")
    return table


def _unsharded(result: PlanResult) -> Table:
    table = Table(title="Parameters whole on every device because they do not divide", title_justify="left")
    for name in ("parameter", "shape", "why"):
        table.add_column(name)
    for name, shape, reason in result.unsharded:
        table.add_row(escape(name), "x".join(map(str, shape)), escape(reason))
    return table
