"""The kernels of sparse products compiled for every chip: alone, and for features of more than 2^31 elements."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import cuda_topology
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.kernels import sampled_spmm as ops
from scalejax.plan import topology

pytestmark = [
    pytest.mark.aot,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

CHIPS = ["v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]
NODES, EDGES, WIDTH, FEATURES = 2**16, 2**20, 64, 256
LARGE = 2**23 + 8  # nodes; times 256 features is beyond 2^31


def _tpu(name):
    found = topology.make_mesh(topology.parse(name), None)[0].devices.reshape(-1)[:1]
    return Mesh(found, ("x",), axis_types=(AxisType.Auto,))


def _compile(mesh, function, *shapes):
    def place(a):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P()))

    return cuda_topology.compile_for(mesh, function, *jax.tree.map(place, shapes))


def _shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def _ell(weighted, width=WIDTH):
    indices, counts = _shape(NODES, width, dtype=jnp.int32), _shape(NODES, dtype=jnp.int32)
    values = _shape(NODES, width) if weighted else None
    return ops.Ell(indices, indices, counts, counts, values, shape=(NODES, NODES))


def _csr(weighted, nodes=NODES):
    values = _shape(EDGES) if weighted else None
    return ops.Csr(_shape(NODES + 1, dtype=jnp.int32), _shape(EDGES, dtype=jnp.int32), values, shape=(NODES, nodes))


def _small_plan():
    """Of a graph whose rows are in every bin, and cut."""
    degrees = np.asarray([0, 3, 10, 60, 200, 1000, 70000])
    indices = np.arange(degrees.sum(), dtype=np.int32) % 512
    indptr = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    return ops.sparse_plan(ops.Csr(indptr, indices, shape=(degrees.size, 512)))


def _features(dtype, nodes=NODES, features=FEATURES):
    if dtype == jnp.int8:
        return ops.Int8Rows(_shape(nodes, features, dtype=jnp.int8), _shape(nodes))
    return _shape(nodes, features, dtype=dtype)


def _sampled(implementation, **options):
    return lambda graph, h: ops.sampled_spmm(graph, h, implementation=implementation, **options)


def _exact_with_gradient(implementation):
    def step(plan, h):
        out, pull = jax.vjp(lambda h: ops.spmm(plan, h, reduce="mean", implementation=implementation), h)
        return pull(out)

    return step


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, jnp.float32) for name in CHIPS), *((CHIPS[0], dtype) for dtype in (jnp.bfloat16, jnp.int8))],
)
def test_sums_of_picked_edges_compile_for_a_tpu(name, dtype):
    weighted = dtype == jnp.bfloat16
    options = {"reduce": "sum", "rescale": "degree"} if weighted else {"self_loop_bias": 1.0}
    compiled = _compile(_tpu(name), _sampled("pallas_tpu", **options), _ell(weighted), _features(dtype))
    assert "tpu_custom_call" in compiled.as_text()
    if dtype == jnp.float32:
        # Picked edges by blocks, and no copy of the features, whose width is a multiple of 128.
        assert compiled.memory_analysis().temp_size_in_bytes < NODES * FEATURES * 4 / 2


@pytest.mark.parametrize("name", CHIPS[::3])
@pytest.mark.parametrize(("width", "features"), [(5, 41), (1000, 602)])
def test_any_width_and_number_of_features_compiles_for_a_tpu(name, width, features):
    compiled = _compile(
        _tpu(name), _sampled("pallas_tpu"), _ell(False, width), _features(jnp.float32, features=features)
    )
    assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.parametrize("name", CHIPS[::3])
def test_exact_products_and_their_gradients_compile_for_a_tpu(name):
    plan = _small_plan()
    compiled = _compile(_tpu(name), _exact_with_gradient("pallas_tpu"), plan, _features(jnp.bfloat16, nodes=512))
    assert compiled.as_text().count("tpu_custom_call") >= 2


def test_a_tpu_addresses_features_of_more_than_2_31_elements():
    ell = ops.Ell(*jax.tree.leaves(_ell(False)), shape=(NODES, LARGE))
    compiled = _compile(_tpu("v5p:2x2x1"), _sampled("pallas_tpu"), ell, _features(jnp.float32, nodes=LARGE))
    assert "tpu_custom_call" in compiled.as_text()


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize(
    ("dtype", "strategy"), [(jnp.float32, "bucket"), (jnp.bfloat16, "fastrand"), (jnp.int8, "fastrand")]
)
def test_sampling_compiles_into_the_sum_for_hopper(dtype, strategy):
    weighted = dtype == jnp.bfloat16
    options = {"reduce": "sum", "rescale": "degree"} if weighted else {"self_loop_bias": 1.0}
    program = _sampled("pallas_gpu", width=WIDTH, strategy=strategy, **options)
    compiled = _compile(cuda_topology.mesh(1), program, _csr(weighted), _features(dtype))
    if dtype != jnp.int8:  # scales of the picked edges become weights first
        assert compiled.memory_analysis().temp_size_in_bytes < NODES * WIDTH * 4 / 8


@cuda_topology.needs_cuda_compiler
@pytest.mark.parametrize(
    ("dtype", "features"), [(jnp.float32, 41), (jnp.bfloat16, 602), (jnp.float16, 41), (jnp.int8, 602)]
)
def test_sums_of_picked_edges_compile_for_hopper(dtype, features):
    _compile(cuda_topology.mesh(1), _sampled("pallas_gpu"), _ell(True), _features(dtype, features=features))


@cuda_topology.needs_cuda_compiler
def test_exact_products_and_their_gradients_compile_for_hopper():
    plan = _small_plan()
    compiled = _compile(
        cuda_topology.mesh(1), _exact_with_gradient("pallas_gpu"), plan, _features(jnp.bfloat16, nodes=512)
    )
    # A kernel for each bin of rows, in both directions; those of the transpose have more edges than the first three.
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') >= len(plan.balance.bins) + 1


@cuda_topology.needs_cuda_compiler
def test_a_gpu_addresses_features_of_more_than_2_31_elements():
    program = _sampled("pallas_gpu", width=WIDTH, strategy="fastrand")
    compiled = _compile(cuda_topology.mesh(1), program, _csr(False, LARGE), _features(jnp.bfloat16, nodes=LARGE))
    assert compiled.memory_analysis().temp_size_in_bytes < NODES * WIDTH * 4 / 8
