"""The benchmark of exchanges: both routes give the same bits, and a route that does not stops it."""

import jax
import jax.numpy as jnp
import pytest

from scalejax import bench
from scalejax.bench import harness
from scalejax.bench.cases import sptt_exchange

SMALL = sptt_exchange.Size(tables=8, rows=40, dim=16, ids=2, batch=32)


def contest(case, against="flat"):
    return sptt_exchange.contest(case, against, SMALL, jax.devices()[:8])


@pytest.mark.slow
@pytest.mark.compiled_as_users_do
def test_both_routes_give_the_same_bits_and_run():
    made = contest("table_row_wise-2x4")
    made.check()
    made.ours(1)
    made.peer(1)
    assert made.figures().keys() == {f"{p}{e}_ms" for p in ("ids", "vectors", "gradients") for e in ("", "_flat")}


@pytest.mark.slow
def test_a_route_that_loses_a_bit_is_not_timed(monkeypatch):
    lookup = sptt_exchange.EmbeddingCollection.lookup

    def lossy(self, state, features):
        found, routing = lookup(self, state, features)
        if self.exchange.route == "flat":
            found["f3"] = jnp.nextafter(found["f3"], jnp.inf)
        return found, routing

    monkeypatch.setattr(sptt_exchange.EmbeddingCollection, "lookup", lossy)
    with pytest.raises(harness.OutputsDiffer, match=r"after 0 steps these differ in their bits: f3$"):
        contest("table_wise-4x2").check()


def test_it_asks_for_the_devices_that_it_takes(monkeypatch):
    assert bench.cpu_devices("sptt_exchange") == 8
    assert bench.cpu_devices("planner") is None
    monkeypatch.setattr(jax, "devices", lambda *_: [None] * 2)
    with pytest.raises(sptt_exchange.UserError, match=r"needs 8 devices; jax has 2\. Set JAX_NUM_CPU_DEVICES=8"):
        sptt_exchange.prepare("table_wise-2x4", None)
