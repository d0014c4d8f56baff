"""The plan of a graph, made once on the host for every product with it and for their derivatives."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from scalejax.errors import UserError
from scalejax.kernels.sampled_spmm.balance import FEW_SLOTS, Balance, align_balances, balance_rows
from scalejax.kernels.sampled_spmm.csr import Csr, Stored, index_dtype
from scalejax.kernels.sampled_spmm.gathers import take
from scalejax.kernels.sampled_spmm.sampling import Ell

_PADDED = 1.25
"""How many times more slots than edges picks may have to be summed slot after slot."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparsePlan:
    """A graph on the device, ready for products in both directions.

    Attributes:
      csr: The matrix.
      transpose: Its transpose; the edges of a column in the order of their rows.
      permutation: int[nnz]: which edge of `csr` each edge of `transpose` is.
      row_ids: int[nnz], non-decreasing: row of each edge of `csr`.
      balance: Bins of the rows of `csr`.
      transpose_balance: Bins of the rows of `transpose`.
    """

    csr: Csr
    transpose: Csr
    permutation: Stored
    row_ids: Stored
    balance: Balance
    transpose_balance: Balance

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return self.csr.shape

    @property
    def nnz(self) -> int:
        """The number of edges."""
        return self.csr.nnz

    def degrees(self) -> jax.Array:
        """int[N]: edges of each row."""
        return self.csr.indptr[1:] - self.csr.indptr[:-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampledPlan:
    """Picked edges as a graph of their own, for repeated products and for training.

    Attributes:
      plan: Of the picked edges; its CSR has as many edges as were picked.
      edges: int[picked]: position of each in the CSR from which they were picked.
      degrees: int32[N]: edges of the row there.
      csr_nnz: Edges there; None = not known.
    """

    plan: SparsePlan
    edges: Stored
    degrees: Stored
    csr_nnz: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        return self.plan.shape


def sparse_plan(csr: Csr) -> SparsePlan:
    """Checks a graph and plans products with it, on the host.

    Args:
      csr: With arrays that have values, NumPy or JAX.

    Raises:
      UserError: it is no graph, or not well formed (`Csr.check`).
    """
    return jax.tree.map(jnp.asarray, plan_on_host(csr))


def plan_on_host(csr: Csr) -> SparsePlan:
    """The plan of `sparse_plan`, its arrays NumPy's."""
    if not isinstance(csr, Csr):
        raise UserError(
            f"plan: csr must be a Csr; got {type(csr).__name__}. "
            "Make one with Csr.from_edges or Csr.from_scipy; picked edges are planned by plan_sample."
        )
    csr.check()
    dtype = index_dtype(csr.nnz, csr.shape)
    indptr = np.asarray(csr.indptr).astype(dtype)
    indices = np.asarray(csr.indices).astype(dtype)
    values = None if csr.values is None else np.asarray(csr.values)
    rows, columns = csr.shape
    row_ids = np.repeat(np.arange(rows, dtype=dtype), np.diff(indptr))
    permutation = np.argsort(indices, kind="stable").astype(dtype)
    ends = np.zeros(columns + 1, dtype)
    np.cumsum(np.bincount(indices, minlength=columns), out=ends[1:])
    turned = Csr(ends, row_ids[permutation], None if values is None else values[permutation], shape=(columns, rows))
    return SparsePlan(
        Csr(indptr, indices, values, shape=csr.shape),
        turned,
        permutation,
        row_ids,
        balance_rows(indptr),
        balance_rows(ends),
    )


def plan_sample(ell: Ell) -> SampledPlan:
    """Plans products with picked edges, on the host: what inference that repeats, and every training, should use.

    Raises:
      UserError: `ell` is no Ell, traced, or not well formed.
    """
    if not isinstance(ell, Ell):
        raise UserError(f"plan_sample: ell must be an Ell; got {type(ell).__name__}. Pass presample(csr, width).")
    made = sparse_plan(ell.to_csr())
    if ell.width <= FEW_SLOTS and 0 < ell.shape[0] * ell.width <= _PADDED * made.nnz:
        made = dataclasses.replace(made, balance=dataclasses.replace(made.balance, slots=ell.width))
    edges = np.asarray(ell.edges)[np.asarray(ell.filled())]
    return SampledPlan(made, jnp.asarray(edges), jnp.asarray(ell.degrees), ell.csr_nnz)


def check_plan(op: str, plan: object) -> None:
    """Raises a UserError where it is none."""
    if not isinstance(plan, SparsePlan):
        raise UserError(
            f"{op}: plan must be a SparsePlan; got {type(plan).__name__}. Pass sparse_plan(csr); picked edges are for "
            "sampled_spmm."
        )


def stack_plans(plans: Sequence[SparsePlan]) -> SparsePlan:
    """Plans of matrices of one shape, NumPy's, as one with a first axis more, on the host.

    All get room for the edges of the largest. Edges that are added belong to no row; products skip them, `sddmm` and
    `segment_softmax` are not for such plans.
    """
    most = max(made.nnz for made in plans)

    def room(made: SparsePlan) -> SparsePlan:
        def of_edges(array: Stored) -> Stored:
            return None if array is None else np.concatenate([array, np.zeros(most - made.nnz, array.dtype)])

        def of_matrix(csr: Csr) -> Csr:
            return Csr(csr.indptr, of_edges(csr.indices), of_edges(csr.values), shape=csr.shape)

        return dataclasses.replace(
            made,
            csr=of_matrix(made.csr),
            transpose=of_matrix(made.transpose),
            permutation=of_edges(made.permutation),
            row_ids=of_edges(made.row_ids),
        )

    rows = align_balances([made.balance for made in plans])
    columns = align_balances([made.transpose_balance for made in plans])
    aligned = [
        dataclasses.replace(room(made), balance=of_rows, transpose_balance=of_columns)
        for made, of_rows, of_columns in zip(plans, rows, columns, strict=True)
    ]
    return jax.tree.map(lambda *arrays: np.stack(arrays), *aligned)


def transposed_values(plan: SparsePlan, values: jax.Array | None) -> jax.Array | None:
    """[nnz] in the order of the edges of the transpose; None = those of the plan."""
    return plan.transpose.values if values is None else take(values, plan.permutation)
