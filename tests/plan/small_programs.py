"""Small steps for plans: a stand-in with the interface of a train program, and one shard_map with every collective."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from scalejax.parallel.mesh import AXES, BATCH_AXES


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Fields as in the state of a run, as far as a plan reads them."""

    step: jax.Array
    params: dict
    optimizer: dict
    tables: dict


@dataclasses.dataclass(frozen=True)
class MlpProgram:
    """Rows looked up by all_to_all over every device, a stack of L layers in a scan, parameters sharded over `fsdp`.

    Forward and backward of the layers: 3 products of 2 * batch * width**2 FLOPs each.
    """

    mesh: Mesh
    batch: int = 64
    width: int = 128
    layers: int = 3
    rows: int = 1024

    def _leaf(self, shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(*spec)))

    def abstract_state(self):
        def weights():
            return {"w": self._leaf((self.layers, self.width, self.width), jnp.float32, None, "fsdp")}

        tables = {
            "stacks": {
                "t": {
                    "rows": self._leaf((self.rows, self.width), jnp.float32, AXES),
                    "sum": self._leaf((self.rows,), jnp.float32, AXES),
                }
            }
        }
        return State(self._leaf((), jnp.int32), weights(), weights(), tables)

    def abstract_batch(self):
        devices = self.mesh.size
        # [shard, destination, slot]: every shard asks every device for batch / devices**2 rows.
        return {"ids": self._leaf((devices, devices, max(1, self.batch // devices**2)), jnp.int32, AXES)}

    def repeated_step(self):
        return self.train_step, (self.abstract_state(), self.abstract_batch())

    @functools.cached_property
    def train_step(self):
        def exchange(x):
            return jax.lax.all_to_all(x, AXES, 0, 0, tiled=True)

        def lookup(rows, ids):
            wanted = exchange(ids[0])  # destination slot -> source slot
            return exchange(rows[wanted]).reshape(-1, rows.shape[-1])

        everywhere = P(AXES)
        lookup = jax.shard_map(lookup, mesh=self.mesh, in_specs=(everywhere, everywhere), out_specs=everywhere)

        def loss(w, rows, ids):
            def layer(x, w):
                return jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(self.mesh, P(BATCH_AXES))), None

            x, _ = jax.lax.scan(layer, lookup(rows, ids), w)
            return jnp.mean(x**2)

        def step(state, batch):
            stack = state.tables["stacks"]["t"]
            grad_w, grad_rows = jax.grad(loss, argnums=(0, 1))(state.params["w"], stack["rows"], batch["ids"])
            velocity = 0.9 * state.optimizer["w"] + grad_w
            total = stack["sum"] + jnp.mean(grad_rows**2, axis=1)
            rows = stack["rows"] - 0.1 * grad_rows * jax.lax.rsqrt(total + 1e-8)[:, None]
            return State(
                state.step + 1,
                {"w": state.params["w"] - 0.1 * velocity},
                {"w": velocity},
                {"stacks": {"t": {"rows": rows, "sum": total}}},
            )

        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state())
        return jax.jit(step, donate_argnums=0, out_shardings=shardings)


def every_collective(mesh, rows):
    """A shard_map over the axes "data" and "model" that uses each collective once, and a permute in a scan of 5.

    Returns the jitted function and its argument, float32[rows, 128] sharded over both axes.
    """
    ring = mesh.shape["data"]

    def body(x):
        def shift(carry, _):
            return jnp.sin(jax.lax.ppermute(carry, "data", [(i, (i + 1) % ring) for i in range(ring)])), None

        shifted, _ = jax.lax.scan(shift, x, None, length=5)
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        scattered = jax.lax.psum_scatter(gathered * gathered, "data", tiled=True)
        exchanged = jax.lax.all_to_all(x.reshape(mesh.size, -1, 128), ("data", "model"), 0, 0, tiled=True)
        summed = jax.lax.psum(jnp.sum(shifted), "model")
        return scattered + shifted + exchanged.reshape(x.shape) + summed, jax.lax.pmax(x, ("data", "model"))

    spec = P(("data", "model"))
    function = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=(spec, P()))
    return jax.jit(function), jax.ShapeDtypeStruct((rows, 128), jnp.float32, sharding=NamedSharding(mesh, spec))


def expected_collectives(data, model, rows):
    """(kind, axis) -> (bytes, count) of `every_collective` on a device, from the definitions."""
    shard = rows * 128 * 4 // (data * model)
    return {
        ("collective-permute", "data"): (5 * shard, 5),
        ("all-gather", "data"): (data * shard, 1),
        ("reduce-scatter", "data"): (data * shard, 1),
        ("all-to-all", "data+model"): (shard, 1),
        ("all-reduce", "model"): (4, 1),
        ("all-reduce", "data+model"): (shard, 1),
    }
