"""Inference beside a template that was read once, against the same U-Net: milliseconds a picture, in one run.

python benchmarks/pairwise_inference.py > table.md

Both models are compiled for a batch of pictures and called in turns; the ratio is the median of those of neighbours.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from scalejax.bench import machine
from scalejax.data.images.schema import ImageSchema
from scalejax.models.vision.pairwise_unet import PairwiseUNetConfig
from scalejax.models.vision.unet import UNetConfig
from scalejax.numerics.dtypes import Dtypes

ROUNDS = 15
CASES = (((16, 32, 64, 128), 128, 4), ((32, 64, 128, 256, 512), 128, 2), ((32, 64, 128, 256, 512), 256, 1))


def seconds(function: Callable[..., object], *inputs: object) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(function(*inputs))
    return time.perf_counter() - begun


def measure(widths: tuple[int, ...], side: int, batch: int) -> str:
    schema = ImageSchema(
        height=side,
        width=side,
        channels=1,
        dtype="float32",
        mean=(0.0,),
        std=(1.0,),
        classes=("background", "caudate", "putamen", "thalamus", "hippocampus"),
    )
    unet = UNetConfig(widths=widths)
    plain = unet.build(schema, nnx.Rngs(0), Dtypes())
    model = PairwiseUNetConfig(unet=unet).build(schema, nnx.Rngs(0), Dtypes())
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.normal(size=(batch, side, side, 1)), jnp.float32)
    masks = jnp.asarray(rng.integers(0, 5, (1, side, side)), jnp.int32)
    (one, state), (two, beside) = nnx.split(plain), nnx.split(model)
    first = jax.jit(lambda s, x: nnx.merge(one, s)(x)[0])
    read = jax.jit(lambda s, x, m: nnx.merge(two, s).read(x, m))
    second = jax.jit(lambda s, x, t: nnx.merge(two, s).compare(x, t)[0])
    template = read(beside, images[:1], masks)
    for function, inputs in ((first, (state, images)), (second, (beside, images, template))):
        seconds(function, *inputs)
    times = [(seconds(first, state, images), seconds(second, beside, images, template)) for _ in range(ROUNDS)]
    reading = statistics.median(seconds(read, beside, images[:1], masks) for _ in range(ROUNDS))
    a, b = (1e3 * statistics.median(column) / batch for column in zip(*times, strict=True))
    ratio = statistics.median(y / x for x, y in times)
    return (
        f"| {', '.join(map(str, widths))} | {side} | {batch} | {a:.1f} | {b:.1f} | {ratio:.2f} | {1e3 * reading:.1f} |"
    )


def main() -> None:
    print(f"{machine.device_name(jax.devices()[0])}, {machine.today()}, commit {machine.commit()}\n")
    print("| widths | side | batch | U-Net, ms a picture | beside a template that was read | ratio | to read it, ms |")
    print("|---|---|---|---|---|---|---|")
    for case in CASES:
        print(measure(*case), flush=True)


if __name__ == "__main__":
    main()
