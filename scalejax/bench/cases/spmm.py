"""Products with the matrix of a power-law graph on a CPU: exact, their gradients, and over sampled edges.

The graph has 20,000 nodes and 1.9 million edges: degrees are 15 / u for u uniform in (0, 1), at most 3,000, senders and
weights are uniform. Nodes have 64 features in float32, or in bfloat16 for `exact-bfloat16`; peers get those widened
before. "examples" are edges that are multiplied. Peers: `scipy` (one thread), `torch` (its CSR), `bcsr`
(jax.experimental.sparse). Cases:

    exact, exact-bfloat16   h of the neighbours, summed with weights
    backward-h              the gradient for h; peers multiply with a transpose that they were given
    backward-values         the gradient for the weights, which are no constants: peers do one product for each edge
    sampled-S               at most S edges of a row by "fastrand", picked before; peers multiply the same edges

Figures of gradients: `of_forward`, their time by that of the exact product; `learned_of_forward`, the same for the
gradient for h where the weights are no constants; `both_of_forward`, the same for both gradients. Figures of sampled
products: `speedup_over_bcsr`, the time of the exact BCSR product by ours, and `of_edges`, that by how many times fewer
the edges are. A figure is the median over pairs of turns, which are as long and as warm as those of the contest itself.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.bench import machine, peers
from scalejax.bench.harness import Contest, Effort, OutputsDiffer, measure, repeated
from scalejax.kernels.sampled_spmm import Csr, plan_sample, presample, sampled_spmm, sparse_plan, spmm

Result = TypeVar("Result")

CASES = (
    "exact",
    "exact-bfloat16",
    "backward-h",
    "backward-values",
    *(f"sampled-{width}" for width in (8, 16, 32, 64, 128)),
)
PEERS = ("scipy", "torch", "bcsr")
ON_CPU = True

_EFFORT = Effort()
_MODULES = {"scipy": "scipy_sparse", "torch": "torch_sparse", "bcsr": "jax_sparse"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """Nodes, the largest degree and the features of a node."""

    nodes: int = 20_000
    most: int = 3_000
    features: int = 64


def prepare(case: str, against: str | None) -> Contest:
    """The contest of a case."""
    return contest(case, against, Size())


def contest(case: str, against: str | None, size: Size, effort: Effort = _EFFORT) -> Contest:
    """Ours and the peer's product with the same graph; `effort` is that of its figures."""
    device = jax.devices("cpu")[0]
    threads = len(machine.usable_cpus())
    peer_of = None if against is None else peers.load(_MODULES[against])
    rng = np.random.default_rng(0)
    csr = power_law(size, rng)
    h, g = (rng.standard_normal((size.nodes, size.features)).astype(np.float32) for _ in range(2))
    with jax.default_device(device):
        work = _work(case, csr, h, g)
        bcsr = peers.load("jax_sparse").Product(_arrays(csr), csr.shape, h, threads)
    peer = None
    if peer_of is not None:
        if case == "backward-values":
            peer = peer_of.EdgeProducts(_arrays(csr), csr.shape, g, h, threads)
        else:
            peer = peer_of.Product(_arrays(work.matrix), work.matrix.shape, work.dense, threads)

    def check() -> None:
        assert peer is not None
        ours, theirs = np.asarray(work.run(), np.float32), peer.run()
        most = np.abs(theirs).max()
        difference = np.abs(ours - theirs).max() / most
        if not difference <= work.tolerance:
            raise OutputsDiffer(f"results differ by {difference:.2g} of the largest, {most:.3g}")

    def figures() -> dict[str, float]:
        found = {name: _ratio(above, below, effort) for name, (above, below) in work.ratios.items()}
        if case.startswith("sampled"):
            found["speedup_over_bcsr"] = _ratio(bcsr.run, work.run, effort)
            found["of_edges"] = found["speedup_over_bcsr"] * work.matrix.nnz / csr.nnz
        return found

    return Contest(
        repeated(work.run),
        work.matrix.nnz,
        machine.device_name(device),
        None if peer is None else repeated(peer.run),
        check,
        figures=figures,
    )


def power_law(size: Size, rng: np.random.Generator) -> Csr:
    """A weighted graph whose degrees have a tail of 1 / degree, cut at `size.most`."""
    degrees = np.minimum(size.most, 15.0 / (1.0 - rng.random(size.nodes))).astype(np.int64)
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    indices = rng.integers(0, size.nodes, indptr[-1]).astype(np.int32)
    return Csr(indptr, indices, rng.random(indptr[-1]).astype(np.float32), shape=(size.nodes, size.nodes))


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is timed.

    Attributes:
      run: One unit; returns its result when that is there.
      matrix: What a peer multiplies.
      dense: By what.
      tolerance: Largest difference, by the largest result.
      ratios: Figures: the time of the first by the time of the second.
    """

    run: Callable[[], jax.Array]
    matrix: Csr
    dense: np.ndarray
    tolerance: float = 1e-5
    ratios: Mapping[str, tuple[Callable[[], object], Callable[[], object]]] = dataclasses.field(default_factory=dict)


def _work(case: str, csr: Csr, h: np.ndarray, g: np.ndarray) -> _Work:
    if case.startswith("sampled"):
        picked = presample(csr, int(case.partition("-")[2]), strategy="fastrand")
        product = _program(lambda p, h: sampled_spmm(p, h, reduce="sum"), plan_sample(picked), h)
        return _Work(product, picked.to_csr(), h)
    planned = sparse_plan(csr)
    values = planned.csr.values
    forward = _program(spmm, planned, h)
    if case == "exact":
        return _Work(forward, csr, h)
    if case == "exact-bfloat16":
        narrow = jnp.asarray(h, jnp.bfloat16)
        return _Work(_program(spmm, planned, narrow), csr, np.asarray(narrow, np.float32), tolerance=2**-8)
    if case == "backward-h":
        run = _program(lambda p, h, g: jax.vjp(lambda h: spmm(p, h), h)[1](g)[0], planned, h, g)
        learned = _program(
            lambda p, h, v, g: jax.vjp(lambda h: spmm(p, h, values=v), h)[1](g)[0], planned, h, values, g
        )
        ratios = {"of_forward": (run, forward), "learned_of_forward": (learned, forward)}
        return _Work(run, jax.tree.map(np.asarray, planned.transpose), g, ratios=ratios)
    run = _program(lambda p, h, v, g: jax.vjp(lambda v: spmm(p, h, values=v), v)[1](g)[0], planned, h, values, g)
    both = _program(
        lambda p, h, v, g: jax.vjp(lambda *a: spmm(p, a[0], values=a[1]), h, v)[1](g), planned, h, values, g
    )
    return _Work(run, csr, h, ratios={"of_forward": (run, forward), "both_of_forward": (both, forward)})


def _program(function: Callable[..., Result], *operands: object) -> Callable[[], Result]:
    compiled, placed = jax.jit(function), jax.device_put(operands)
    return lambda: jax.block_until_ready(compiled(*placed))


def _ratio(above: Callable[[], object], below: Callable[[], object], effort: Effort) -> float:
    """Time of one by time of the other, in turns.

    Single calls in alternation would not do: a product of a millisecond would be timed with what one of twenty left in
    the caches.
    """
    contest = Contest(repeated(below), examples=0, device="", peer=repeated(above))
    below_s, above_s = measure(contest, effort)
    return statistics.median(a / b for a, b in zip(above_s, below_s, strict=True))


def _arrays(csr: Csr) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array) for array in (csr.indptr, csr.indices, csr.values))
