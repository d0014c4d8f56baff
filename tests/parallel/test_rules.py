import pytest
from jax.sharding import PartitionSpec as P

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel import rules
from scalejax.parallel.mesh import MeshShape
from scalejax.parallel.rules import Rules

FSDP_TENSOR = Rules(axes=(("input", ("fsdp",)), ("embed", ("fsdp",)), ("hidden", ("tensor",))))


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(MeshShape(fsdp=4, tensor=2))


def test_named_axes_are_sharded_and_the_rest_replicated(mesh):
    assert rules.REPLICATED.spec(("input", "hidden"), (8, 6), mesh) == P()
    assert rules.FSDP.spec(("input", "hidden"), (8, 6), mesh) == P("fsdp")
    assert FSDP_TENSOR.spec(("input", "hidden"), (8, 6), mesh) == P("fsdp", "tensor")
    assert FSDP_TENSOR.spec((None, "hidden"), (8, 6), mesh) == P(None, "tensor")


def test_a_dimension_that_does_not_divide_is_replicated_and_reported(mesh):
    described = FSDP_TENSOR.describe(
        {"a": (("input", "hidden"), (7, 6)), "b": (("input",), (8,)), "c": (("input", "embed"), (4, 4))}, mesh
    )
    assert [p.spec for p in described] == [P(None, "tensor"), P("fsdp"), P("fsdp")]
    assert described[0].reason == "input: 7 does not divide by fsdp=4"
    assert described[1].reason == ""
    assert described[2].reason == "embed: fsdp shards an earlier dimension"


def test_fsdp_takes_the_first_dimension_that_divides(mesh):
    assert rules.FSDP.spec(("input", "hidden"), (7, 8), mesh) == P(None, "fsdp")


def test_several_mesh_axes_shard_one_dimension(mesh):
    both = Rules(axes=(("input", ("fsdp", "tensor")),))
    assert both.spec(("input",), (16,), mesh) == P(("fsdp", "tensor"))


def test_refuses_unknown_mesh_axes_and_double_entries():
    with pytest.raises(UserError, match="mesh axis 'model'; mesh axes are replica"):
        Rules(axes=(("input", ("model",)),))
    with pytest.raises(UserError, match="named twice"):
        Rules(axes=(("input", ()), ("input", ())))
