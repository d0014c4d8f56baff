import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel import xla_flags
from scalejax.plan import topology

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def lowered():
    mesh, _ = topology.make_mesh(topology.parse("v6e:2x2"), None)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    return jax.jit(lambda x: x @ x.T).lower(x)


@pytest.mark.parametrize("name", [name for name, s in xla_flags.SETS.items() if s.platform == "tpu"])
def test_the_compiler_for_tpus_knows_the_options(lowered, name):
    lowered.compile(compiler_options=xla_flags.compiler_options([name], "tpu"))


def test_all_sets_for_tpus_may_be_used_together(lowered):
    lowered.compile(compiler_options=xla_flags.compiler_options(xla_flags.SETS, "tpu"))


def test_an_option_that_does_not_exist_is_an_error_there(lowered):
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={"xla_tpu_go_faster": True})


@pytest.mark.parametrize("name", ["v5e:4x4", "v5e:4x8"])
def test_an_exchange_beside_a_sum_compiles_with_the_options_that_are_left(name):
    """On larger slices of v5e the compiler has no asynchronous exchange, and refuses the whole program."""
    mesh, _ = topology.make_mesh(topology.parse(name), None)
    spec = P(mesh.axis_names)

    def exchange_and_sum(x):
        axes = mesh.axis_names
        return jax.lax.all_to_all(x[:, 0], axes, 0, 0, tiled=True), jax.lax.psum(x[:, 1], axes)

    run = jax.shard_map(exchange_and_sum, mesh=mesh, in_specs=spec, out_specs=(spec, P()), check_vma=False)
    x = jax.ShapeDtypeStruct((mesh.size**2, 2, 256), jnp.int32, sharding=NamedSharding(mesh, spec))
    lowered = jax.jit(run).lower(x)
    given = xla_flags.compiler_options(["tpu-async-all-to-all"], "tpu")
    kept = xla_flags.compiler_options(["tpu-async-all-to-all"], "tpu", mesh.devices.flat)
    lowered.compile(compiler_options=kept)
    if kept != given:
        with pytest.raises(jax.errors.JaxRuntimeError, match="not supported on limited ICI"):
            lowered.compile(compiler_options=given)
    assert (kept != given) is (name == "v5e:4x8")
