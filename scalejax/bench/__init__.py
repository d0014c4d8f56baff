"""`scalejax bench`: how fast a piece of scalejax is, beside the same work in another library, measured in one run.

Each benchmark is a module of `bench.cases` with three names: `CASES`, `PEERS` and `prepare(case, against)`, which
builds a `harness.Contest`. The harness knows contests and nothing else. More names where the defaults do not suit:
`EFFORT`, how long to measure; `ON_CPU`, that it runs on the CPU whatever the accelerator; `TAKES_DATA`, that `prepare`
takes the path of a user's data, or None, as its third argument.
"""

import contextlib
import importlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from scalejax import errors

if TYPE_CHECKING:
    from rich.console import Console

    from scalejax.bench.harness import Effort, Result

_NAMES = (
    "wukong_step",
    "dhen_step",
    "dlrm_step",
    "llama_step",
    "llama_decode",
    "moma_step",
    "gcn_step",
    "vision_step",
    "embedding_update",
    "sptt_exchange",
    "flash_attention",
    "grouped_matmul",
    "mx_quantize",
    "gradient_compressors",
    "spmm",
    "data_pipeline",
    "text_pipeline",
    "recd_data",
    "recd",
    "planner",
)

_CPU_DEVICES = {"sptt_exchange": 8}

_THREADS = 2
"""CPU threads for both sides, so that numbers of different machines can be compared."""


def names() -> tuple[str, ...]:
    """Benchmarks that `run` knows."""
    return _NAMES


def cpu_devices(name: str | None) -> int | None:
    """Virtual CPU devices that a benchmark takes, to be made before jax starts; None = those of the machine."""
    return _CPU_DEVICES.get(name or "")


def run(
    name: str,
    against: str | None = None,
    cases: Sequence[str] | None = None,
    data: pathlib.Path | None = None,
    json_path: pathlib.Path | None = None,
    console: "Console | None" = None,
    effort: "Effort | None" = None,
) -> "list[Result]":
    """Runs a benchmark; checks that outputs are equal before it times them.

    Args:
      name: One of `names()`.
      against: One of the benchmark's `PEERS`; None times scalejax alone.
      cases: Some of its `CASES`; None = all that are for the device at hand, the others are skipped and said.
      data: The user's own data instead of what the benchmark bundles or makes, where the case allows it.
      json_path: File for the results: a JSON array with one object a case, rewritten after every case.
      console: Where progress, the result of each case when it is there, and the table go; None = silent.
      effort: How long to measure; None = what the benchmark asks for, or the default.

    Returns:
      One result a case that was measured.

    Raises:
      UserError: unknown name, case or peer; a library that is not installed; a file that cannot be read or written; a
        case of `cases`, or every case, is for another device.
      OutputsDiffer: ours and the peer do not compute the same.
    """
    benchmark = _benchmark(name)
    chosen = [_one_of(case, benchmark.CASES, f"--case of {name}") for case in cases or benchmark.CASES]
    if against is not None:
        _one_of(against, benchmark.PEERS, f"--against of {name}")
    takes_data = getattr(benchmark, "TAKES_DATA", False)
    if data is not None and not takes_data:
        raise errors.UserError(f"--data: {name} makes its own data; got {data}. Leave --data out.")

    from scalejax.bench import harness, machine, output
    from scalejax.train import disk

    json_path = None if json_path is None else pathlib.Path(json_path)
    if json_path is not None:
        output.check_writable(json_path)
    asked: Effort = effort or getattr(benchmark, "EFFORT", harness.Effort())
    results: list[Result] = []
    with contextlib.ExitStack() as threads:
        threads.enter_context(machine.cpu_threads(_THREADS))
        if not getattr(benchmark, "ON_CPU", False) and not machine.on_cpu():
            threads.close()  # feeding an accelerator may take every core
        for case in chosen:
            try:
                contest = benchmark.prepare(case, against, *([data] if takes_data else []))
            except harness.Unsuited as error:
                if cases or (case == chosen[-1] and not results):
                    raise
                if console is not None:
                    console.print(f"{name} {case}: skipped. {error}", markup=False, highlight=False, soft_wrap=True)
                continue
            try:
                with _progress(console, f"{name} {case}", asked.turns * (1 if against is None else 2)) as advance:
                    ours, peer = harness.measure(contest, asked, progress=advance)
                figures = contest.figures()
            finally:
                contest.close()
            ours_s, peer_s, ratio, spread = harness.summarize(ours, peer)
            result = harness.Result(
                name=name,
                case=case,
                device=contest.device,
                date=machine.today(),
                commit=machine.commit(),
                ours_s=ours_s,
                peer=against,
                peer_s=peer_s,
                ratio=ratio,
                spread=spread,
                examples=contest.examples,
                figures=figures,
            )
            results.append(result)
            if json_path is not None:
                disk.write_atomically(json_path, output.to_json(results))
            if console is not None and len(chosen) > 1:  # what was measured stays on the screen, whatever comes after
                console.print(output.line(result), markup=False, highlight=False, soft_wrap=True)
    if console is not None:
        console.print(output.table(results))
        if any(result.figures for result in results):
            console.print(output.figures_table(results))
    return results


def _benchmark(name: str) -> ModuleType:
    return importlib.import_module(f"scalejax.bench.cases.{_one_of(name, _NAMES, 'benchmark')}")


def _one_of(value: str, allowed: Sequence[str], what: str) -> str:
    if value in allowed:
        return value
    import difflib

    close = difflib.get_close_matches(value, allowed, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    raise errors.UserError(f"{what} must be one of {', '.join(allowed)}; got {value!r}.{hint}")


@contextlib.contextmanager
def _progress(console: "Console | None", what: str, total: int) -> Iterator[Callable[[], None]]:
    if console is None or not console.is_terminal:
        yield lambda: None
        return
    from rich import progress

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn())
    # Drawn at each turn and not by a thread, which would take part in what is timed.
    with progress.Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=total)

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        bar.refresh()
        yield advance
