"""DLRM over towers on two slices of a TPU: between these travel ids, what leaves the towers, and dense gradients."""

import pytest
from changes import changed

from scalejax import plan
from scalejax.configs.recsys import dlrm
from scalejax.parallel.fsdp import Fsdp

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]


@pytest.mark.parametrize("form", ["implicit", "explicit"])
def test_what_leaves_the_towers_is_all_that_crosses_between_slices_of_their_vectors(form):
    experiment = changed(dlrm.flights_towers(), tables__exchange__route="towers", strategy=Fsdp(form=form))
    found = plan.plan(experiment, "v5p:2x2x1,slices=2")
    assert found.mesh == {"replica": 2, "fsdp": 4}
    examples, features, model = experiment.data.batch_size // 8, 16, experiment.model
    vectors = examples * features * model.table_dim * 2 / model.compression  # in bfloat16, as TPUs compute
    ids = examples * features * 3 * 4  # row, bag and device
    crossing = [c for c in found.collectives if c.kind == "all-to-all" and "replica" in c.axes]
    assert all(c.axes == ("replica",) for c in crossing)
    assert sum(c.bytes for c in crossing) == 2 * vectors + ids
    assert found.roofline.dcn_s > 0
