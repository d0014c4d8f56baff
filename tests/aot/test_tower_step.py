"""A model over towers on two slices of a TPU: what crosses between them is what the formula of DMT says."""

import pytest
import tower_traffic
from changes import changed

from scalejax import plan
from scalejax.configs.recsys import dlrm
from scalejax.models.recsys.towers import DlrmTower
from scalejax.parallel.fsdp import Fsdp
from scalejax.plan.compiled.collectives import total

pytestmark = [pytest.mark.aot, pytest.mark.timeout(900)]

SLICES, HOSTS, IN_HOST = "v5p:2x2x2,slices=2", 2, 8


@pytest.mark.parametrize("kind", ["table_wise", pytest.param("table_row_wise", marks=pytest.mark.slow)])
def test_pooled_vectors_alone_cross_between_slices(kind):
    experiment = tower_traffic.by_towers(dlrm.flights_towers(), SLICES, kinds=(kind,))
    compiled = plan.plan(experiment, SLICES)
    assert compiled.mesh == {"replica": HOSTS, "fsdp": IN_HOST}
    found = tower_traffic.read(compiled.collectives, experiment, HOSTS, IN_HOST)
    if kind == "table_wise":
        tower_traffic.check_between(found, planes=2)
        tower_traffic.check_within(found, planes=2)
    else:  # the number of its bag goes with each id; rows stay in the slice
        tower_traffic.check_between(found, planes=3)
        assert found.within.bytes > 2 * found.payload
    # Of the dense part, shards of gradients and of what is gathered again cross, and nothing of the tables.
    dense = 4 * experiment.model.task(experiment.data.schema()).dense_parameters()
    rest = sum(c.bytes for c in compiled.collectives if "replica" in c.axes and c.kind != "all-to-all")
    assert rest < 2 * dense / IN_HOST + 2**16


@pytest.mark.parametrize("form", [pytest.param("implicit", marks=pytest.mark.slow), "explicit"])
@pytest.mark.parametrize("compression", [4, *(pytest.param(c, marks=pytest.mark.slow) for c in (1, 2, 8, 16))])
def test_what_leaves_the_towers_alone_crosses_between_slices(compression, form):
    """In bfloat16, in which modules compute on a TPU: half of the bytes, divided by c."""
    recipe = changed(dlrm.flights_towers(), strategy=Fsdp(form=form))
    modules = (DlrmTower(dim=recipe.model.table_dim // compression),)
    experiment = tower_traffic.by_towers(
        changed(recipe, model__modules=modules), SLICES, route="towers", kinds=("table_wise",)
    )
    assert experiment.model.compression == compression
    compiled = plan.plan(experiment, SLICES)
    found = tower_traffic.read(compiled.collectives, experiment, HOSTS, IN_HOST)
    tower_traffic.check_between(found, planes=2, compression=compression, itemsize=2)


@pytest.mark.slow
def test_one_exchange_over_both_slices_compiles_too_and_every_device_talks_to_all():
    compiled = plan.plan(tower_traffic.by_towers(dlrm.flights_towers(), SLICES, route="flat"), SLICES)
    (moved,) = (c for c in total(compiled.collectives) if c.kind == "all-to-all")
    assert (moved.axes, moved.group_size, moved.count) == (("replica", "fsdp"), HOSTS * IN_HOST, 3)
