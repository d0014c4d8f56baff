"""The models of the benchmark of DHEN's step."""

import pytest

from scalejax.bench import workloads
from scalejax.bench.cases import dhen_step


@pytest.mark.parametrize(("case", "model"), [("b1024", dhen_step.FLIGHTS), ("criteo", dhen_step.CRITEO)])
def test_layers_return_as_many_vectors_as_they_get(case, model):
    """The peer has no projection of what passes beside the modules."""
    schema, _ = workloads.for_case(case, None)
    assert model.input_vectors(schema) == model.output_vectors(schema)
