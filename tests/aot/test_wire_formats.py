"""Block formats on the wire, compiled for TPUs: what collectives carry there, and that the codes compile at all."""

import jax
import pytest
import residual_stack
from embedding_cases import device_features, schema_of

from scalejax.parallel import mesh as meshes
from scalejax.parallel.compression import codec
from scalejax.parallel.embedding.collection import EmbeddingCollection
from scalejax.parallel.embedding.config import TableConfig
from scalejax.parallel.embedding.plan.sharding_plan import Exchange
from scalejax.parallel.fsdp import Fsdp
from scalejax.plan import explain_sharding, topology
from scalejax.plan.compiled.collectives import total

pytestmark = [pytest.mark.aot, pytest.mark.slow]

CHIP = "v5e:2x4"


def payloads(compiled, mesh):
    """{kind: bytes of a step} of all collectives."""
    found = explain_sharding(compiled, mesh)
    assert all(c.trip_count_known for c in found)
    return {c.kind: c.bytes for c in total(found)}


def test_parameters_and_gradients_travel_as_bytes():
    layers, dim, hidden = 2, 256, 512
    mesh, _ = topology.make_mesh(topology.parse(CHIP), meshes.parse_mesh("fsdp=8"))
    strategy = Fsdp(form="explicit", gather_format="bdr_mx9", reduce_format="mxfp6_e2m3", replicate_below=dim + 1)
    sizes = {"layers": layers, "dim": dim, "hidden": hidden, "rows": 8, "length": 16}
    found = payloads(residual_stack.lowered(strategy, mesh, **sizes).compile(), mesh)
    inside, outside = layers * 2 * dim * hidden, 2 * residual_stack.V * dim
    assert set(found) == {"all-gather", "all-to-all", "all-reduce"}
    assert found["all-gather"] == (2 * inside + outside) * 18 // 16  # FULL_SHARD: layers twice
    assert found["all-to-all"] == (inside + outside) * 25 // 32
    # Norms and single numbers; no gradient of a matrix is summed in float32.
    assert found["all-reduce"] == 4 * ((layers + 1) * dim + 3)


@pytest.mark.parametrize(
    ("forward", "backward", "row_bytes", "gradient_bytes"),
    [
        # Scaled types have a scale in float32 beside each vector.
        ("int8", "float8_e5m2", 64 + 4, 64 + 4),
        ("bdr_mx6", "mxfp8_e4m3", codec.encoded_bytes(64, "bdr_mx6"), codec.encoded_bytes(64, "mxfp8_e4m3")),
    ],
)
def test_rows_and_gradients_of_tables_travel_as_bytes(forward, backward, row_bytes, gradient_bytes):
    dim = 64
    mesh, _ = topology.make_mesh(topology.parse(CHIP))
    tables = tuple(TableConfig(name=f"t{i}", rows=100_000, dim=dim, features=(f"f{i}",)) for i in range(2))

    def exchanged(**wires):
        on = EmbeddingCollection(tables=tables, mesh=mesh, exchange=Exchange(**wires))
        schema = schema_of({f"f{i}": 1 for i in range(2)}, 100_000)
        features = device_features(on, None, 256 * mesh.size, schema)

        def step(state, features):
            embedded, routing = on.lookup(state, features)
            return on.update(state, routing, jax.tree.map(lambda x: 0.001 * x, embedded))

        compiled = jax.jit(step, donate_argnums=0).lower(on.abstract_state(), features).compile()
        return payloads(compiled, mesh)["all-to-all"]

    slots, rest = divmod(exchanged(), 4 + 2 * 4 * dim)  # an id, a row and a gradient each
    assert rest == 0
    assert slots >= 2 * 256
    assert exchanged(forward=forward, backward=backward) == slots * (4 + row_bytes + gradient_bytes)
