"""The exchange of tables between hosts with slow links: flat, in two levels, and compressed before it leaves a host.

    python benchmarks/tower_exchange.py --json FILE --markdown FILE [--hosts 2 4] [--mbit 100 1000] [--turns 11]

A host is a process of two devices in a network namespace of its own, with limits on what it sends and receives: see
`slow_links.py`, and what that takes. Elsewhere this says so and prints bytes over rate.

A step is a lookup of one id a table and the update of its rows: ids, vectors and gradients cross once. Compressed, c
neighbours of each vector are added up between the hops: a linear map N to N/c that takes next to no time, as a module
would on a device that is faster than its links. Before anything is timed, flat and two-level steps must give the same
bits, and so must compressed ones and the same map after a flat lookup.

Seconds by section 3.3 of the paper's sheet are bytes over measured rates, for T hosts of L devices of b examples with
vectors of W numbers in all:

    between hosts   L b (T - 1) / T (8 W / c + ids) bytes a host, at the rate of a plain all_to_all over the same axes
    within hosts    b (L - 1) / L (8 W + ids) bytes a device, likewise; the flat exchange has none

That leaves out what a device does itself. So every step is timed once more after the limits are taken away, and
"formula with work" is that plus the bytes between hosts at the difference of what a byte takes.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import slow_links

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from scalejax.bench import machine

INSIDE = 2
FLAT, PORT = "flat", 9761
FORMS = {FLAT: 1, "c = 1": 1, "c = 2": 2, "c = 4": 4, "c = 8": 8}
"""By how much vectors are narrower between hosts."""


PAGE = """\
# The exchange of tables over slow links

`{line}`

{device}, {date}, commit {commit}

A host is a process of two devices in a network namespace; `tc tbf` limits what each sends and receives. A step is a
lookup and an update: ids, vectors and gradients cross once. c = 1 gave the bits of the flat one, every c > 1 those of
the same map after a flat lookup. Times are medians over turns, of the slowest host. Formula: bytes between hosts and
within them over the rates of plain all_to_alls of as many bytes as the vectors of c = 1. Formula with work: the step
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


# On a host


def measure(task: Task, host: int) -> None:
    """Joins the others and measures; host 0 prints progress, then the results as a line of JSON."""
    out = slow_links.join(host)

    from scalejax.train import distributed

    distributed.initialize(f"{slow_links.address(0)}:{PORT}", task.hosts, host, timeout_s=60)
    runs = prepared(task, host)
    found: dict[str, Any] = {}
    for links in ("limited", "free"):
        if host == 0 and links == "free":
            slow_links.free(out)
        distributed.gather(links)
        with slow_links.priority(task.priority if host == 0 else None):
            measured = slow_links.timed(runs, task.turns, distributed.gather)
        found[links], found[f"{links}_turns"] = measured["seconds"], measured["turns"]
        if links == "limited":
            sent = {name: slow_links.sent_by(run, distributed.gather) for name, run in runs.items() if name in FORMS}
            found["sent"] = sent
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


# On the machine


def run(task: Task) -> dict[str, Any]:
    """Measures in namespaces that are gone when it returns."""
    given = json.dumps(dataclasses.asdict(task))
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(INSIDE), "PJRT_NPROC": str(8 * INSIDE)}
    program = [sys.executable, __file__, "--task", given]
    return dataclasses.asdict(task) | slow_links.run(task.hosts, task.mbit, program, variables)


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
    head = (*head, "formula with work", "measured / formula with work", "flat / this")
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
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.task is not None:
        task = Task(**json.loads(options.task))
        measure(task, options.host)
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
    reason = slow_links.not_permitted()
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
