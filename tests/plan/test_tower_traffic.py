"""Steps of models over towers on eight devices, as compiled: vectors cross between hosts by the formula of DMT."""

import pytest
import tower_traffic
from changes import changed

from scalejax.configs.recsys import _flights, dlrm
from scalejax.parallel.mesh import MeshShape, make_mesh


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "towers"), [(2, "TOWERS"), (4, "TOWERS"), (2, "TWO_TOWERS")])
def test_pooled_vectors_alone_cross_between_hosts(hosts, towers):
    """With as many features a device, and with 4 and 5 of 8 on hosts of 4, where blocks are of the larger size."""
    small = dlrm.smoke_towers()
    data = small.data if towers == "TWO_TOWERS" else dlrm.flights_towers().data
    experiment = changed(small, model__towers=getattr(_flights, towers), data=changed(data, batch_size=64))
    mesh = f"replica={hosts},fsdp={8 // hosts}"
    experiment = tower_traffic.by_towers(experiment, f"h100:{hosts}x{8 // hosts}", kinds=("table_wise",), mesh=mesh)
    on = make_mesh(MeshShape(replica=hosts, fsdp=8 // hosts))
    found = tower_traffic.read(tower_traffic.compiled_for(experiment, on), experiment, hosts, 8 // hosts)
    tower_traffic.check_between(found, planes=2)
    tower_traffic.check_within(found, planes=2)
    assert found.payload == 4 * 8 * (64 // 8) * 16  # 9 features take the room of 16
