"""Sums of gradients between hosts with slow links: plain, compressed, and those of torch's DDP on the same links.

python benchmarks/compressed_exchange.py --json FILE --markdown FILE [--mbit 100 1000] [--turns 7] [--torch PYTHON]

A host is a process of one device in a network namespace of its own, with limits on what it sends and receives: see
`slow_links.py`, and what that takes. Elsewhere this says so and prints bytes over rate. All hosts have a gradient of
2,048 x 2,048 float32, and a step is one exchange of it:

    plain              an all-reduce, as XLA's over Gloo
    two-way            compressed to the owner of a chunk and back, with error feedback (`compress_gradients`)
    reduce-scatter     what sharded data parallelism sends of gradients
    SDP4Bit            the same in 4 bits ("gradients"), and with the differences of weights that all are sent ("step")

Peers are one step of DDP (PyTorch, Gloo) of a model whose gradient is its input: plain, its hook of float16 and
PowerSGD. They run where --torch, or this Python, has torch. Every step is timed once more after the limits are taken
away, which is what a host does itself.
"""

import argparse
import dataclasses
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import slow_links

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

SIDE, PORT = 2048, 9771
PLAIN = "plain"
OURS = (
    PLAIN, "two-way float16", "two-way one bit", "two-way int4:128", "two-way top 1 %", "reduce-scatter",
    "SDP4Bit gradients", "SDP4Bit step",
)  # fmt: skip
PEERS = ("DDP", "DDP float16", "DDP PowerSGD 1", "DDP PowerSGD 4")
AIMS = {"two-way one bit": 3.0, "two-way int4:128": 3.0}
"""How many times as fast as plain they are to be at 100 Mb/s."""

PAGE = """\
# Compressed sums of gradients over slow links

`{line}`

{device}, {date}, commit {commit}

Four hosts, each a process of one device in a network namespace; `tc tbf` limits what each sends and receives. A step is
one exchange of a gradient of 4,194,304 float32 that every host has; times are medians over turns, of the slowest host.
On the wire: what the interface of a host sent, with headers. Bytes / rate: of what is stated, at the rate of the limit.
Work: the step without limits.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured in one set of namespaces.

    Attributes:
      mbit: Megabits a second that a host may send, and receive.
      turns: Timed steps of each.
      hosts: Processes.
      side: Of the gradient.
      peers: Whether torch is measured, or this package.
      priority: Of the session's scheduling group while steps are timed (/proc/self/autogroup); None = as it is.
    """

    mbit: float
    turns: int = 7
    hosts: int = 4
    side: int = SIDE
    peers: bool = False
    priority: int | None = None

    def sent(self, name: str) -> float:
        """Bytes that a host sends in a step, without headers."""
        n, others = self.side**2, (self.hosts - 1) / self.hosts
        int4, weights = 0.5 + 4 / 128, 0.5 + 4 / 2048
        low_rank = 2 * 4 * 2 * self.side  # both factors of one column, all-reduced
        return others * {
            PLAIN: 8 * n,
            "two-way float16": 4 * n,
            "two-way one bit": 2 * (n / 8 + 4 * self.hosts),
            "two-way int4:128": 2 * int4 * n,
            "two-way top 1 %": 2 * 8 * self.hosts * int(0.01 * n / self.hosts),
            "reduce-scatter": 4 * n,
            "SDP4Bit gradients": int4 * n,
            "SDP4Bit step": (int4 + weights) * n,
            "DDP": 8 * n,
            "DDP float16": 4 * n,
            "DDP PowerSGD 1": low_rank,
            "DDP PowerSGD 4": 4 * low_rank,
        }[name]  # fmt: skip


# On a host


def measure(task: Task, host: int) -> None:
    """Joins the others and measures; host 0 prints the results as a line of JSON."""
    out = slow_links.join(host)
    runs, gather = (torch_runs if task.peers else jax_runs)(task, host)
    found: dict[str, Any] = {}
    for links in ("limited", "free"):
        if host == 0 and links == "free":
            slow_links.free(out)
        gather(links)
        with slow_links.priority(task.priority if host == 0 else None):
            measured = slow_links.timed(runs, task.turns, gather)
        found[links], found[f"{links}_turns"] = measured["seconds"], measured["turns"]
        if links == "limited":
            found["sent"] = {name: slow_links.sent_by(run, gather, times=2) for name, run in runs.items()}
    gather("done")
    if host == 0:
        print(json.dumps(found), file=out)


def jax_runs(task: Task, host: int) -> tuple[slow_links.Runs, Any]:
    """What is timed, compiled, by name, and what gathers objects of all hosts."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from scalejax.parallel.compression.compressors import Blocks, Fp16, OneBit, TopKEntries
    from scalejax.parallel.compression.two_way import compress_gradients
    from scalejax.parallel.gradients.blocks import StepContext
    from scalejax.parallel.gradients.compute import Loss, LossInputs, gradients
    from scalejax.parallel.mesh import MeshShape, make_mesh
    from scalejax.parallel.sdp4bit import Sdp4Bit
    from scalejax.train import distributed

    distributed.initialize(f"{slow_links.address(0)}:{PORT}", task.hosts, host, timeout_s=60)
    mesh = make_mesh(MeshShape(replica=task.hosts, fsdp=1))
    axis, rows = "replica", P("replica")

    own = np.random.default_rng(host).standard_t(3, (task.side, task.side)).astype(np.float32)
    given = (task.hosts, *own.shape)
    gradient = jax.make_array_from_callback(given, NamedSharding(mesh, rows), lambda _: own[None])
    mapped = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    key = jax.random.key(0)

    def two_way(compressor: Any) -> Any:
        reduction = compress_gradients(compressor, axes=(axis,))
        shapes = jax.eval_shape(lambda: reduction.init({"w": own}, hosts=task.hosts))
        state = {
            name: jax.make_array_from_callback(
                x.shape,
                NamedSharding(mesh, rows),
                lambda index, x=x: np.full((1, *x.shape[1:]), own.size if x.dtype == jnp.int32 else 0, x.dtype),
            )
            for name, x in shapes.items()
        }
        step = jax.jit(
            mapped(lambda g, state: reduction.update(g[0], state, key), in_specs=(rows, rows), out_specs=(P(), rows)),
            donate_argnums=1,
        )

        def run() -> None:
            nonlocal state
            mean, state = step(gradient, state)
            jax.block_until_ready((mean, state))

        return run

    def once(function: Any, out: P) -> Any:
        step = jax.jit(mapped(function, in_specs=rows, out_specs=out))
        return lambda: jax.block_until_ready(step(gradient))

    def loss(given: LossInputs) -> tuple[Loss, dict[str, jax.Array]]:
        w = given.gather(given.params)["w"]
        return Loss((w * given.batch[0]).sum(), jnp.float32(1)), {}

    take = gradients(loss, Sdp4Bit(gradients="one_level", param_dtype=None), mesh=mesh, specs={"w": P(axis)})
    zeros = np.zeros((task.side // task.hosts, task.side), np.float32)
    params = {"w": jax.make_array_from_callback(own.shape, NamedSharding(mesh, P(axis)), lambda _: zeros)}
    exchange = jax.jit(take.init_exchange)(params)

    def sharded(*, weights: bool) -> Any:
        def step(params: Any, exchange: Any, batch: jax.Array) -> Any:
            context = StepContext(jnp.int32(0), key)
            found = take(params, batch, exchange=exchange, context=context)
            if not weights:
                return found.params
            moved = {path: p - 1e-3 * found.params[path] for path, p in params.items()}
            return take.after_update(moved, found.exchange, context)

        compiled = jax.jit(step)
        return lambda: jax.block_until_ready(compiled(params, exchange, gradient))

    return {
        PLAIN: once(lambda g: jax.lax.psum(g[0], axis), P()),
        "two-way float16": two_way(Fp16()),
        "two-way one bit": two_way(OneBit()),
        "two-way int4:128": two_way(Blocks(format="int4:128")),
        "two-way top 1 %": two_way(TopKEntries(k=0.01)),
        "reduce-scatter": once(lambda g: jax.lax.psum_scatter(g[0], axis, tiled=True), P(axis)),
        "SDP4Bit gradients": sharded(weights=False),
        "SDP4Bit step": sharded(weights=True),
    }, distributed.gather


def torch_runs(task: Task, host: int) -> tuple[slow_links.Runs, Any]:
    """The same of torch."""
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # pyright: ignore[reportMissingImports]
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power  # pyright: ignore[reportMissingImports]
    from torch.nn.parallel import DistributedDataParallel  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{slow_links.address(0)}:{PORT}", rank=host, world_size=task.hosts
    )
    own = torch.randn(task.side, task.side, generator=torch.Generator().manual_seed(host))

    class Weights(torch.nn.Module):  # pyright: ignore[reportUntypedBaseClass]
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(task.side, task.side))

        def forward(self, x: Any) -> Any:
            return (self.w * x).sum()

    def made(hook: Any = None, state: Any = None) -> Any:
        model = DistributedDataParallel(Weights(), bucket_cap_mb=25)
        if hook is not None:
            model.register_comm_hook(state, hook)

        def run() -> None:
            model.zero_grad()
            model(own).backward()

        return run

    def power_sgd(rank: int) -> Any:
        # Below 2 DDP has not yet laid its buckets out anew.
        state = power.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        return made(power.powerSGD_hook, state)

    def gather(value: object) -> list[Any]:
        found: list[Any] = [None] * task.hosts
        dist.all_gather_object(found, value)
        return found

    runs = {
        "DDP": made(),
        "DDP float16": made(default_hooks.fp16_compress_hook),
        "DDP PowerSGD 1": power_sgd(1),
        "DDP PowerSGD 4": power_sgd(4),
    }
    for run in runs.values():
        run()  # plain, all of them
    return runs, gather


# On the machine


def run(task: Task, python: str) -> dict[str, Any]:
    """Measures in namespaces that are gone when it returns."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    program = [python, __file__, "--task", json.dumps(dataclasses.asdict(task))]
    return dataclasses.asdict(task) | slow_links.run(task.hosts, task.mbit, program, variables)


def table(found: dict[str, Any], peers: dict[str, Any] | None) -> str:
    """What was found at one rate, as Markdown."""
    task = Task(**{field.name: found[field.name] for field in dataclasses.fields(Task)})
    head = ("exchange", "MB a host sends", "on the wire", "s a step", "bytes / rate", "work", "plain / this", "aim")
    lines = [f"## {task.mbit:g} Mb/s, {task.turns} turns", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name in (*OURS, *PEERS):
        of = peers if name in PEERS else found
        if of is None:
            continue
        seconds, sent = of["limited"][name], task.sent(name)
        cells = [name, f"{sent / 1e6:.3f}", f"{of['sent'][name] / 1e6:.3f}", f"{seconds:.3f}"]
        cells += [f"{sent * 8e-6 / task.mbit:.3f}", f"{of['free'][name]:.3f}"]
        over = found["limited"][PLAIN] / seconds
        cells += [f"{over:.2f}", f"{AIMS[name]:g}" if name in AIMS and task.mbit == 100 else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def missed(found: dict[str, Any]) -> list[str]:
    """Those that are not as fast as they are to be."""
    seconds = found["limited"]
    return [name for name, aim in AIMS.items() if found["mbit"] == 100 and seconds[PLAIN] < aim * seconds[name]]


def bytes_over_rate(task: Task) -> str:
    """What the links alone take, where nothing can be measured."""
    lines = [f"{task.hosts} hosts at {task.mbit:g} Mb/s: bytes over rate, nothing measured"]
    for name in (*OURS, *PEERS):
        sent = task.sent(name)
        lines.append(f"  {name:18s} {sent / 1e6:8.3f} MB a host  {sent * 8e-6 / task.mbit:7.3f} s")
    return "\n".join(lines)


def has_torch(python: str) -> bool:
    """Whether an interpreter can measure the peers."""
    if python == sys.executable:
        return importlib.util.find_spec("torch") is not None
    return subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000])
    parser.add_argument("--turns", type=int, default=Task.turns)
    parser.add_argument("--torch", metavar="PYTHON", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--priority", type=int, help="nice value of this session while it measures, for busy machines")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--markdown", type=pathlib.Path)
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.task is not None:
        measure(Task(**json.loads(options.task)), options.host)
        return
    tasks = [Task(mbit=mbit, turns=options.turns, priority=options.priority) for mbit in options.mbit]
    reason = slow_links.not_permitted()
    if reason is not None:
        print(f"Network namespaces with limited links are not permitted here: {reason}.")
        print("\n".join(bytes_over_rate(task) for task in tasks))
        return

    from scalejax.bench import machine

    about = {"device": machine.device_name(None), "date": machine.today(), "commit": machine.commit()}
    peers = has_torch(options.torch)
    if not peers:
        print(f"{options.torch} has no torch: peers are left out. Name an interpreter that has with --torch.")
    results = []
    for task in tasks:
        ours = run(task, sys.executable)
        theirs = run(dataclasses.replace(task, peers=True), options.torch) if peers else None
        results.append({**about, "ours": ours, "peers": theirs})
        print(table(ours, theirs), flush=True)
    turns = f"--mbit {' '.join(str(rate) for rate in options.mbit)} --turns {options.turns}"
    line = f"python benchmarks/compressed_exchange.py --json FILE --markdown FILE {turns}"
    line += " --torch PYTHON" if peers else ""
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.markdown:
        page = PAGE.format(line=line, **about) + "\n" + "\n".join(table(r["ours"], r["peers"]) for r in results)
        options.markdown.write_text(page)
    wrong = [name for found in results for name in missed(found["ours"])]
    if wrong:
        sys.exit(f"wrong: not {AIMS[wrong[0]]:g} times as fast as plain at 100 Mb/s: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
