"""What a step over a graph is compiled from where no device holds it: the shapes and shardings that training places."""

from typing import Any

import jax
import pytest
from changes import changed
from small_graph_run import gcn, write_graph

from scalejax.errors import UserError
from scalejax.models.graph import GcnConfig, GraphSageConfig, Sampling
from scalejax.parallel.mesh import MeshShape, make_mesh
from scalejax.plan.compiled import memory
from scalejax.train.batches.convert import to_device
from scalejax.train.runs import binding

MINI = {"normalization": "none", "fanouts": (3, 2), "batch_size": 16}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "every edge": (GcnConfig(hidden=8), {}),
    "drawn edges": (GcnConfig(hidden=8, train_sampling=Sampling(width=2)), {}),
    "draws in turn": (GcnConfig(hidden=8, train_sampling=Sampling(width=2, prime=None, draws=3)), {}),
    "mini-batches": (GraphSageConfig(hidden=8), MINI),
    "mini-batches by weights": (GcnConfig(hidden=8), MINI | {"normalization": "symmetric"}),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_graph(tmp_path_factory.mktemp("graph") / "graph.npz")


def _experiment(path: str, name: str, mesh: MeshShape | None) -> Any:
    model, changes = MODELS[name]
    experiment = gcn(path, model=model, placement__mesh=mesh)
    return changed(experiment, data=changed(experiment.data, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, MeshShape(fsdp=4, tensor=2)], ids=["one", "eight"])
@pytest.mark.parametrize("name", MODELS)
def test_abstract_batches_are_those_that_training_places(name: str, mesh: MeshShape | None, path: str) -> None:
    experiment = _experiment(path, name, mesh)
    data, devices = experiment.data.build(), make_mesh(mesh)
    program = binding.bind(experiment, data.schema, devices, data)
    abstract = binding.bind(experiment, data.schema, devices, data, abstract=True)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(abstract.constants))
    batches = program.task.train_batches(data, devices, 0)
    placed, planned = to_device(next(batches), program), abstract.abstract_batch()

    def same(planned: Any, placed: Any) -> None:
        assert (planned.shape, planned.dtype) == (placed.shape, placed.dtype)
        assert planned.sharding.is_equivalent_to(placed.sharding, placed.ndim)

    jax.tree.map(same, planned, placed)  # of one structure, or it raises
    # What the plan traced for the one holds for the other.
    wanted = program.train_step.lower(program.abstract_state(), placed).as_text()
    assert abstract.train_step.lower(abstract.abstract_state(), planned).as_text() == wanted


@pytest.mark.parametrize("name", ["every edge", "drawn edges"])
def test_a_graph_that_is_trained_on_and_scored_is_counted_once(name: str, path: str) -> None:
    experiment = _experiment(path, name, None)
    data = experiment.data.build()
    program = binding.bind(experiment, data.schema, make_mesh(None), data)
    found = memory.arguments_by_kind(
        program.abstract_state(),
        binding.bind(experiment, data.schema, make_mesh(None), data, abstract=True).abstract_batch(),
    )
    arrays = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(program.constants)}
    assert found["constants"] == sum(arrays.values())
    assert found["batch"] == 2 * 30 * 4 + 4  # nodes, labels, epoch


def test_a_plan_without_data_says_what_it_lacks(path: str) -> None:
    experiment = _experiment(path, "every edge", None)
    program = binding.bind(experiment, experiment.data.schema(), make_mesh(None))
    with pytest.raises(UserError, match=r"sizes that only the data know.*planned_from = 'data'"):
        program.abstract_batch()
