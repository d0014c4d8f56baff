"""The GPU kernel of sparse products: checked against XLA, then timed beside a copy, exact products and peers.

python benchmarks/gpu_spmm.py [--json FILE] [--seconds 150]      # on a machine with a GPU
python benchmarks/gpu_spmm.py --smoke                            # anywhere: tiny sizes, kernels interpreted

One JSON object a line, to standard output and to FILE, as gpu_report.py says. `checks` come first: where a kernel
differs from XLA, nothing is timed and the exit status is 1.

Graphs have the numbers of nodes and edges of ogbn-proteins (its 39,561,252 undirected edges both ways; Open Graph
Benchmark, arXiv 2005.00687) and of Reddit (GraphSAGE's, as DGL and PyTorch Geometric read it). How degrees spread is
ours: log-normal with sigma 1, cut at `most`, for which no source was read. Senders are drawn uniformly: harder on a
cache than the real graphs, whose neighbours are near each other. Features are those of a layer there. Cases:

    sampled, FORM       picks and sums: edges picked inside the kernel by a rule (bucket, fastrand), or before (ell).
                        Rated by picks * F * bytes, what has to be gathered, at the bandwidth of a copy (aim: 0.7)
    exact               all edges: jax's cuSPARSE and the kernel, and torch.sparse where it is installed
    best exact over     time of the fastest exact product by that of the sampled one, float32 (aim: 4.35 at the widths
                        that cost no accuracy, 20 at those that cost less than 1 %)
    tiles               the sampled product for other sizes of tiles than those of scalejax.kernels.sampled_spmm.blocks
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu_report import Report, main, timed

from scalejax.kernels.sampled_spmm import Csr, Ell, presample, sampled_spmm, sparse_plan, spmm
from scalejax.kernels.sampled_spmm.blocks import GPU, GpuBlocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """Statistics of a graph, the features of a layer and the widths that are timed."""

    nodes: int
    edges: int
    most: int
    features: int
    widths: tuple[int, ...]

    def degrees(self, rng: np.random.Generator) -> np.ndarray:
        """int64[nodes], of `edges` in all but for rounding."""
        drawn = rng.lognormal(0.0, 1.0, self.nodes)
        for _ in range(20):  # the cut at `most` lowers the mean
            drawn = np.clip(drawn * (self.edges / drawn.sum()), 1, self.most)
        return np.rint(drawn).astype(np.int64)

    def draw(self) -> Csr:
        rng = np.random.default_rng(0)
        indptr = np.concatenate([[0], np.cumsum(self.degrees(rng))]).astype(np.int32)
        indices = rng.integers(0, self.nodes, indptr[-1], dtype=np.int32)
        return Csr(indptr, indices, shape=(self.nodes, self.nodes))


GRAPHS = {
    "proteins": Graph(nodes=132_534, edges=79_122_504, most=7_750, features=256, widths=(256, 64, 16)),
    "reddit": Graph(nodes=232_965, edges=114_615_892, most=21_657, features=128, widths=(64, 16)),
}
SMOKE = {"tiny": Graph(nodes=60, edges=540, most=30, features=20, widths=(8,))}
CHECKED = (0, 1, 3, 7, 8, 9, 0, 40, 64, 577, 1154, 0, 3000, 257, 256, 5, 0)


def how(implementation: str, smoke: bool) -> dict[str, Any]:
    return {"implementation": implementation, "interpret": smoke and implementation == "pallas_gpu"}


def check(report: Report, *, smoke: bool) -> bool:
    """Whether the kernel gives what XLA gives."""
    rng = np.random.default_rng(0)
    indptr = np.concatenate([[0], np.cumsum(CHECKED)]).astype(np.int32)
    nnz = int(indptr[-1])
    wrong: dict[str, float] = {}
    checked = 0
    several = (
        ((True,), (jnp.float32,), (20,)) if smoke else ((False, True), (jnp.float32, jnp.bfloat16), (20, 128, 602))
    )
    for weighted, dtype, features in itertools.product(*several):
        values = rng.standard_normal(nnz).astype(np.float32) if weighted else None
        csr = Csr(indptr, rng.integers(0, 50, nnz, dtype=np.int32), values, shape=(len(CHECKED), 50))
        h = jnp.asarray(rng.standard_normal((50, features)), dtype)
        planned, on_device = sparse_plan(csr), jax.tree.map(jnp.asarray, csr)
        ell = jax.tree.map(jnp.asarray, presample(csr, 40, strategy="fastrand"))
        cases = {
            "exact": lambda o, p=planned, h=h: spmm(p, h, **o),
            "ell": lambda o, e=ell, h=h: sampled_spmm(e, h, **o),
            "bucket": lambda o, c=on_device, h=h: sampled_spmm(c, h, 40, self_loop_bias=1.0, **o),
            "fastrand": lambda o, c=on_device, h=h: sampled_spmm(
                c, h, 40, strategy="fastrand", reduce="sum", rescale="degree", **o
            ),
        }
        for name, run in cases.items():
            ours, theirs = (
                np.asarray(jax.jit(lambda i=i, run=run: run(how(i, smoke)))(), np.float64)
                for i in ("pallas_gpu", "xla")
            )
            worst = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
            checked += 1
            if not worst < (1e-5 if dtype == jnp.float32 else 1e-2):  # the rounding of results
                wrong[f"{name}, {jnp.dtype(dtype)}, {features} features, weighted {weighted}"] = worst
    report.line(case="checks", checked=checked, wrong=wrong)
    return not wrong


def sampled(report: Report, name: str, graph: Graph, csr: Csr, best_exact_s: float | None, *, smoke: bool) -> None:
    """Every width and form in float32 and bfloat16; figures against the best exact product."""
    degrees = np.diff(csr.indptr)
    on_device = jax.tree.map(jnp.asarray, csr)
    for width, dtype in itertools.product(graph.widths, (jnp.float32, jnp.bfloat16)):
        case = f"sampled, {name}, S = {width}, F = {graph.features}, {jnp.dtype(dtype)}"
        if not report.has_time_for(case, 12):
            continue
        h = jax.random.normal(jax.random.key(1), (graph.nodes, graph.features), dtype)
        picks = int(np.minimum(degrees, width).sum())
        moved, formula = picks * graph.features * h.dtype.itemsize, "picks * F * bytes"
        found: Ell = jax.jit(functools.partial(presample, width=width, strategy="fastrand"))(on_device)
        forms: dict[str, Any] = {
            rule: (on_device, functools.partial(sampled_spmm, width=width, strategy=rule))
            for rule in ("bucket", "fastrand")
        }
        forms["ell"] = (found, sampled_spmm)
        for form, implementation in (*((f, "pallas_gpu") for f in forms), ("ell", "xla")):
            operand, function = forms[form]
            run = jax.jit(functools.partial(function, **how(implementation, smoke)))
            seconds = timed(lambda run=run, operand=operand, h=h: run(operand, h))
            goal = 0.7 if implementation == "pallas_gpu" else None
            report.timing(f"{case}, {form}", implementation, seconds, moved, formula, picks=picks, goal_share=goal)
            if best_exact_s is not None and dtype == jnp.float32 and implementation == "pallas_gpu":
                goal = 4.35 if width == graph.widths[0] else 20.0
                report.line(case=f"best exact over {case}, {form}", ratio=best_exact_s / seconds, goal=goal)


def exact(report: Report, name: str, graph: Graph, csr: Csr, *, smoke: bool) -> float | None:
    """Seconds of the fastest exact product in float32; None where there was no time."""
    case = f"exact, {name}, F = {graph.features}"
    if not report.has_time_for(case, 40):
        return None
    planned = sparse_plan(csr)
    best = []
    for dtype, implementations in ((jnp.float32, ("cusparse", "pallas_gpu")), (jnp.bfloat16, ("pallas_gpu",))):
        h = jax.random.normal(jax.random.key(1), (graph.nodes, graph.features), dtype)
        moved = csr.nnz * graph.features * h.dtype.itemsize
        for implementation in implementations:
            implementation = "xla" if smoke and implementation == "cusparse" else implementation
            run = jax.jit(functools.partial(spmm, **how(implementation, smoke)))
            seconds = timed(lambda run=run, h=h: run(planned, h), turns=5)
            report.timing(f"{case}, {h.dtype}", implementation, seconds, moved, "nnz * F * bytes")
            if dtype == jnp.float32:
                best.append(seconds)
    with_torch = _torch_seconds(graph, csr)
    if with_torch is None:
        report.line(case=f"{case}, torch.sparse", skipped="torch is not installed, or sees no GPU")
    else:
        report.timing(f"{case}, float32", "torch.sparse", with_torch, csr.nnz * graph.features * 4, "nnz * F * bytes")
        best.append(with_torch)
    return min(best)


def _torch_seconds(graph: Graph, csr: Csr) -> float | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    indptr, indices = (torch.from_numpy(np.array(a)).cuda() for a in (csr.indptr, csr.indices))
    matrix = torch.sparse_csr_tensor(indptr, indices, torch.ones(csr.nnz, device="cuda"), size=csr.shape)
    h = torch.randn(graph.nodes, graph.features, device="cuda")

    def call() -> None:
        matrix @ h
        torch.cuda.synchronize()

    return timed(call, turns=5)


def tiles(report: Report, name: str, graph: Graph, csr: Csr, *, smoke: bool) -> None:
    """The sampled product in bfloat16 for other tiles; the program is compiled anew for each."""
    on_device, width, usual = jax.tree.map(jnp.asarray, csr), graph.widths[-1], GPU[""]
    h = jax.random.normal(jax.random.key(1), (graph.nodes, graph.features), jnp.bfloat16)
    moved = int(np.minimum(np.diff(csr.indptr), width).sum()) * graph.features * 2
    for columns, elements, unroll in itertools.product((64, 128, 256), (512, 1024, 2048), (2, 4, 8)):
        sizes = GpuBlocks(columns=columns, elements=elements, warps=4, unroll=unroll)
        case = f"tiles, {name}, S = {width}, F = {graph.features}, bfloat16, fastrand, {sizes}"
        if not report.has_time_for(case, 4):
            return
        GPU[""] = sizes
        run = jax.jit(functools.partial(sampled_spmm, width=width, strategy="fastrand", **how("pallas_gpu", smoke)))
        try:
            seconds = timed(lambda run=run: run(on_device, h), turns=5)
        finally:
            GPU[""] = usual
        report.timing(case, "pallas_gpu", seconds, moved, "picks * F * bytes")
        if smoke:
            return


def time_cases(report: Report, *, smoke: bool) -> None:
    for name, graph in (SMOKE if smoke else GRAPHS).items():
        csr = graph.draw()
        best_exact_s = exact(report, name, graph, csr, smoke=smoke)
        sampled(report, name, graph, csr, best_exact_s, smoke=smoke)
        tiles(report, name, graph, csr, smoke=smoke)


if __name__ == "__main__":
    sys.exit(main("gpu_spmm", __doc__, check, time_cases, seconds=150))
