"""Times the parts of `wukong_step`'s case b1024 one by one, and matrix products of its sizes alone.

python benchmarks/wukong_step_parts.py
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.bench import training_step, workloads, wukong_step
from scalejax.nn.norm import layer_norm
from scalejax.parallel import mesh as meshes
from scalejax.train import convert, metrics, program
from scalejax.train.experiment import Experiment


def milliseconds(call: Callable[[], Any], repeats: int = 50) -> float:
    """Median time of a call, after two that are not counted."""
    times = []
    for _ in range(repeats + 2):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times[2:])


def main() -> None:
    schema, batches = workloads.for_case("b1024", None)
    experiment = Experiment(
        model=wukong_step.FLIGHTS,
        data=training_step._Given(batch_size=len(batches[0])),
        steps=1_000_000,
        optimizer=training_step.ADAM,
        row_optimizer=training_step.ROWS,
    )
    built = program.build(experiment, schema, meshes.make_mesh(experiment.mesh, jax.devices()[:1]))
    state, batch, key = built.init(), convert.to_device(batches[0], built), jax.random.key(0)
    look_up = jax.jit(lambda tables: built._embed(tables, batch.features))
    embedded, routing = look_up(state.tables)
    gradients = jax.jit(lambda params, embedded: built._gradients(params, embedded, batch, key))
    _, logits, dense, rows = gradients(state.params, embedded)
    adam = jax.jit(built.transformation.update)
    update = jax.jit(lambda tables, routing, rows: built.collection.update(tables, routing, rows, jnp.float32(1)))
    measure = jax.jit(lambda sums, logits: metrics.update(sums, logits, batch.labels, batch.weights))
    print(f"lookup                       {milliseconds(lambda: look_up(state.tables)):.2f} ms")
    print(f"forward and backward         {milliseconds(lambda: gradients(state.params, embedded)):.2f} ms")
    print(f"Adam                         {milliseconds(lambda: adam(dense, state.optimizer, state.params)):.2f} ms")
    print(f"rows, tables copied          {milliseconds(lambda: update(state.tables, routing, rows)):.2f} ms")
    print(f"metric sums                  {milliseconds(lambda: measure(state.metrics, logits)):.2f} ms")
    for m, k, n in ((1024, 204, 128), (1024, 128, 128), (1024, 272, 128), (2048, 2048, 2048)):
        a, b, multiply = jnp.ones((m, k)), jnp.ones((k, n)), jax.jit(jnp.matmul)
        rate = 2 * m * k * n / milliseconds(lambda f=multiply, a=a, b=b: f(a, b)) / 1e6
        print(f"product {m} x {k} x {n}: {rate:.0f} GFLOP/s")
    for shape in ((17, 1024, 16), (1024, 204)):
        x, one = jnp.ones(shape), jnp.ones((1,) * (len(shape) - 1) + shape[-1:])
        both = jax.jit(lambda x, one: jax.vjp(lambda *args: layer_norm(*args, 1e-5), x, one, one)[1](x))
        print(f"LayerNorm over {shape}: {milliseconds(lambda f=both, x=x, one=one: f(x, one)):.2f} ms, both ways")


if __name__ == "__main__":
    main()
