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
