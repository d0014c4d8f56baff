"""FLOPs of matrix products and convolutions, counted from the traced program.

XLA's cost analysis counts a loop body once and a Pallas kernel as nothing. Here the jaxpr is walked: a scan multiplies
by its length, a shard_map by the devices that run its body, a kernel counts what it declares or, failing that, its body
times its grid. The sum is *global*: the work of all devices, none of it counted twice however it is sharded.
Element-wise work is left out: it is bound by memory, which the plan counts separately.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import cast

import jax
import jax.numpy as jnp
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class MatmulFlops:
    """FLOPs of all devices, two a multiply-accumulate.

    Attributes:
      by_kind: FLOPs by (dtype of the inputs, precision); precision is "default", "high" or "highest".
      unbounded_loops: Loops with matrix work but without a static trip count, whose bodies count once.
    """

    by_kind: Mapping[tuple[str, str], int]
    unbounded_loops: int

    @property
    def total(self) -> int:
        """The FLOPs of products of all kinds."""
        return sum(self.by_kind.values())


def count(traced: jax.stages.Traced | core.ClosedJaxpr) -> MatmulFlops:
    """Counts the FLOPs of a traced function.

    Args:
      traced: What `jitted.trace(*args)` returned, or a closed jaxpr.
    """
    closed = traced if isinstance(traced, core.ClosedJaxpr) else traced.jaxpr
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    unbounded = _walk(closed.jaxpr, 1, sums)
    return MatmulFlops(dict(sums), unbounded)


def has_convolutions(traced: core.ClosedJaxpr) -> bool:
    """Whether a convolution is anywhere in a traced function."""

    def inside(jaxpr: core.Jaxpr) -> bool:
        return any(
            eqn.primitive.name == "conv_general_dilated" or any(map(inside, _inner(eqn.params))) for eqn in jaxpr.eqns
        )

    return inside(traced.jaxpr)


def _walk(jaxpr: core.Jaxpr, times: int, sums: collections.Counter[tuple[str, str]]) -> int:
    """Adds the FLOPs of a jaxpr that runs `times` times; returns the number of loops without a trip count."""
    unbounded = 0
    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            sums[_kind(eqn)] += times * _dot(eqn)
        elif name == "conv_general_dilated":
            sums[_kind(eqn)] += times * _convolution(eqn)
        elif name in ("ragged_dot", "ragged_dot_general"):
            sums[_kind(eqn)] += times * _ragged(eqn)
        elif name == "scan":
            unbounded += _walk(params["jaxpr"].jaxpr, times * params["length"], sums)
        elif name == "while":
            before = sums.total()
            unbounded += _walk(params["body_jaxpr"].jaxpr, times, sums)
            unbounded += sums.total() > before
        elif name == "cond":
            # The most expensive branch: a step may take any of them. Of forms for platforms that of all others: one of
            # a platform may compute more than there is to compute.
            trials, platforms = [], params.get("branches_platforms") or ()
            general = [params["branches"][platforms.index(None)]] if None in platforms else params["branches"]
            for branch in general:
                trial: collections.Counter[tuple[str, str]] = collections.Counter()
                trials.append((_walk(branch.jaxpr, times, trial), trial))
            more, most = max(trials, key=lambda t: t[1].total())
            unbounded += more
            sums.update(most)
        elif name == "shard_map":
            # Axes that are manual already were multiplied by at the shard_map around this one.
            devices = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
            unbounded += _walk(_open(params["jaxpr"]), times * devices, sums)
        elif name == "pallas_call":
            unbounded += _pallas(eqn, times, sums)
        else:  # jit, remat, custom_vjp_call, closed_call, ...: whatever holds programs runs them once
            for inner in _inner(params):
                unbounded += _walk(inner, times, sums)
    return unbounded


def _pallas(eqn: core.JaxprEqn, times: int, sums: collections.Counter[tuple[str, str]]) -> int:
    estimate = eqn.params.get("cost_estimate")
    if estimate is not None and estimate.flops:
        sums[_kind(eqn)] += times * int(estimate.flops)
        return 0
    grid = [g for g in eqn.params["grid_mapping"].grid if isinstance(g, int)]
    return _walk(_open(eqn.params["jaxpr"]), times * math.prod(grid), sums)


def _kind(eqn: core.JaxprEqn) -> tuple[str, str]:
    dtypes = [_array(v).dtype for v in eqn.invars if hasattr(v.aval, "dtype")]
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    dtype = (floats or dtypes)[0].name
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        precision = precision[0]
    if precision is None:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    name = getattr(precision, "name", str(precision or "default")).lower()
    if name in ("highest", "float32", "bf16_bf16_f32_x6", "f32_f32_f32"):
        return dtype, "highest"
    return dtype, "high" if name in ("high", "tensorfloat32", "bf16_bf16_f32_x3") else "default"


def _array(of: core.Var | core.Literal) -> jax.ShapeDtypeStruct:
    return cast("jax.ShapeDtypeStruct", of.aval)


def _dot(eqn: core.JaxprEqn) -> int:
    (contract, _), _ = eqn.params["dimension_numbers"]
    left = _array(eqn.invars[0]).shape
    return 2 * math.prod(_array(eqn.outvars[0]).shape) * math.prod(left[d] for d in contract)


def _convolution(eqn: core.JaxprEqn) -> int:
    kernel, numbers = _array(eqn.invars[1]).shape, eqn.params["dimension_numbers"]
    features = numbers.rhs_spec[0]  # output features; the other dimensions are contracted per output element
    per_output = math.prod(size for d, size in enumerate(kernel) if d != features)
    # A gradient of a strided convolution spreads its input: of so many places of a filter one meets data.
    holes = math.prod(eqn.params["lhs_dilation"])
    return 2 * math.prod(_array(eqn.outvars[0]).shape) * per_output // holes


def _ragged(eqn: core.JaxprEqn) -> int:
    """Each row meets one group, so all rows together cost one dense product, whichever dimension is ragged."""
    return 2 * math.prod(_array(eqn.invars[0]).shape) * _array(eqn.outvars[0]).shape[-1]


def _open(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _inner(params: Mapping[str, object]) -> Iterator[core.Jaxpr]:
    for name, value in params.items():
        if name in ("update_jaxpr", "update_consts"):  # the combiner of a scatter, run per element
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.ClosedJaxpr | core.Jaxpr):
                yield _open(item)
