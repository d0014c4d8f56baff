"""Sparse times dense for graphs: exact, over sampled edges, and the operations on edges that go with them."""

from scalejax.kernels.sampled_spmm.api import sampled_spmm as sampled_spmm
from scalejax.kernels.sampled_spmm.api import sddmm as sddmm
from scalejax.kernels.sampled_spmm.api import spmm as spmm
from scalejax.kernels.sampled_spmm.csr import Csr as Csr
from scalejax.kernels.sampled_spmm.features import Int8Rows as Int8Rows
from scalejax.kernels.sampled_spmm.features import quantize_rows as quantize_rows
from scalejax.kernels.sampled_spmm.sampling import PRIMES as PRIMES
from scalejax.kernels.sampled_spmm.sampling import Ell as Ell
from scalejax.kernels.sampled_spmm.sampling import presample as presample
from scalejax.kernels.sampled_spmm.sampling import sampling_rate as sampling_rate
from scalejax.kernels.sampled_spmm.softmax import segment_softmax as segment_softmax
from scalejax.kernels.sampled_spmm.sparse_plan import SampledPlan as SampledPlan
from scalejax.kernels.sampled_spmm.sparse_plan import SparsePlan as SparsePlan
from scalejax.kernels.sampled_spmm.sparse_plan import plan_sample as plan_sample
from scalejax.kernels.sampled_spmm.sparse_plan import sparse_plan as sparse_plan
