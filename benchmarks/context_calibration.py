"""pass-KV beside pass-Q over new and cached tokens, and a line fitted to that; zigzag and neighbours; a ring's cost.

    python benchmarks/context_calibration.py --json benchmarks/results/context_calibration.json \\
        --markdown benchmarks/results/context_calibration.md [--turns 5] [--note "what else ran"]

Four virtual devices of one CPU. They share its cores and its memory, so that a transfer is a copy and devices wait for
each other's work: crossovers here say that the calibration works, and nothing about chips. Times are wall seconds, the
least of several turns in which what is compared alternates, compilation left out.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax starts
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("PJRT_NPROC", "64")  # threads that may wait in exchanges

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.bench import machine
from scalejax.kernels.flash_attention import flash_attention
from scalejax.parallel.context import merge
from scalejax.parallel.context_choice import (
    CalibratedChoice,
    ContextCosts,
    FittedChoice,
    Measurement,
    by_message,
    calibrate,
)
from scalejax.parallel.context_inference import (
    NO_KEY,
    NO_QUERY,
    sharded_pass_kv,
    sharded_pass_q,
    zigzag_devices,
)
from scalejax.parallel.mesh import MeshShape, make_mesh

RANKS, HEADS, KV_HEADS, WIDTH = 4, 8, 1, 64
NEW = (8, 32, 128, 512, 2_048)
CACHED = (0, 512, 2_048, 8_192)
PROMPT = 4_096
"""Tokens of a full prefill, for placements and the emulated ring."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Results:
    """What is written.

    Attributes:
      measurements: Of the grid.
      calibration: Fitted to them.
      zigzag_s: Seconds of a full prefill by pass-KV, tokens in a zigzag.
      neighbours_s: The same, neighbours on one device.
      whole_s: Seconds of one call of attention on one device.
      ring_s: The same in four parts of the keys, merged.
    """

    measurements: list[Measurement]
    calibration: CalibratedChoice
    zigzag_s: float
    neighbours_s: float
    whole_s: float
    ring_s: float


def seconds(runs: Sequence[Callable[[], Any]], turns: int) -> list[float]:
    """The least seconds of each, in alternating turns."""
    for run in runs:
        jax.block_until_ready(run())
    least = [float("inf")] * len(runs)
    for _ in range(turns):
        for number, run in enumerate(runs):
            start = time.perf_counter()
            jax.block_until_ready(run())
            least[number] = min(least[number], time.perf_counter() - start)
    return least


def arguments(devices: np.ndarray, cached: int) -> dict[str, jax.Array]:
    """Arrays of one row on the mesh in force: new token i and its key on `devices[i]`, cached ones spread evenly."""
    new = devices.size
    of_key = np.concatenate([np.arange(cached) % RANKS, devices])

    def put(of_token: np.ndarray, values: np.ndarray, empty: int) -> np.ndarray:
        room = np.bincount(of_token, minlength=RANKS).max()
        rows = np.full((RANKS, room), empty, np.int32)
        for rank in range(RANKS):
            mine = values[of_token == rank]
            rows[rank, : mine.size] = mine
        return rows.reshape(1, -1)

    positions = {
        "query_positions": put(devices, cached + np.arange(new), NO_QUERY),
        "key_positions": put(of_key, np.arange(cached + new), NO_KEY),
    }
    rng = np.random.default_rng(0)
    shapes = {"q": (positions["query_positions"], HEADS), "k": (positions["key_positions"], KV_HEADS)}
    shapes["v"] = shapes["k"]
    arrays = {n: rng.normal(size=(1, p.size, heads, WIDTH)).astype(np.float32) for n, (p, heads) in shapes.items()}
    sharding = NamedSharding(jax.sharding.get_mesh(), P(None, "context"))
    return {name: jax.device_put(x, sharding) for name, x in (arrays | positions).items()}


def zigzag(new: int) -> np.ndarray:
    """The device of each new token."""
    return zigzag_devices([new // RANKS + (rank < new % RANKS) for rank in range(RANKS)])


def measure(new: Sequence[int], cached: Sequence[int], prompt: int, turns: int) -> Results:
    """Runs everything."""
    mesh = make_mesh(MeshShape(fsdp=1, context=RANKS), jax.devices()[:RANKS])
    found = []
    with jax.set_mesh(mesh):
        pass_kv, pass_q = jax.jit(sharded_pass_kv), jax.jit(sharded_pass_q)
        for t in new:
            for p in cached:
                given = arguments(zigzag(t), p)
                kv_s, q_s = seconds([functools.partial(run, **given) for run in (pass_kv, pass_q)], turns)
                found.append(Measurement(new=t, cached=p, pass_kv_s=kv_s, pass_q_s=q_s))
        placed = [arguments(zigzag(prompt), 0), arguments(np.arange(prompt) * RANKS // prompt, 0)]
        zigzag_s, neighbours_s = seconds([functools.partial(pass_kv, **given) for given in placed], turns)
    whole_s, ring_s = emulated(prompt, turns)
    return Results(
        measurements=found,
        calibration=calibrate(found),
        zigzag_s=zigzag_s,
        neighbours_s=neighbours_s,
        whole_s=whole_s,
        ring_s=ring_s,
    )


def emulated(prompt: int, turns: int) -> tuple[float, float]:
    """Seconds of attention on one device: keys at once, and in as many parts as a ring has devices."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, prompt, h, WIDTH)), jnp.float32) for h in (HEADS, KV_HEADS, KV_HEADS))
    positions = jnp.arange(prompt, dtype=jnp.int32)[None]

    def parts(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        attend = functools.partial(flash_attention, q, query_positions=positions)
        pieces = zip(*(jnp.split(x, RANKS, axis=1) for x in (k, v, positions)), strict=True)
        return functools.reduce(merge, [attend(k, v, key_positions=places) for k, v, places in pieces])[0]

    runs = [jax.jit(lambda q, k, v: flash_attention(q, k, v)[0]), jax.jit(parts)]
    np.testing.assert_allclose(runs[0](q, k, v), runs[1](q, k, v), atol=1e-5)
    whole_s, ring_s = seconds([functools.partial(run, q, k, v) for run in runs], turns)
    return whole_s, ring_s


def to_json(results: Results, note: str) -> str:
    """Everything, with device, date and commit."""
    about = {"device": machine.device_name(jax.devices()[0]), "date": machine.today(), "commit": machine.commit()}
    found = dataclasses.asdict(results)
    choice = found["calibration"]["choice"]
    if choice["pass_kv_from"] == math.inf:  # JSON has no word for it
        choice["pass_kv_from"] = None
    return json.dumps(about | {"note": note} | found, indent=1, allow_nan=False) + "\n"


def markdown(results: Results, note: str) -> str:
    """A table of the grid and what follows from it."""
    fit, choice = results.calibration, results.calibration.choice
    lines = [
        "# pass-KV and pass-Q on virtual devices of a CPU",
        "",
        "`python benchmarks/context_calibration.py --json benchmarks/results/context_calibration.json "
        "--markdown benchmarks/results/context_calibration.md`",
        "",
        f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}; {note}.",
        "",
        f"{RANKS} virtual devices, 1 row, {HEADS} heads of queries, {KV_HEADS} of keys, head_dim {WIDTH}, float32; "
        "milliseconds, the least of several",
        "alternating turns. Devices share the cores and the memory of one CPU: a transfer is a copy that nothing "
        "hides, and the crossover is",
        "this machine's. No GPU or TPU was at hand.",
        "",
        "| new T | cached P | miss rate | pass-KV | pass-Q | pass-Q / pass-KV | faster | fitted choice |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {"pass_kv": "pass-KV", "pass_q": "pass-Q"}
    for m in results.measurements:
        cells = (
            f"{m.new:,}",
            f"{m.cached:,}",
            f"{m.miss_rate:.2%}",
            f"{m.pass_kv_s * 1e3:.2f}",
            f"{m.pass_q_s * 1e3:.2f}",
            f"{m.pass_q_s / m.pass_kv_s:.2f}",
            names[m.faster],
            names[choice.choose(m.new, m.cached)],
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Fitted: h = {choice.log_new:.3f} ln T {choice.log_miss_rate:+.3f} ln m {choice.constant:+.3f}, pass-KV where "
        f"h > 0{_guard(choice)}: right in {fit.right} of",
        f"{fit.measured} rows ({1 - fit.right / fit.measured:.0%} missed), its choices {fit.lost:.1%} slower than the "
        f"faster ones. {_crossover(results)}",
        "By bytes alone (Algorithm 1, its T* left out) "
        f"{_by_bytes(results)} of {fit.measured} rows are right.",
        "",
        "| what | seconds | over |",
        "|---|---|---|",
        f"| full prefill of {PROMPT:,} by pass-KV, tokens in a zigzag | {results.zigzag_s:.3f} | |",
        f"| the same, neighbours on one device | {results.neighbours_s:.3f} | "
        f"{results.neighbours_s / results.zigzag_s:.2f} of the zigzag |",
        f"| attention of {PROMPT:,} in one call, one device | {results.whole_s:.3f} | |",
        f"| the same in {RANKS} parts of the keys, merged | {results.ring_s:.3f} | "
        f"{results.ring_s / results.whole_s:.2f} of one call |",
        "",
        f"Counted, neighbours are {(2 * RANKS - 1) / RANKS:.2f} times the work of the busiest device; two cores that "
        f"{RANKS} devices share show less of it.",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def _guard(choice: FittedChoice) -> str:
    if choice.pass_kv_from == math.inf:
        return " (no T from which on pass-KV was never slower)"
    return f" or T >= {choice.pass_kv_from:,.0f}"


def _crossover(results: Results) -> str:
    """The miss rates between which the faster method changes, for each T that has both."""
    found = []
    for new in sorted({m.new for m in results.measurements}):
        rows = [m for m in results.measurements if m.new == new]
        rates: dict[str, list[float]] = {"pass_kv": [], "pass_q": []}
        for m in rows:
            rates[m.faster].append(m.miss_rate)
        if rates["pass_kv"] and rates["pass_q"] and min(rates["pass_kv"]) > max(rates["pass_q"]):
            found.append(f"T = {new:,}: {max(rates['pass_q']):.1%} to {min(rates['pass_kv']):.1%}")
    return f"Crossover between miss rates: {'; '.join(found)}." if found else "No T has one crossover."


def _by_bytes(results: Results) -> int:
    never_hidden = ContextCosts(
        ranks=RANKS, heads=HEADS, kv_heads=KV_HEADS, element_bytes=4, flops_per_s=1e30, bytes_per_s=1
    )
    return sum(by_message(never_hidden, m.new, m.cached) == m.faster for m in results.measurements)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description="Measures pass-KV beside pass-Q.")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--note", default="nothing is known of what else ran", help="a clause about the machine")
    options = parser.parse_args(argv)
    results = measure(NEW, CACHED, PROMPT, options.turns)
    for path, text in (
        (options.json, to_json(results, options.note)),
        (options.markdown, markdown(results, options.note)),
    ):
        if path is not None:
            path.write_text(text)
    print(markdown(results, options.note))


if __name__ == "__main__":
    main()
