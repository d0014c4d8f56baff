"""The exchange of tables between hosts with slow links: flat, in two levels, and compressed before it leaves a host.

    python benchmarks/tower_exchange.py --json FILE --markdown FILE [--hosts 2 4] [--mbit 100 1000] [--turns 11]

A host is a process of two devices in a network namespace of its own. Namespaces are joined by veth through a bridge in
one more namespace, and `tc tbf` limits what each sends and receives; the machine's own network is left as it is.
Namespaces and processes end with the process that made them, by the kernel, however it ends. That takes Linux,
iproute2, util-linux, and root or a kernel that gives users namespaces. Elsewhere it says so and prints bytes over rate.

A step is a lookup of one id a table and the update of its rows: ids, vectors and gradients cross once. Compressed, c
neighbours of each vector are added up between the hops: a linear map N to N/c that takes next to no time, as a module
would on a device that is faster than its links. Before anything is timed, flat and two-level steps must give the same
bits, and so must compressed ones and the same map after a flat lookup.

Seconds by section 3.3 of the paper's sheet are bytes over measured rates, for T hosts of L devices of b examples with
vectors of W numbers in all:

    between hosts   L b (T - 1) / T (8 W / c + ids) bytes a host, at the rate of a plain all_to_all over the same axes
    within hosts    b (L - 1) / L (8 W + ids) bytes a device, likewise; the flat exchange has none

That leaves out what a device does itself. So every step is timed once more after the limits are taken away, and
"with its work" is that plus the bytes between hosts at the difference of what a byte takes.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
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
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scalejax.bench import machine

INSIDE = 2
FLAT, FREE, PORT, TIMEOUT_S = "flat", "without limits", 9761, 600
FORMS = {FLAT: 1, "c = 1": 1, "c = 2": 2, "c = 4": 4, "c = 8": 8}
"""By how much vectors are narrower between hosts."""


PAGE = """\
# The exchange of tables over slow links

`{line}`

{device}, {date}, commit {commit}

A host is a process of two devices in a network namespace; `tc tbf` limits what each sends and receives. A step is a
lookup and an update: ids, vectors and gradients cross once. c = 1 gave the bits of the flat one, every c > 1 those of
the same map after a flat lookup. Times are medians over turns, of the slowest host. Formula: bytes between hosts and
within them over the rates of plain all_to_alls of as many bytes as the vectors of c = 1. With its work: the step
without limits, and the bytes between hosts at the difference of what a byte takes.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured in one set of namespaces.

    Attributes:
      hosts: T.
      mbit: Megabits a second that a host may send, and receive.
      turns: Timed steps of each form.
      examples: b, of a device.
      tables: Of 1,000 rows, one id a table in every example.
      dim: Width of a table.
      priority: Of the session's scheduling group while steps are timed (/proc/self/autogroup); None = as it is.
    """

    hosts: int
    mbit: float
    turns: int = 11
    examples: int = 256
    tables: int = 16
    dim: int = 128
    priority: int | None = None

    def ids(self, form: str) -> int:
        """Bytes of the ids of an example: the row of each and, in two levels, its bag."""
        return 4 * self.tables * (1 if form == FLAT else 2)

    def between(self, form: str) -> float:
        """Bytes that leave a host in a step."""
        vectors = 2 * 4 * self.tables * self.dim / FORMS[form]
        return INSIDE * self.examples * (self.hosts - 1) / self.hosts * (vectors + self.ids(form))

    @property
    def within(self) -> float:
        """Bytes that leave a device in a step for others of its host, in two levels."""
        return self.examples * (INSIDE - 1) / INSIDE * (2 * 4 * self.tables * self.dim + self.ids("c = 1"))


# In the namespace of the bridge, as its process 1


def switch(task: Task) -> None:
    """Makes the links, runs a process on each host, and ends with them."""
    signal.signal(signal.SIGALRM, lambda *_: _end("ran too long"))
    signal.alarm(TIMEOUT_S)
    threading.Thread(target=lambda: (sys.stdin.read(), _end("was left alone")), daemon=True).start()
    for line in ("ip link set lo up", "ip link add bridge0 type bridge", "ip link set bridge0 up"):
        command(line)
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(INSIDE), "PJRT_NPROC": str(8 * INSIDE)}
    workers: list[subprocess.Popen[bytes]] = []
    errors: list[IO[bytes]] = []
    for host in range(task.hosts):
        program = [sys.executable, __file__, "--host", str(host), "--task", json.dumps(dataclasses.asdict(task))]
        errors.append(tempfile.TemporaryFile())  # noqa: SIM115 - until the process ends
        worker = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", 'echo; read go; exec "$@"', "sh", *program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors[-1],
            env={**os.environ, **variables},
        )
        workers.append(worker)
        _pipe(worker.stdout).readline()  # it has its namespace
        link(host, worker.pid, task.mbit)
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
    print(f"tower_exchange: {why}", file=sys.stderr, flush=True)
    os._exit(1)


# On a host


def measure(task: Task, host: int) -> None:
    """Joins the others and measures; host 0 prints progress, then the results as a line of JSON."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Gloo writes a remark on standard output for every connection
    socket.sethostname(address(host))  # Gloo binds what the name resolves to
    # The same on every machine, and no step starts slowly because nothing was sent before.
    for name, value in (("congestion_control", "reno"), ("slow_start_after_idle", "0")):
        pathlib.Path(f"/proc/sys/net/ipv4/tcp_{name}").write_text(value)

    from scalejax.train import distributed

    distributed.initialize(f"{address(0)}:{PORT}", task.hosts, host, timeout_s=60)
    runs = prepared(task, host)
    found: dict[str, Any] = {}
    for links in ("limited", "free"):
        if host == 0 and links == "free":
            print(FREE, file=out)
            sys.stdin.readline()
        distributed.gather(links)
        with priority(task.priority if host == 0 else None):
            seconds = in_turns(runs, task.turns)
        every = distributed.gather(seconds)
        slowest = {name: [max(each) for each in zip(*(one[name] for one in every), strict=True)] for name in runs}
        found[links] = {name: statistics.median(each) for name, each in slowest.items()}
        found[f"{links}_turns"] = slowest
        if links == "limited":
            found["sent"] = {name: sent_by(run) for name, run in runs.items() if name in FORMS}
    if host == 0:
        print(json.dumps(found), file=out)


def prepared(task: Task, host: int) -> dict[str, Callable[[], object]]:
    """What is timed, compiled, by name; every form has been seen to compute the same."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from scalejax.bench.cases import sptt_exchange as case
    from scalejax.parallel.embedding.ids.jagged import DeviceJagged
    from scalejax.parallel.embedding.sharded_tables import State
    from scalejax.parallel.towers import Partition
    from scalejax.plan import explain_sharding

    devices = task.hosts * INSIDE
    size = case.Size(tables=task.tables, rows=1000, dim=task.dim, ids=1, batch=task.examples * devices)
    ids = case.random_ids(size, task.examples * INSIDE, seed=host)
    make = functools.partial(case.collection, size, "table_wise", hosts=task.hosts, devices=jax.devices())
    on = {route: make(route=route) for route in ("flat", "two_level")}
    mesh = on["flat"].mesh
    of_host = [[n for i, n in enumerate(size.features) if i % devices // INSIDE == h] for h in range(task.hosts)]
    towers = Partition(towers=tuple(map(tuple, of_host))).on_hosts(task.hosts)

    class Compressed(case.Exchanged):
        """Sums of neighbours, and half their squares as the loss."""

        def __init__(self, route: str, ratio: int) -> None:
            self._ratio = ratio
            super().__init__(on[route], size, ids)

        def _narrow(self, x: jax.Array) -> jax.Array:
            return x.reshape(*x.shape[:-1], -1, self._ratio).sum(-1)

        def _exchange(self, state: State, features: DeviceJagged) -> State:
            routing = self.on.exchange_ids(features)
            if self.on is on["flat"]:
                vectors = self.on.fetch(state, routing)
                grads = jax.grad(lambda x: sum((self._narrow(v) ** 2).sum() / 2 for v in x.values()))(vectors)
                return self.on.update(state, routing, grads)

            def loss(half_way: Any) -> jax.Array:
                x, _ = half_way.by_tower()
                return (half_way.to_examples(self._narrow(x)) ** 2).sum() / 2

            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                grads = jax.grad(loss)(self.on.fetch_half_way(state, routing, towers))
            return self.on.update(state, routing, grads)

    forms = {FLAT: case.Exchanged(on["flat"], size, ids), "c = 1": case.Exchanged(on["two_level"], size, ids)}
    for form in forms.values():
        form.steps(2)
    differ = forms[FLAT].differences(forms["c = 1"])
    assert not differ, f"flat and two_level differ in their bits: {differ}"
    forms |= {name: Compressed("two_level", ratio) for name, ratio in FORMS.items() if ratio > 1}
    for name, ratio in FORMS.items():
        if ratio > 1:
            one, two = forms[name], Compressed("flat", ratio)
            for form in (one, two):
                form.steps(2)
            differ = one.differences(two)
            assert not differ, f"{name}: between the hops and after a flat lookup differ in their bits: {differ}"
    for name, form in forms.items():
        axes = ("replica", "fsdp") if name == FLAT else ("replica",)
        compiled = sum(c.bytes for c in explain_sharding(form.compiled, mesh) if c.axes == axes)
        sent = compiled * INSIDE * (task.hosts - 1) / task.hosts
        assert sent == task.between(name), (name, sent, task.between(name))

    def plain(axes: tuple[str, ...], bytes_of_device: int) -> Callable[[], object]:
        blocks = functools.reduce(lambda n, axis: n * mesh.shape[axis], axes, 1)
        everywhere = P(mesh.axis_names)
        shape = (devices, blocks, bytes_of_device // 4 // blocks)
        x = jax.make_array_from_callback(
            shape, NamedSharding(mesh, everywhere), lambda _: np.zeros((1, *shape[1:]), np.float32)
        )
        send = jax.jit(
            jax.shard_map(
                lambda x: jax.lax.all_to_all(x, axes, 1, 1, tiled=True),
                mesh=mesh,
                in_specs=everywhere,
                out_specs=everywhere,
                check_vma=False,
            )
        )
        return lambda: jax.block_until_ready(send(x))

    whole = 4 * task.examples * task.tables * task.dim
    return {
        "all": plain(("replica", "fsdp"), whole),
        "between": plain(("replica",), whole),
        "within": plain(("fsdp",), whole),
        **{name: functools.partial(form.steps, 1) for name, form in forms.items()},
    }


def in_turns(runs: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each, turn by turn, after two that are not timed."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn >= 2:
                found[name].append(time.perf_counter() - start)
    return found


def sent_by(run: Callable[[], object]) -> int:
    """Bytes that leave this host in a run, with headers and acknowledgements, by the count of its interface."""

    def count() -> int:
        lines = pathlib.Path("/proc/self/net/dev").read_text().splitlines()
        return int(next(line for line in lines if "eth0:" in line).partition(":")[2].split()[8])

    from scalejax.train import distributed

    distributed.gather(0)  # what was sent before has arrived
    before = count()
    for _ in range(5):
        run()
    distributed.gather(0)
    return round((count() - before) / 5)


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


def run(task: Task) -> dict[str, Any]:
    """Measures in namespaces that are gone when it returns."""
    program = [sys.executable, __file__, "--switch", "--task", json.dumps(dataclasses.asdict(task))]
    with subprocess.Popen([*namespaces(), *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            lines = [line.decode().strip() for line in _pipe(process.stdout)]
        finally:
            process.kill()  # and with it all that it has started
    if not lines or not lines[-1].startswith("{"):
        raise SystemExit(f"tower_exchange: {task.hosts} hosts at {task.mbit:g} Mb/s gave no results, see above.")
    return {**dataclasses.asdict(task), **json.loads(lines[-1])}


@dataclasses.dataclass(frozen=True)
class Row:
    """A form of the exchange.

    Attributes:
      name: Of `FORMS`.
      sent: Bytes that leave a host, of ids, vectors and gradients.
      on_wire: The same as its interface counts them.
      seconds: Of a step, median.
      formula: By measured rates.
      with_work: By the time without limits and the bytes between hosts.
      over_flat: Time of the flat exchange over this.
    """

    name: str
    sent: float
    on_wire: int
    seconds: float
    formula: float
    with_work: float
    over_flat: float


def rows(found: dict[str, Any]) -> list[Row]:
    """A row for each form, of what `run` returned."""
    task = Task(**{field.name: found[field.name] for field in dataclasses.fields(Task)})
    seconds, rate, free = found["limited"], rates(found, "limited"), rates(found, "free")
    forms = []
    for name in FORMS:
        axes, sent = "all" if name == FLAT else "between", task.between(name)
        formula = sent / rate[axes] + (0 if name == FLAT else task.within / rate["within"])
        with_work = found["free"][name] + sent / rate[axes] - sent / free[axes]
        over = seconds[FLAT] / seconds[name]
        forms.append(Row(name, sent, found["sent"][name], seconds[name], formula, with_work, over))
    return forms


def rates(found: dict[str, Any], links: str) -> dict[str, float]:
    """Bytes a second: a host's to others by an all_to_all of all devices and of peers, a device's within its host."""
    whole = 4 * found["examples"] * found["tables"] * found["dim"]
    between = INSIDE * whole * (found["hosts"] - 1) / found["hosts"]
    sent = {"all": between, "between": between, "within": whole * (INSIDE - 1) / INSIDE}
    return {name: bytes_sent / found[links][name] for name, bytes_sent in sent.items()}


def table(found: dict[str, Any]) -> str:
    """The rows as Markdown."""
    rate = rates(found, "limited")
    head = ("exchange", "MB a host sends", "on the wire", "ms a step", "formula", "measured / formula")
    head = (*head, "with its work", "measured / that", "flat / this")
    lines = [
        f"## {found['hosts']} hosts, {found['mbit']:g} Mb/s",
        "",
        f"{found['examples']:,} examples a device, {found['tables']} tables of {found['dim']} numbers, "
        f"{found['turns']} turns. Measured rates: {rate['all'] * 8e-6:.1f} Mb/s a host by all devices,",
        f"{rate['between'] * 8e-6:.1f} Mb/s by peers, {rate['within'] * 1e-6:,.0f} MB/s a device within a host.",
        "",
        f"| {' | '.join(head)} |",
        f"|{'---|' * len(head)}",
    ]
    for row in rows(found):
        cells = (
            row.name if row.name == FLAT else f"two levels, {row.name}",
            f"{row.sent / 1e6:.3f}",
            f"{row.on_wire / 1e6:.3f}",
            f"{row.seconds * 1e3:.1f}",
            f"{row.formula * 1e3:.1f}",
            f"{row.seconds / row.formula:.2f}",
            f"{row.with_work * 1e3:.1f}",
            f"{row.seconds / row.with_work:.2f}",
            f"{row.over_flat:.2f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def markdown(results: Sequence[dict[str, Any]], line: str) -> str:
    """The page."""
    about = {name: results[0][name] for name in ("device", "date", "commit")}
    return PAGE.format(line=line, **about) + "\n" + "\n".join(map(table, results))


def bytes_over_rate(task: Task) -> str:
    """What the links alone take, where nothing can be measured."""
    lines = [f"{task.hosts} hosts at {task.mbit:g} Mb/s: bytes over rate, nothing measured"]
    for name in FORMS:
        sent = task.between(name)
        lines.append(f"  {name:6s} {sent / 1e6:8.3f} MB a host  {sent * 8 / task.mbit / 1e3:8.1f} ms")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000])
    parser.add_argument("--turns", type=int, default=Task.turns)
    parser.add_argument("--examples", type=int, help="of a device; as it is, 256 at 100 Mb/s, more on faster links")
    parser.add_argument("--priority", type=int, help="nice value of this session while it measures, for busy machines")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--switch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.task is not None:
        task = Task(**json.loads(options.task))
        switch(task) if options.switch else measure(task, options.host)
        return
    tasks = [
        Task(
            hosts=hosts,
            mbit=mbit,
            turns=options.turns,
            priority=options.priority,
            examples=options.examples or max(64, int(2.56 * min(mbit, 1000))),
        )
        for hosts, mbit in itertools.product(options.hosts, options.mbit)
    ]
    reason = not_permitted()
    if reason is not None:
        print(f"Network namespaces with limited links are not permitted here: {reason}.")
        print("\n".join(bytes_over_rate(task) for task in tasks))
        return
    about = {"device": machine.device_name(None), "date": machine.today(), "commit": machine.commit()}
    results = []
    for task in tasks:
        results.append(about | run(task))
        print(table(results[-1]), flush=True)
    line = " ".join(["python benchmarks/tower_exchange.py", *(argv if argv is not None else sys.argv[1:])])
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results, line))


if __name__ == "__main__":
    main()
