"""Many streaming clients on one server over loopback: failures, memory that grows, refusals, compilations.

    python benchmarks/serve_load.py FOLDER                            # 200 clients, two minutes; then a small queue
    python benchmarks/serve_load.py FOLDER --markdown benchmarks/results/serve_load.md --json load.json -- --slots 16

Two servers are started, one after the other, with `scalejax serve FOLDER` and what stands behind `--`. On the first
every client asks again and again for a stream of 4 to 64 tokens, with prompts of one of many lengths and several kinds
of sampling; resident memory is read each second, and what counts is how it grows in the second half. The second has a
queue of --max-queue requests: most are refused with 429, and what was taken must finish.

Exits with 1 if a request failed or was not finished, memory grew by more than 5 % in the second half, a program was
compiled after the warm-up, or the small queue refused nothing.
"""

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import httpx2 as httpx

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scalejax.bench import machine

GROWTH = 0.05
WORDS = ("def", "return", "import", "class", "for", "in", "x", "self", "(", ")", ":", "=")


@contextlib.contextmanager
def server(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address; ends it by SIGTERM, which must give status 0."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}) as child:
        try:
            assert child.stdout is not None
            line = next((line for line in child.stdout if "http://" in line), None)
            if line is None:
                sys.exit(f"{shlex.join(command)} did not serve")
            address = "http://" + line.partition("http://")[2].split("/")[0].split(";")[0].strip()
            yield child, address
            child.send_signal(signal.SIGTERM)
            if (status := child.wait(60)) != 0:
                sys.exit(f"the server ended with status {status}")
        finally:
            if child.poll() is None:
                child.kill()


def resident_bytes(pid: int) -> int:
    """Of a process, on Linux."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


async def metric(session: httpx.AsyncClient, address: str, name: str) -> float:
    """One of /metrics, the sum over its labels."""
    text = (await session.get(f"{address}/metrics")).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"scalejax:{name}{{"))


async def client(
    session: httpx.AsyncClient, address: str, number: int, end: float, longest: int, counts: collections.Counter[str]
) -> list[float]:
    """Asks until `end`, one request after the other; returns the seconds to each first event."""
    ttft: list[float] = []
    rng = random.Random(number)
    while time.monotonic() < end:
        most = rng.randint(4, min(64, longest // 2))
        text = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 20, 60))))
        asked = {
            "prompt": text[: longest - most - 2],  # a token has a character at least
            "max_tokens": most,
            "temperature": rng.choice((0, 0.7, 1)),
            "top_p": rng.choice((1, 0.9)),
            "stop": rng.choice((None, None, ["return"])),
            "stream": True,
        }
        begin, first, last = time.monotonic(), None, ""
        try:
            async with session.stream("POST", f"{address}/v1/completions", json=asked) as response:
                counts["accepted"] += response.status_code == 200
                if response.status_code == 429:
                    counts["refused"] += 1
                    await response.aread()
                    await asyncio.sleep(0.1 * rng.random())
                    continue
                async for line in response.aiter_lines():
                    if line:
                        first, last = first or time.monotonic(), line
                        counts["errors"] += line.startswith('data: {"error"')
        except httpx.HTTPError as error:
            counts[f"failed: {type(error).__name__}"] += 1
            continue
        whole = response.status_code == 200 and last == "data: [DONE]"
        counts["finished" if whole else f"failed: status {response.status_code}"] += 1
        if first is not None:
            ttft.append(first - begin)
    return ttft


async def load(child: subprocess.Popen[str], address: str, clients: int, seconds: float) -> dict[str, object]:
    """Runs all clients; returns what was counted."""
    counts: collections.Counter[str] = collections.Counter()
    memory: list[int] = []
    limits = httpx.Limits(max_connections=clients + 2, max_keepalive_connections=clients + 2)
    async with httpx.AsyncClient(limits=limits, timeout=120, trust_env=False) as session:
        longest = (await session.get(f"{address}/v1/models")).json()["data"][0]["max_model_len"]
        end = time.monotonic() + seconds
        begin_tokens = await metric(session, address, "generation_tokens_total")
        running = asyncio.gather(*(client(session, address, n, end, longest, counts) for n in range(clients)))
        while time.monotonic() < end:
            memory.append(resident_bytes(child.pid))
            await asyncio.sleep(1)
        ttft = sorted(itertools.chain(*await running))
        compiled = await metric(session, address, "compilations_total")
        ended = await metric(session, address, "request_success_total")
        tokens = await metric(session, address, "generation_tokens_total") - begin_tokens
    half = memory[len(memory) // 2 :]
    return {
        "clients": clients,
        "seconds": seconds,
        "accepted": counts.pop("accepted", 0),
        "finished": counts.pop("finished", 0),
        "ended_by_the_server": int(ended),
        "refused": counts.pop("refused", 0),
        "failures": dict(+counts),
        "tokens_per_s": tokens / seconds,
        "first_event_p50_s": ttft[len(ttft) // 2] if ttft else None,
        "first_event_p99_s": ttft[len(ttft) * 99 // 100] if ttft else None,
        "rss_begin_mib": memory[0] / 2**20,
        "rss_half_mib": half[0] / 2**20,
        "rss_end_mib": half[-1] / 2**20,
        "rss_growth_second_half": half[-1] / half[0] - 1,
        "compilations": compiled,
    }


def main() -> None:
    """Measures both servers and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what is served")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--max-queue", type=int, default=8, help="of the second server")
    parser.add_argument("--overload-seconds", type=float, default=20)
    parser.add_argument("--server", default=f"{sys.executable} -m scalejax serve", metavar="COMMAND")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--markdown", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--note", default="", help="a clause about the model or the machine")
    given = sys.argv[1:]
    cut = given.index("--") if "--" in given else len(given)
    arguments, more = parser.parse_args(given[:cut]), given[cut + 1 :]
    base = [*shlex.split(arguments.server), arguments.folder, "--port", "0", *more]
    found = {}
    for name, queue, seconds in (
        ("load", arguments.clients * 2, arguments.seconds),
        ("small queue", arguments.max_queue, arguments.overload_seconds),
    ):
        with server([*base, "--max-queue", str(queue)]) as (child, address):
            found[name] = asyncio.run(load(child, address, arguments.clients, seconds))
    lines = [
        "# serve_load",
        "",
        f"{arguments.clients} streaming clients on one `scalejax serve` for {arguments.seconds:g} s, on the same",
        f"machine, then as many on one whose queue has {arguments.max_queue} places. Each asks again as soon as it has",
        "an answer, or within a tenth of a second after a refusal (429).",
        "",
        f"`python benchmarks/serve_load.py {shlex.join(['FOLDER', *given[1:]])}`",
        "",
        f"{machine.device_name(None)}, {machine.today()}, commit {machine.commit()}"
        + (f"; {arguments.note}." if arguments.note else "."),
        "",
        f"| | {' | '.join(found)} |",
        f"|---|{'---|' * len(found)}",
    ]
    for row in found["load"]:
        cells = [value[row] for value in found.values()]
        lines.append(f"| {row} | {' | '.join(f'{c:.4g}' if isinstance(c, float) else str(c) for c in cells)} |")
    print("\n".join(lines))
    if arguments.markdown is not None:
        arguments.markdown.write_text("\n".join([*lines, ""]))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    wrong = [name for name, each in found.items() if each["failures"] or each["compilations"]]
    wrong += [
        f"{name}: not all finished"
        for name, each in found.items()
        if not each["accepted"] == each["finished"] == each["ended_by_the_server"]
    ]
    wrong += ["memory grows"] if found["load"]["rss_growth_second_half"] > GROWTH else []
    wrong += ["nothing was refused"] if not found["small queue"]["refused"] else []
    wrong += ["the large queue refused"] if found["load"]["refused"] else []
    if wrong:
        sys.exit("wrong: " + ", ".join(wrong))


if __name__ == "__main__":
    main()
