"""A step of 24 tables of six widths in one collection, beside a collection for each width, as Markdown.

    python benchmarks/shared_exchange.py [v5p:2x2x2 ...] > benchmarks/results/shared_exchange.md

In one collection the stacks of all widths share an all_to_all per hop and direction; collections of their own have each
its own. Both are one compiled program of lookup, a sum over all vectors that every gradient waits for, and update, on 8
CPU devices; they must agree to the bit before they are timed, in turns. Chips that are named are compiled for.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("PJRT_NPROC", "64")  # threads that may wait in exchanges

import functools
import sys
import time
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from scalejax.bench import machine
from scalejax.data.examples.jagged import KeyedJagged
from scalejax.data.examples.schema import Categorical, Schema
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.ids.jagged import DeviceJagged
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.plan import explain_sharding, run, topology
from scalejax.plan.compiled.collectives import total

WIDTHS, TABLES, ROWS, TURNS = (8, 16, 32, 48, 64, 128), 24, 10_000, 30
Route = Literal["flat", "two_level"]


def collections(mesh: Mesh, route: Route, *, shared: bool) -> tuple[EmbeddingCollection, ...]:
    """One of all tables, or one a width."""
    tables = [
        TableConfig(name=f"t{i}", rows=ROWS, dim=WIDTHS[i % len(WIDTHS)], features=(f"f{i}",)) for i in range(TABLES)
    ]
    groups = [tables] if shared else [[t for t in tables if t.dim == width] for width in WIDTHS]
    exchange = Exchange(route=route)
    return tuple(EmbeddingCollection(tables=tuple(group), mesh=mesh, exchange=exchange) for group in groups)


def features(on: EmbeddingCollection, examples: int, *, abstract: bool) -> DeviceJagged:
    """A batch with one id for each table of a collection."""
    names = [name for table in on.tables for name in table.features]
    schema = Schema(categorical=tuple(Categorical(name=name, rows=ROWS) for name in names))
    layout = on.layout(schema, examples)
    if abstract:
        everywhere = meshes.everywhere(on.mesh)
        shards, own = on.mesh.size, len(names) * examples // on.mesh.size
        values = jax.ShapeDtypeStruct((shards, own), np.int32, sharding=everywhere)
        return DeviceJagged(values, values, None, layout)  # pyright: ignore[reportArgumentType]
    ids = {name: np.random.default_rng(int(name[1:])).zipf(1.2, examples) % ROWS for name in names}
    return on.to_device(KeyedJagged.from_dense(ids), layout)


def step(
    on: tuple[EmbeddingCollection, ...], states: list[Any], batches: list[DeviceJagged]
) -> tuple[list[Any], jax.Array]:
    """One optimizer step of all tables."""
    looked_up = [c.lookup(s, b) for c, s, b in zip(on, states, batches, strict=True)]
    total = sum(x.sum() for _, x in sorted((name, x) for embedded, _ in looked_up for name, x in embedded.items()))
    new = [
        c.update(s, routing, {name: 0.01 * x + 0.001 * total for name, x in embedded.items()})
        for c, s, (embedded, routing) in zip(on, states, looked_up, strict=True)
    ]
    return new, jax.numpy.asarray(total)


def compiled(mesh: Mesh, route: Route, examples: int, *, shared: bool) -> tuple[tuple[EmbeddingCollection, ...], Any]:
    on = collections(mesh, route, shared=shared)
    batches = [features(c, examples, abstract=True) for c in on]
    with run.no_compile_cache():
        lowered = jax.jit(functools.partial(step, on), donate_argnums=0).lower(
            [c.abstract_state() for c in on], batches
        )
        return on, lowered.compile()


def described(program: Any, mesh: Mesh) -> str:
    found = [c for c in total(explain_sharding(program, mesh)) if c.kind == "all-to-all"]
    count, sent = sum(c.count for c in found), sum(c.bytes for c in found)
    return f"{count} | {sent / 2**20:.2f} | {program.memory_analysis().temp_size_in_bytes / 2**20:.1f}"


def logical(on: tuple[EmbeddingCollection, ...], states: list[Any]) -> dict[str, Any]:
    return {name: leaves for c, s in zip(on, states, strict=True) for name, leaves in c.to_logical(s).items()}


def measured(mesh: Mesh, route: Route, examples: int) -> None:
    """Two lines of the table."""
    forms = {}
    for shared in (False, True):
        on, program = compiled(mesh, route, examples, shared=shared)
        states = [c.init(jax.random.key(0)) for c in on]
        batches = [features(c, examples, abstract=False) for c in on]
        states, _ = program(states, batches)
        forms[shared] = [on, program, states, batches]
    one, other = (jax.device_get(logical(forms[shared][0], forms[shared][2])) for shared in (False, True))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    clocks = (time.perf_counter, time.process_time)
    taken: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(TURNS):
        for shared, form in forms.items():
            _, program, states, batches = form
            begin = [clock() for clock in clocks]
            form[2] = jax.block_until_ready(program(states, batches))[0]
            taken[shared].append([clock() - at for clock, at in zip(clocks, begin, strict=True)])
    wall, cpu = np.moveaxis(np.array([taken[False], taken[True]]), -1, 0)  # collections turns
    low, middle, high = np.quantile(cpu[0] / cpu[1], (0.25, 0.5, 0.75))
    where = f"{mesh.size} CPU devices, {route}"
    for shared in (False, True):
        times = (f"{1000 * np.median(kind[int(shared)]):.1f}" for kind in (wall, cpu))
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})" if shared else ""
        line(where, examples, forms[shared][1], mesh, shared=shared, more=(*times, ratio))


def line(where: str, examples: int, program: Any, mesh: Mesh, *, shared: bool, more: tuple[str, ...]) -> None:
    """One line of the table."""
    name = "one" if shared else f"{len(WIDTHS)}"
    print(
        f"| {where} | {examples // mesh.size} | {name} | {described(program, mesh)} | {' | '.join(more)} |", flush=True
    )


HEAD = """# One all_to_all for the tables of all widths

{when}, commit {commit}, {device}. `python benchmarks/shared_exchange.py{chips}`

{tables} tables of {rows} rows, one id of each an example, Zipf 1.2, widths {widths}, row-wise AdaGrad.
Six collections have the exchanges of six stacks, one collection has those of one. Medians of {turns} turns; the ratio
is of CPU seconds of neighbouring turns, with quartiles: other programs ran on the machine. MiB are what a device sends.
For chips the step was compiled and has not run.

| devices | examples of one | collections | all_to_alls | MiB | temporary MiB | ms | CPU ms | ratio |
|---|---|---|---|---|---|---|---|---|"""


def main() -> int:
    print(HEAD.format(
        when=machine.today(), commit=machine.commit(), device=machine.device_name(None), tables=TABLES, rows=ROWS,
        turns=TURNS, widths=", ".join(map(str, WIDTHS)), chips="".join(f" {name}" for name in sys.argv[1:]),
    ))  # fmt: skip
    routes: tuple[tuple[int, Route], ...] = ((1, "flat"), (2, "two_level"))
    for hosts, route in routes:
        for examples in (32, 512):
            measured(meshes.make_mesh(meshes.MeshShape(replica=hosts)), route, 8 * examples)
    for name in sys.argv[1:]:
        mesh, _ = topology.make_mesh(topology.parse(name))
        for shared in (False, True):
            _, program = compiled(mesh, "flat", 1024 * mesh.size, shared=shared)
            line(name, 1024 * mesh.size, program, mesh, shared=shared, more=("", "", ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
