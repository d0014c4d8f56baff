import types

import jax
import jax.numpy as jnp
import pytest

from scalejax.errors import UserError
from scalejax.parallel import xla_flags


@pytest.mark.default_cases("cpu-plain-products", "gpu-latency-hiding")
@pytest.mark.parametrize("name", [name for name, s in xla_flags.SETS.items() if s.platform != "tpu"])
def test_xla_knows_the_options_for_cpus_and_gpus(name):
    # Every XLA has them, whatever it compiles for; tests/aot asks the TPU's compiler for its own.
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(2))
    lowered.compile(compiler_options=xla_flags.compiler_options([name], xla_flags.SETS[name].platform))


def test_an_option_that_does_not_exist_is_an_error_there():
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x + 1).lower(jnp.ones(2)).compile(compiler_options={"xla_gpu_go_faster": True})


def test_plain_products_are_in_no_fusion():
    def products(options):
        lowered = jax.jit(lambda a, b: jnp.tanh(a @ b)).lower(jnp.ones((256, 128)), jnp.ones((128, 64)))
        return "__ynn_fusion" in lowered.compile(compiler_options=options).as_text()

    assert products({}) != products(xla_flags.compiler_options(["cpu-plain-products"], "cpu"))


def test_sets_of_other_platforms_are_left_out():
    names = ("tpu-data-parallel-overlap", "gpu-deterministic")
    assert xla_flags.compiler_options(names, "gpu") == {"xla_gpu_exclude_nondeterministic_ops": True}
    assert set(xla_flags.compiler_options(names, "tpu")) == {
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "xla_tpu_data_parallel_opt_different_sized_ops",
    }
    assert xla_flags.compiler_options(names, "cpu") == {}


def test_refuses_unknown_names_and_sets_that_disagree():
    with pytest.raises(UserError, match=r"there is no set 'gpu-latency-hidng'. Did you mean 'gpu-latency-hiding'\?"):
        xla_flags.compiler_options(["gpu-latency-hidng"], "gpu")
    with pytest.raises(UserError, match="'gpu-large-messages' and 'gpu-separate-all-reduces' disagree about"):
        xla_flags.compiler_options(["gpu-large-messages", "gpu-separate-all-reduces"], "gpu")


@pytest.mark.parametrize(
    ("kind", "slices", "known"),
    [
        ("TPU v5 lite", (16,), True),
        ("TPU v5 lite", (32,), False),
        ("TPU v5 lite", (16, 16), True),
        ("TPU v6 lite", (64,), True),
    ],
)
def test_a_set_is_left_out_where_the_compiler_refuses_it(kind, slices, known):
    devices = [
        types.SimpleNamespace(device_kind=kind, slice_index=n) for n, size in enumerate(slices) for _ in range(size)
    ]
    found = xla_flags.compiler_options(["tpu-async-all-to-all"], "tpu", devices)
    assert found == ({"xla_tpu_enable_async_all_to_all": True} if known else {})
