"""Signatures, checks, derivatives and the choice of implementation.

`implementation` names one of

    reference    the definition, for tests
    xla          gathers in bins of rows of like length (`xla`, `balance`)
    native       the CSR kernel that jax brings for CPUs (`native`)
    cusparse     NVIDIA's, through jax, in float32 and float64 (`cusparse`)
    pallas_gpu   a Triton kernel; of a CSR, edges are picked inside it (`pallas_gpu`)
    pallas_tpu   row copies by DMA (`pallas_tpu`)

A name never falls back: what it lacks is an UnsupportedError that says so. None takes the fastest for the platform of
the mesh in force, or else of jax's first device.

An implementation is a module with `spmm(csr, balance, h, dtype)` and, if it has one, `picked_sum(ell, h, dtype)`: sums
in `dtype`, with the values inside `csr` or `ell`. All else is shared: the derivative with respect to h is the product
with the transpose, that with respect to values is `sddmm`, and each of these has the others for derivatives.

Modules of Pallas kernels take float32, bfloat16, float16 and int8 features, sum them in float32 and refuse float64.
Their functions have `interpret` (see `spmm`), and in place of `picked_sum` they have

    sampled_sum(ell, h, divisor, dtype)                       the sum of `sampled_spmm`, divided, without derivative
    picking_sum(csr, sampling, width, h, divisor, dtype)      the same by a kernel that picks the edges itself

by float32[N] `divisor` (None = 1), in `dtype`. `picking_sum` is for those of `_PICKING`.
"""

import dataclasses
import importlib
import types
from typing import TYPE_CHECKING, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from scalejax import compat
from scalejax.errors import UnsupportedError, UserError
from scalejax.kernels import gpu_choices
from scalejax.kernels.sampled_spmm import reference, xla
from scalejax.kernels.sampled_spmm.balance import Balance
from scalejax.kernels.sampled_spmm.csr import Csr
from scalejax.kernels.sampled_spmm.features import Int8Rows
from scalejax.kernels.sampled_spmm.sampling import EdgeSampling, Ell, Strategy, check_width, pick
from scalejax.kernels.sampled_spmm.sparse_plan import SampledPlan, SparsePlan, check_plan, transposed_values

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

    from scalejax.kernels.interpretation import Interpret

Implementation = Literal["reference", "xla", "native", "cusparse", "pallas_gpu", "pallas_tpu"]
_PLATFORMS = {
    "reference": ("cpu", "gpu", "tpu"),
    "xla": ("cpu", "gpu", "tpu"),
    "native": ("cpu",),
    "cusparse": ("gpu",),
    "pallas_gpu": ("gpu",),
    "pallas_tpu": ("tpu",),
}
"""Where each implementation runs."""

_ELSEWHERE = {"cpu": ("native",), "tpu": ("xla",)}
"""What None tries where there is no GPU. The kernel for TPUs is named by those who want it: no TPU has run it yet."""

_KERNELS = ("pallas_gpu", "pallas_tpu")
"""Those with a `sampled_sum`, and without float64."""

_PICKING = ("pallas_gpu",)
"""Those that pick edges of a CSR inside of the kernel."""

_PICKS = ("reference", "xla", "native", *_KERNELS)
"""Those that take picked edges."""


T = TypeVar("T")
_Saved = tuple[SparsePlan, jax.Array | None, jax.Array]
"""Plan, values and the matrix of a product."""

_KernelSaved = tuple[Csr | Ell, jax.Array | None, jax.Array, jax.Array | None]
_Gradients = tuple[jax.Array | None, ...]
"""Of each argument; None for those without one."""


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static: the implementation, and how Pallas kernels run."""

    name: str
    interpret: "Interpret" = False

    @property
    def options(self) -> dict[str, "Interpret"]:
        """Keyword arguments of the functions of its module."""
        return {"interpret": self.interpret} if self.name in _KERNELS else {}


def spmm(
    plan: SparsePlan,
    h: "Float[Array, 'columns features'] | Int8Rows",
    *,
    values: "Float[Array, 'edges'] | None" = None,
    reduce: Literal["sum", "mean"] = "sum",
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'rows features']":
    """out[r] = sum over the edges e of row r of values[e] * h[indices[e]].

    Differentiable (in reverse mode) with respect to h and to `values` where they are given, any number of times.

    Args:
      plan: From `sparse_plan`.
      h: float[M, F], or `Int8Rows`.
      values: float[nnz], one for each edge of `plan.csr`; None = the plan's own, which get no gradient, or ones.
      reduce: "mean" divides by the number of edges of the row. A row without edges gives zeros.
      implementation: None picks; a name never falls back.
      interpret: For tests of Pallas kernels where their chip is not: True, or `pltpu.InterpretParams()` for a TPU's.

    Returns:
      [N, F] in the dtype of h (float32 for `Int8Rows`), summed in float32, or float64 for float64.

    Raises:
      UserError: an argument has a wrong shape, dtype or name.
      UnsupportedError: the named implementation does not run here, or does not have the dtype.
    """
    op = "spmm"
    check_plan(op, plan)
    h, values = jax.tree.map(jnp.asarray, (h, values))
    _check_name(op, "reduce", reduce, ("sum", "mean"))
    out = _sum(op, plan, h, values, implementation, interpret)
    if reduce == "mean":
        out = out / jnp.maximum(plan.degrees(), 1).astype(out.dtype)[:, None]
    return out.astype(_result_dtype(h))


def sddmm(
    plan: SparsePlan,
    a: "Float[Array, 'rows features']",
    b: "Float[Array, 'columns features']",
    *,
    implementation: Literal["reference", "xla"] | None = None,
) -> "Float[Array, 'edges']":
    """out[e] = a[row of e] . b[column of e], for every edge e. Differentiable in reverse mode, any number of times.

    Args:
      plan: From `sparse_plan`.
      a: float[N, F].
      b: float[M, F].
      implementation: None picks.

    Returns:
      [nnz] in the dtype that a and b promote to, summed in float32, or float64 for float64.

    Raises:
      UserError: an argument has a wrong shape, dtype or name.
    """
    op = "sddmm"
    check_plan(op, plan)
    a, b = jnp.asarray(a), jnp.asarray(b)
    _check_features(op, a, plan.shape[0], "a", "rows")
    _check_features(op, b, plan.shape[1], "b")
    if a.shape[1] != b.shape[1]:
        raise UserError(f"{op}: a and b must have one number of features; got {a.shape[1]} and {b.shape[1]}.")
    if implementation is not None:
        _check_name(op, "implementation", implementation, ("reference", "xla"))
    if 0 in (plan.nnz, a.shape[1]):
        return jnp.zeros(plan.nnz, jnp.result_type(a, b))
    out = _edge_dots(_Call("reference" if implementation == "reference" else "xla"), plan, a, b)
    return out.astype(jnp.result_type(a, b))


def sampled_spmm(
    graph: Csr | Ell | SampledPlan,
    h: "Float[Array, 'columns features'] | Int8Rows",
    width: int | None = None,
    *,
    strategy: Strategy | None = None,
    prime: int | None = 577,
    seed: int = 0,
    rate: float | None = None,
    reduce: Literal["mean", "sum"] = "mean",
    values: "Float[Array, 'edges'] | None" = None,
    rescale: Literal["none", "degree"] = "none",
    self_loop_bias: float = 0.0,
    implementation: Implementation | None = None,
    interpret: "Interpret" = False,
) -> "Float[Array, 'rows features']":
    """`spmm` over at most `width` edges of each row, picked by a fixed rule (`sampling`).

        mean    out[r] = sum over picked e of values[e] * h[indices[e]] / (picked + self_loop_bias)
        sum     out[r] = sum over picked e of values[e] * h[indices[e]] * (edges / picked, for rescale="degree")

    Differentiable (in reverse mode) with respect to h and to `values` where they are given. An edge that is picked
    twice counts twice.

    Args:
      graph: A CSR, of which edges are picked now (one with NumPy arrays is checked; of others only shapes and dtypes
        are, and a column out of range is undefined); an ELL from `presample`; or a plan of one (`plan_sample`), which
        is fastest and has fast gradients.
      h: float[M, F], or `Int8Rows`.
      width: S, at least 1, for a CSR alone.
      strategy: Which rule, for a CSR alone; None = "bucket".
      prime: Of "fastrand", for a CSR alone.
      seed: For a CSR alone.
      rate: Of "rate" and "rate_stride", for a CSR alone.
      reduce: As above. A row without edges gives zeros for both.
      values: float[nnz], one for each edge of the CSR (the one that was sampled); None = those of the graph, or ones.
      rescale: Whether a sum is scaled up by the edges that were left out. A mean is not.
      self_loop_bias: >= 0: added to the divisor of a mean, 1.0 where the row itself is added elsewhere.
      implementation: None picks; a name never falls back.
      interpret: As in `spmm`.

    Returns:
      [N, F] in the dtype of h (float32 for `Int8Rows`), summed in float32, or float64 for float64.

    Raises:
      UserError: an argument has a wrong shape, dtype, value or name, or two do not go together.
      UnsupportedError: the named implementation does not run here, or does not have the dtype or sampled graphs.
    """
    op = "sampled_spmm"
    if not isinstance(graph, Csr | Ell | SampledPlan):
        raise UserError(
            f"{op}: graph must be a Csr, Ell or SampledPlan; got {type(graph).__name__}. "
            "All edges of a SparsePlan are summed by spmm."
        )
    h, values = jax.tree.map(jnp.asarray, (h, values))
    _check_features(op, h, graph.shape[1])
    _check_name(op, "reduce", reduce, ("mean", "sum"))
    _check_name(op, "rescale", rescale, ("none", "degree"))
    if reduce == "mean" and rescale != "none":
        raise UserError(f'{op}: rescale="degree" is for reduce="sum"; a mean is scaled already. Leave rescale out.')
    if not 0 <= self_loop_bias < np.inf or (self_loop_bias and reduce != "mean"):
        raise UserError(
            f'{op}: self_loop_bias must be at least 0, finite, and 0 for reduce="sum", which has no divisor; '
            f"got {self_loop_bias}."
        )
    sampling = EdgeSampling(strategy=strategy or "bucket", prime=prime, seed=seed, rate=rate)
    picks: Csr | Ell | SampledPlan = graph
    if isinstance(graph, Csr):
        graph, values = _checked(op, graph, width, values), None
        assert width is not None
        inside = _choose(op, implementation, h, _PICKS, interpret).name in _PICKING and not isinstance(h, Int8Rows)
        picks = graph if inside else pick(graph, width, sampling)
    elif width is not None or strategy is not None or sampling != EdgeSampling():
        raise UserError(
            f"{op}: width, strategy, prime, seed and rate are of a CSR; edges of an Ell or SampledPlan are picked "
            "already. Leave them out, or pass them to presample."
        )
    if isinstance(picks, Ell):
        picks.check_form()
    if values is not None and not isinstance(picks, Csr):
        _check_values(op, values, picks.csr_nnz)
        # Slots of a graph without edges are padding, and there is nothing to take their values from.
        values = values[jnp.asarray(picks.edges)] if picks.csr_nnz else jnp.zeros(picks.edges.shape, values.dtype)
    rule = None
    if isinstance(picks, Csr):
        degrees = (picks.indptr[1:] - picks.indptr[:-1]).astype(jnp.int32)
        assert width is not None
        rule, picked = _Rule(sampling, width), sampling.slots(degrees, width)
    else:
        degrees = picks.degrees
        picked = picks.plan.degrees() if isinstance(picks, SampledPlan) else picks.counts
    sums_in = jnp.float64 if _result_dtype(h) == jnp.float64 else jnp.float32
    picked, degrees = (count.astype(sums_in) for count in (picked, degrees))
    divisor = None
    if reduce == "mean":
        divisor = jnp.where(picked > 0, picked + self_loop_bias, 1)
    elif rescale == "degree":
        divisor = jnp.maximum(picked, 1) / jnp.maximum(degrees, 1)
    if isinstance(picks, SampledPlan):
        sums = _divide(_sum(op, picks.plan, h, values, implementation, interpret), divisor)
    else:
        edges: Csr | Ell = dataclasses.replace(picks, values=_either(values, picks.values))
        edges = jax.tree.map(jnp.asarray, edges)
        sums = _sum_picks(op, edges, rule, h, divisor, implementation, interpret)
    return sums.astype(_result_dtype(h))


def _sum(
    op: str,
    plan: SparsePlan,
    h: jax.Array | Int8Rows,
    values: jax.Array | None,
    implementation: str | None,
    interpret: "Interpret",
) -> jax.Array:
    """The sum of `spmm`, in the dtype in which it is made."""
    _check_features(op, h, plan.shape[1])
    if values is not None:
        _check_values(op, values, plan.nnz)
    call = _choose(op, implementation, h, interpret=interpret)
    codes, values = _fold_scales(h, plan.csr.indices, plan.csr.values, values)
    if 0 in (plan.nnz, *plan.shape, codes.shape[1]):
        return jnp.zeros((plan.shape[0], codes.shape[1]), _sum_dtype(codes))
    return _product(call, plan, values, codes)


def _checked(op: str, csr: Csr, width: int | None, values: jax.Array | None) -> Csr:
    """The graph of which edges are picked now, with the values that were given or else its own."""
    check_width(op, width)
    if values is not None:
        _check_values(op, values, csr.nnz)
    csr = csr.check() if isinstance(csr.indptr, np.ndarray) else csr.check_form()
    return jax.tree.map(jnp.asarray, dataclasses.replace(csr, values=_either(values, csr.values)))


def _sum_picks(
    op: str,
    graph: Csr | Ell,
    rule: "_Rule | None",
    h: jax.Array | Int8Rows,
    divisor: jax.Array | None,
    implementation: str | None,
    interpret: "Interpret",
) -> jax.Array:
    """Divided sums over the edges of an ELL, or over those that a rule picks from a CSR inside the kernel."""
    call = _choose(op, implementation, h, _PICKS, interpret)
    codes, values = h, graph.values
    if isinstance(graph, Ell):
        codes, values = _fold_scales(h, graph.indices, None, graph.values)
    assert isinstance(codes, jax.Array)
    if 0 in (graph.indices.size, *graph.shape, codes.shape[1]):
        return jnp.zeros((graph.shape[0], codes.shape[1]), _sum_dtype(codes))
    graph = dataclasses.replace(graph, values=None)
    if call.name in _KERNELS:
        return _kernel_sum(_KernelCall(call, rule, _result_dtype(h)), graph, values, codes, divisor)
    assert isinstance(graph, Ell)
    return _divide(_picked_sum(call, graph, values, codes), divisor)


def _divide(sums: jax.Array, divisor: jax.Array | None) -> jax.Array:
    return sums if divisor is None else sums / divisor[:, None]


@compat.custom_vjp(0)
def _product(call: _Call, plan: SparsePlan, values: jax.Array | None, h: jax.Array) -> jax.Array:
    csr = dataclasses.replace(plan.csr, values=_either(values, plan.csr.values))
    return _run_product(call, csr, plan.balance, h)


def _product_forward(call: _Call, plan: SparsePlan, values: jax.Array | None, h: jax.Array) -> tuple[jax.Array, _Saved]:
    return _product(call, plan, values, h), (plan, values, h)


def _product_backward(call: _Call, saved: _Saved, grads: jax.Array) -> _Gradients:
    plan, values, h = saved
    grads = jnp.asarray(grads)
    d_h = _like(_transposed(call, plan, values, grads), h) if jnp.issubdtype(h.dtype, jnp.floating) else None
    return None, None if values is None else _like(_edge_dots(_dots_of(call), plan, grads, h), values), d_h


_product.defvjp(_product_forward, _product_backward)


@compat.custom_vjp(0)
def _transposed(call: _Call, plan: SparsePlan, values: jax.Array | None, g: jax.Array) -> jax.Array:
    """out[m] = sum over the edges e of column m of values[e] * g[row of e]."""
    turned = dataclasses.replace(plan.transpose, values=transposed_values(plan, values))
    return _run_product(call, turned, plan.transpose_balance, g)


def _transposed_forward(
    call: _Call, plan: SparsePlan, values: jax.Array | None, g: jax.Array
) -> tuple[jax.Array, _Saved]:
    return _transposed(call, plan, values, g), (plan, values, g)


def _transposed_backward(call: _Call, saved: _Saved, grads: jax.Array) -> _Gradients:
    plan, values, g = saved
    grads = jnp.asarray(grads)
    d_values = None if values is None else _like(_edge_dots(_dots_of(call), plan, g, grads), values)
    return None, d_values, _like(_product(call, plan, values, grads), g)


_transposed.defvjp(_transposed_forward, _transposed_backward)


@compat.custom_vjp(0)
def _edge_dots(call: _Call, plan: SparsePlan, a: jax.Array, b: jax.Array) -> jax.Array:
    module = reference if call.name == "reference" else xla
    return module.sddmm(plan.csr, plan.row_ids, a, b, np.promote_types(_sum_dtype(a), _sum_dtype(b)))


def _edge_dots_forward(
    call: _Call, plan: SparsePlan, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[SparsePlan, jax.Array, jax.Array]]:
    return _edge_dots(call, plan, a, b), (plan, a, b)


def _edge_dots_backward(call: _Call, saved: tuple[SparsePlan, jax.Array, jax.Array], grads: jax.Array) -> _Gradients:
    plan, a, b = saved
    grads = jnp.asarray(grads)
    # One dtype for both, that of the sums: the product may not have the narrower one.
    wide_a, wide_b = (x.astype(grads.dtype) for x in (a, b))
    product = call if call.name == "reference" else _choose("sddmm", None, wide_b)
    d_a = _like(_product(product, plan, grads, wide_b), a)
    d_b = None
    if jnp.issubdtype(b.dtype, jnp.floating):
        d_b = _like(_transposed(product, plan, grads, wide_a), b)
    return None, d_a, d_b


_edge_dots.defvjp(_edge_dots_forward, _edge_dots_backward)


@compat.custom_vjp(0)
def _picked_sum(call: _Call, ell: Ell, values: jax.Array | None, h: jax.Array) -> jax.Array:
    return _backend(call.name).picked_sum(dataclasses.replace(ell, values=values), h, _sum_dtype(h))


def _picked_sum_forward(
    call: _Call, ell: Ell, values: jax.Array | None, h: jax.Array
) -> tuple[jax.Array, tuple[Ell, jax.Array | None, jax.Array]]:
    return _picked_sum(call, ell, values, h), (ell, values, h)


def _picked_sum_backward(call: _Call, saved: tuple[Ell, jax.Array | None, jax.Array], grads: jax.Array) -> _Gradients:
    ell, values, h = saved
    grads = jnp.asarray(grads)
    d_h, d_values = xla.picked_sum_gradients(dataclasses.replace(ell, values=values), h, grads, grads.dtype)
    known = jnp.issubdtype(h.dtype, jnp.floating)
    return None, None if values is None else _like(d_values, values), _like(d_h, h) if known else None


_picked_sum.defvjp(_picked_sum_forward, _picked_sum_backward)


@dataclasses.dataclass(frozen=True)
class _Rule:
    """How a kernel picks edges of a CSR."""

    sampling: EdgeSampling
    width: int


@dataclasses.dataclass(frozen=True)
class _KernelCall:
    """What is static in a kernel over picked edges: how it runs, which it picks itself, the dtype of its result."""

    call: _Call
    rule: _Rule | None
    dtype: jax.typing.DTypeLike


@compat.custom_vjp(0)
def _kernel_sum(
    static: _KernelCall, graph: Csr | Ell, values: jax.Array | None, h: jax.Array, divisor: jax.Array | None
) -> jax.Array:
    module, edges, options = _backend(static.call.name), dataclasses.replace(graph, values=values), static.call.options
    if static.rule is None:
        return module.sampled_sum(edges, h, divisor, static.dtype, **options)
    return module.picking_sum(edges, static.rule.sampling, static.rule.width, h, divisor, static.dtype, **options)


def _kernel_sum_forward(
    static: _KernelCall, graph: Csr | Ell, values: jax.Array | None, h: jax.Array, divisor: jax.Array | None
) -> tuple[jax.Array, "_KernelSaved"]:
    return _kernel_sum(static, graph, values, h, divisor), (graph, values, h, divisor)


def _kernel_sum_backward(static: _KernelCall, saved: "_KernelSaved", grads: jax.Array) -> _Gradients:
    graph, values, h, divisor = saved

    def apart(values: jax.Array | None, h: jax.Array) -> jax.Array:
        ell = dataclasses.replace(graph, values=values)
        if isinstance(ell, Csr):
            assert static.rule is not None
            # Picked once more, as the kernel did: picks are a function of the graph and the rule, and were not kept.
            ell = pick(ell, static.rule.width, static.rule.sampling)
        sums = _picked_sum(_Call("xla"), dataclasses.replace(ell, values=None), ell.values, h)
        return _divide(sums, divisor).astype(static.dtype)

    return None, *jax.vjp(apart, values, h)[1](jnp.asarray(grads)), None


_kernel_sum.defvjp(_kernel_sum_forward, _kernel_sum_backward)


def _run_product(call: _Call, csr: Csr, balance: Balance, h: jax.Array) -> jax.Array:
    return _backend(call.name).spmm(csr, balance, h, _sum_dtype(h), **call.options)


def _dots_of(call: _Call) -> _Call:
    return call if call.name == "reference" else _Call("xla")


def _sum_dtype(h: jax.Array) -> jax.typing.DTypeLike:
    return jnp.float64 if h.dtype == jnp.float64 else jnp.float32


def _like(array: jax.Array, other: jax.Array) -> jax.Array:
    return array.astype(other.dtype)


def _either(values: T | None, otherwise: T) -> T:
    return otherwise if values is None else values


def _result_dtype(h: jax.Array | Int8Rows) -> jax.typing.DTypeLike:
    return jnp.float32 if isinstance(h, Int8Rows) else h.dtype


def _fold_scales(
    h: jax.Array | Int8Rows, columns: jax.Array, own: jax.Array | None, given: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """(features [M, F], values or None): scales of int8 rows become part of the values."""
    if not isinstance(h, Int8Rows):
        return h, given
    scales, values = h.scales[columns], _either(given, own)
    return h.codes, scales if values is None else values.astype(scales.dtype) * scales


def _choose(
    op: str,
    implementation: str | None,
    h: jax.Array | Int8Rows,
    offered: tuple[str, ...] = tuple(_PLATFORMS),
    interpret: "Interpret" = False,
) -> _Call:
    """The implementation that was named, or else the first for the platform that has the case."""
    platform = compat.platform()
    if interpret is not False and implementation not in _KERNELS:
        raise UserError(
            f"{op}: interpret is for the kernels {' and '.join(_KERNELS)}; got implementation={implementation!r}. "
            "Leave interpret out, or name one of them."
        )
    if implementation is None:
        dtype = jnp.int8 if isinstance(h, Int8Rows) else h.dtype
        lacks = {"cusparse"} if dtype not in (jnp.float32, jnp.float64) else set()
        names = gpu_choices.order("sampled_spmm", "sampled_spmm") if platform == "gpu" else _ELSEWHERE[platform]
        return _Call(next(name for name in names if name in offered and name not in lacks))
    _check_name(op, "implementation", implementation, tuple(_PLATFORMS))
    if platform not in _PLATFORMS[implementation] and interpret is False:
        raise UnsupportedError(
            f'{op}: implementation="{implementation}" runs on {", ".join(_PLATFORMS[implementation])}; got {platform}. '
            "Leave implementation out."
        )
    if implementation not in offered:
        raise UnsupportedError(
            f'{op}: implementation="{implementation}" has no sum over picked edges. Pass plan_sample(presample(...)), '
            'or name "xla".'
        )
    return _Call(implementation, interpret)


def _backend(name: str) -> types.ModuleType:
    # jax.experimental.sparse and Pallas take long to import, and not every program needs them.
    return importlib.import_module(f"scalejax.kernels.sampled_spmm.{name}")


def _check_features(op: str, h: jax.Array | Int8Rows, rows: int, name: str = "h", what: str = "columns") -> None:
    array = h.codes if isinstance(h, Int8Rows) else h
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    if array.ndim != 2 or not (floating or isinstance(h, Int8Rows)):
        raise UserError(
            f"{op}: {name} must be a floating-point matrix, or Int8Rows where features are in int8; "
            f"got {array.dtype}{list(array.shape)}."
        )
    if array.shape[0] != rows:
        raise UserError(
            f"{op}: {name} must have {rows} rows, one for each of the {what} of the graph; got {array.shape[0]}. "
            "Rows of the graph are receivers, columns are senders."
        )
    if isinstance(h, Int8Rows) and (h.codes.dtype != jnp.int8 or h.scales.shape != (rows,)):
        raise UserError(
            f"{op}: {name} must hold int8 codes and {rows} scales; got {h.codes.dtype} and {list(h.scales.shape)}."
        )


def _check_values(op: str, values: jax.Array, edges: int | None) -> None:
    long = values.size if edges is None else edges
    if values.shape != (long,) or not jnp.issubdtype(values.dtype, jnp.floating):
        wanted = "one for each edge" if edges is None else f"of {edges}, one for each edge"
        raise UserError(
            f"{op}: values must be a floating-point vector {wanted}; got {values.dtype}{list(values.shape)}."
        )


def _check_name(op: str, argument: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        names = ", ".join(f'"{name}"' for name in known)
        raise UserError(f"{op}: {argument} must be one of {names}; got {value!r}.")
