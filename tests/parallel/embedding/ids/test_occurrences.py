"""Addresses of rows near the end of what int32 can number: no array is made, the arithmetic alone is checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scalejax.errors import UserError
from scalejax.parallel import mesh as meshes
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import MOST_ROWS, TableConfig
from scalejax.parallel.embedding.ids.occurrences import locate
from scalejax.parallel.embedding.plan.row_numbers import exists, row_numbers


@pytest.mark.parametrize("rows", [MOST_ROWS + 1, 2**31, 3 * 10**9])
def test_more_rows_than_int32_can_number_are_refused(rows):
    with pytest.raises(UserError, match=r"'huge': rows must be at most 2,130,706,432.*id map.*several tables"):
        TableConfig(name="huge", rows=rows, dim=4, features=("f",))


@pytest.mark.default_cases("5")
@pytest.mark.parametrize("devices", [3, 5, 8])
def test_the_last_rows_of_the_largest_table_have_the_addresses_of_whole_numbers(devices):
    sizes = (7, 2, MOST_ROWS)  # third in its stack, so that row 0 is on device 2
    tables = tuple(TableConfig(name=f"t{i}", rows=n, dim=4, features=(f"f{i}",)) for i, n in enumerate(sizes))
    mesh = meshes.make_mesh(meshes.MeshShape(), jax.devices()[:devices])
    (stack,) = EmbeddingCollection(tables=tables, mesh=mesh).stacks
    member = stack.members[2]
    assert member.shift == 2
    ids = [MOST_ROWS - 1 - i for i in range(3 * devices)]
    device, local = locate(member, jnp.asarray(ids, jnp.int32))
    assert device.tolist() == [(i + 2) % devices for i in ids]
    before = sum(-(-n // devices) for n in sizes[:2])
    assert local.tolist() == [before + i // devices for i in ids]
    # And back; what lies above the last row of a device is no row.
    last = stack.local_rows - 1
    for rank in range(devices):
        own = np.asarray(local)[np.asarray(device) == rank]
        numbers, found = row_numbers(stack, jnp.asarray(own), rank)
        assert numbers.tolist() == [2] * len(own)
        assert found.tolist() == [i for i in ids if (i + 2) % devices == rank]
        number = (last - before) * devices + (rank - 2) % devices
        assert exists(stack, jnp.asarray([last], jnp.int32), rank).tolist() == [number < MOST_ROWS]
