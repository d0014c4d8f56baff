"""Processes on hosts of their own with slow links between them: network namespaces of Linux, on one machine.

    python benchmarks/slow_links.py HOSTS MBIT PROGRAM ...       # what `run` starts; `--host N` is put behind PROGRAM

Each host is a process in a namespace of its own. Namespaces are joined by veth through a bridge in one more namespace,
and `tc tbf` limits what each sends and receives; the machine's own network is left as it is. Namespaces and processes
end with the process that made them, by the kernel, however it ends. That takes Linux, iproute2, util-linux, and root
or a kernel that gives users namespaces.

Host 0 prints progress and, last, a line of JSON. With the line `FREE` it asks for links without limits, and reads a
line once they are.
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

FREE, TIMEOUT_S = "without limits", 600

Runs = dict[str, Callable[[], object]]


# On the machine


def namespaces() -> list[str]:
    """The command that runs another with a network and processes of its own, which end with it."""
    user = [] if os.getuid() == 0 else ["--map-root-user"]
    return ["unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def not_permitted() -> str | None:
    """Why namespaces with limited links cannot be made here, or None."""
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    trial = "ip link add bridge0 type bridge && ip link add port0 type veth peer name port1 && "
    trial += "tc qdisc add dev port0 root tbf rate 1mbit burst 16000 limit 16000"
    done = subprocess.run([*namespaces(), "sh", "-c", trial], capture_output=True, text=True, timeout=30, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["unshare failed"])[-1]


def run(hosts: int, mbit: float, program: Sequence[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """What host 0 found, in namespaces that are gone when this returns.

    Args:
      hosts: Processes.
      mbit: Megabits a second that a host may send, and receive.
      program: Of each host; `--host N` is put behind.
      variables: Of its environment, beside this one's.
    """
    command = [*namespaces(), sys.executable, __file__, str(hosts), f"{mbit:g}", *program]
    pipe, environment = subprocess.PIPE, {**os.environ, **variables}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as process:
        try:
            lines = [line.decode().strip() for line in _pipe(process.stdout)]
        finally:
            process.kill()  # and with it all that it has started
    if not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"slow_links: {hosts} hosts at {mbit:g} Mb/s gave no results, see above.")
    return json.loads(lines[-1])


# In the namespace of the bridge, as its process 1


def switch(hosts: int, mbit: float, program: Sequence[str]) -> None:
    """Makes the links, runs a process on each host, and ends with them."""
    signal.signal(signal.SIGALRM, lambda *_: _end("ran too long"))
    signal.alarm(TIMEOUT_S)
    threading.Thread(target=lambda: (sys.stdin.read(), _end("was left alone")), daemon=True).start()
    for line in ("ip link set lo up", "ip link add bridge0 type bridge", "ip link set bridge0 up"):
        command(line)
    workers: list[subprocess.Popen[bytes]] = []
    errors: list[IO[bytes]] = []
    for host in range(hosts):
        errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - until the process ends
        worker = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", 'echo; read go; exec "$@"', "sh", *program, "--host", str(host)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors[-1],
        )
        workers.append(worker)
        _pipe(worker.stdout).readline()  # it has its namespace
        link(host, worker.pid, mbit)
    for worker in workers:
        _go(worker)
    for line in _pipe(workers[0].stdout):
        if line.decode().strip() == FREE:
            for host, worker in enumerate(workers):
                command(f"tc qdisc del dev port{host} root")
                command(f"nsenter -t {worker.pid} -n tc qdisc del dev eth0 root")
            _go(workers[0])
        else:
            print(line.decode(), end="", flush=True)
    for host, (worker, said) in enumerate(zip(workers, errors, strict=True)):
        if worker.wait():
            said.seek(0)
            _end(f"host {host}: exit {worker.returncode}\n{said.read().decode(errors='replace')[-4000:]}")


def link(host: int, pid: int, mbit: float) -> None:
    """A pair of interfaces, one in the namespace of a process, both limited in what they send."""
    there = f"nsenter -t {pid} -n "
    # A packet of TCP's has up to 64 kB before it is cut for the wire; below that the bucket cuts it, which takes long.
    limit = f"root tbf rate {mbit}mbit burst {max(16_000, int(140 * mbit))} limit 16mb"
    for line in (
        f"ip link add port{host} type veth peer name eth0 netns {pid}",
        f"ip link set port{host} master bridge0 up",
        f"tc qdisc add dev port{host} {limit}",
        f"{there}ip link set lo up",
        f"{there}ip addr add {address(host)}/24 dev eth0",
        f"{there}ip link set eth0 up",
        f"{there}tc qdisc add dev eth0 {limit}",
    ):
        command(line)


def _go(worker: "subprocess.Popen[bytes]") -> None:
    go = _pipe(worker.stdin)
    go.write(b"\n")
    go.flush()


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def command(line: str) -> None:
    subprocess.run(line.split(), check=True)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _end(why: str) -> None:
    print(f"slow_links: {why}", file=sys.stderr, flush=True)
    os._exit(1)


# On a host


def join(host: int) -> IO[str]:
    """Makes a host of this process; what is written to what this returns is what host 0 says."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Gloo writes a remark on standard output for every connection
    socket.sethostname(address(host))  # Gloo binds what the name resolves to
    # The same on every machine, and no step starts slowly because nothing was sent before.
    for name, value in (("congestion_control", "reno"), ("slow_start_after_idle", "0")):
        pathlib.Path(f"/proc/sys/net/ipv4/tcp_{name}").write_text(value)
    return out


def free(out: IO[str]) -> None:
    """On host 0, while the others wait for it: takes the limits away."""
    print(FREE, file=out)
    sys.stdin.readline()


def timed(runs: Runs, turns: int, gather: Callable[[object], Sequence[Any]]) -> dict[str, Any]:
    """Seconds of each, of the slowest host: medians over turns, and "turns".

    Args:
      runs: The same on all hosts.
      turns: After two that are not timed.
      gather: Of all hosts, for objects that JSON has.
    """
    every = gather(in_turns(runs, turns))
    slowest = {name: [max(each) for each in zip(*(one[name] for one in every), strict=True)] for name in runs}
    return {"seconds": {name: statistics.median(each) for name, each in slowest.items()}, "turns": slowest}


def in_turns(runs: Runs, turns: int) -> dict[str, list[float]]:
    """Seconds of each, turn by turn, after two that are not timed."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                found[name].append(time.perf_counter() - start)
    return found


def sent_by(run: Callable[[], object], gather: Callable[[object], object], times: int = 5) -> int:
    """Bytes that leave this host in a run, with headers and acknowledgements, by the count of its interface."""

    def count() -> int:
        lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
        return int(next(line for line in lines if "eth0:" in line).partition(":")[2].split()[8])

    gather(0)  # what was sent before has arrived
    before = count()
    for _ in range(times):
        run()
    gather(0)
    return round((count() - before) / times)


@contextlib.contextmanager
def priority(nice: int | None) -> Iterator[None]:
    """Sets that of the session's scheduling group, and sets it back; None = leaves it."""
    if nice is None:
        yield
        return
    file = pathlib.Path("/proc/self/autogroup")
    before = file.read_text().split()[-1]
    file.write_text(str(nice))
    try:
        yield
    finally:
        file.write_text(before)


if __name__ == "__main__":
    switch(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
