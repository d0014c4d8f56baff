"""Bytes by kind from abstract state, and what the compiler says when there is no room."""

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from plan import small_programs

from scalejax import chips
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan.compiled import memory

GIB = 2**30
REAL_MESSAGE = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (512.00G) exceeds "
    "available HBM (15.75G)."
)


@pytest.fixture(scope="module")
def program():
    return small_programs.MlpProgram(make_mesh(MeshShape(replica=2, fsdp=4)), batch=64, width=128, layers=3, rows=1024)


def test_counts_one_devices_share_by_kind(program):
    found = memory.arguments_by_kind(program.abstract_state(), program.abstract_batch())
    assert found == {
        "other state": 4,  # the step
        "parameters": 3 * 128 * 128 * 4 // 4,  # sharded over fsdp, whole on replica
        "optimizer state": 3 * 128 * 128 * 4 // 4,
        "tables": 1024 * 128 * 4 // 8,  # rows over all devices
        "table optimizer state": 1024 * 4 // 8,
        "batch": 8 * 8 * 4 // 8,
    }


def test_the_compiler_agrees_on_the_arguments_of_a_real_step(program):
    state, batch = program.abstract_state(), program.abstract_batch()
    compiled = program.train_step.lower(state, batch).compile()
    found = memory.of_compiled(state, batch, compiled, chips.V5E)
    assert found.fits
    assert "layout padding" not in found.bytes_per_chip  # a CPU does not tile
    assert "outputs" not in found.bytes_per_chip or found.bytes_per_chip["outputs"] < 256  # donated, but for pointers
    arguments = sum(memory.arguments_by_kind(state, batch).values())
    assert compiled.memory_analysis().argument_size_in_bytes == arguments
    assert list(found.bytes_per_chip) == [k for k in memory.KINDS if k in found.bytes_per_chip]


def test_temporaries_are_what_the_rest_leaves_of_the_most_that_lives_at_one_time(program):
    """As of a step that fits although the buffers of its temporaries sum to more than a chip has."""
    stats = types.SimpleNamespace(
        argument_size_in_bytes=3 * GIB,
        output_size_in_bytes=4 * GIB,
        alias_size_in_bytes=3 * GIB,
        temp_size_in_bytes=40 * GIB,
        generated_code_size_in_bytes=GIB,
        peak_memory_in_bytes=12 * GIB,
    )
    compiled = types.SimpleNamespace(memory_analysis=lambda: stats)
    found = memory.of_compiled(program.abstract_state(), program.abstract_batch(), compiled, chips.V5E)
    assert found.bytes_per_chip["temporaries"] == 8 * GIB
    assert found.total_bytes == 13 * GIB


def test_a_chip_of_two_devices_holds_both_shares(program):
    state, batch = program.abstract_state(), program.abstract_batch()
    error = jax.errors.JaxRuntimeError(REAL_MESSAGE)
    one = memory.of_failure(state, batch, error, chips.V5E).bytes_per_chip
    two = memory.of_failure(state, batch, error, chips.TPU7X).bytes_per_chip
    assert two == {kind: 2 * count for kind, count in one.items()}


def test_out_of_memory_becomes_a_plan_that_does_not_fit(program):
    state, batch = program.abstract_state(), program.abstract_batch()
    found = memory.of_failure(state, batch, jax.errors.JaxRuntimeError(REAL_MESSAGE), chips.V5E)
    assert not found.fits
    assert found.message == REAL_MESSAGE
    assert found.total_bytes == 512 * 1024**3
    assert found.total_bytes > found.hbm_bytes


def test_any_other_failure_is_raised(program):
    error = jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")
    with pytest.raises(jax.errors.JaxRuntimeError, match="RET_CHECK"):
        memory.of_failure(program.abstract_state(), program.abstract_batch(), error, chips.V5E)


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (REAL_MESSAGE, 512 * 1024**3),
        ("RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Used 20.50G of 15.75G hbm.", int(20.5 * 1024**3)),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: 1.25T exceeds available HBM (95.73G)", int(1.25 * 1024**4)),
        ("RESOURCE_EXHAUSTED: no figure", None),
    ],
)
def test_reads_what_the_program_needs(message, needed):
    assert memory.needed_bytes(message) == needed


def test_keys_and_replicated_leaves_count_whole():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=NamedSharding(mesh, P()))
    assert memory.bytes_per_device(key) == 8  # threefry: two uint32
    assert memory.bytes_per_device(jax.ShapeDtypeStruct((3, 5), jnp.bfloat16)) == 30
