"""A training step in native FP8 beside bfloat16: wide linear layers, forward, backward and update.

python benchmarks/gpu_fp8.py [--json FILE] [--width 8192]     # on a machine with a GPU that has FP8 (Ada, Hopper, ...)
python benchmarks/gpu_fp8.py --smoke                           # anywhere: tiny sizes, on a CPU in float32

One JSON object a line. A step takes the gradient of a stack of square linear layers with ReLU, in bfloat16 but for the
products, and subtracts it from the weights. FP8 operands are quantized in the step, each under a scale from its own
magnitudes: one for the tensor, or one for each row that is summed over; e4m3 forward, e5m2 for gradients. Checked
first: that the compiled step multiplies FP8 by a library call, or by a kernel of XLA's own, three times a layer but for
the first, whose input needs no gradient; where it does not, the exit status is 1 and nothing is timed. Steps alternate,
bfloat16, FP8, bfloat16, ...; the ratio is the median of neighbours. FLOPs are those of the products.
"""

import argparse
import collections
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from scalejax.bench import machine
from scalejax.numerics.quantized.products import mx_dot_general
from scalejax.numerics.quantized.rules import QuantizationRule, Scales

CONTRACT = (((1,), (0,)), ((), ()))
LIBRARY = "__cublas$lt$matmul$f8"
SCALES: tuple[Scales, ...] = ("tensor", "rows")


def step_of(scales: Scales | None) -> Callable[[tuple[jax.Array, ...], jax.Array], tuple[jax.Array, ...]]:
    """A step of gradient descent; None = bfloat16."""
    rule = None
    if scales is not None:
        rule = QuantizationRule(
            weight_qtype="fp8_e4m3", act_qtype="fp8_e4m3", bwd_qtype="fp8_e5m2", scales=scales, implementation="native"
        )

    def loss(weights: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jax.nn.relu(x @ weight if rule is None else mx_dot_general(x, weight, CONTRACT, rule=rule))
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(weights: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
        gradients = jax.grad(loss)(weights, x)
        return tuple(w - (1e-3 * g).astype(w.dtype) for w, g in zip(weights, gradients, strict=True))

    return step


def float8_products(text: str) -> dict[str, int]:
    """Products of FP8 operands in a compiled program: calls of the library, and dots that XLA made kernels of."""
    dots = re.findall(r"%\S+ = \S+ dot\(([^)]*)\)", text)
    shapes = dict(re.findall(r"%?(\S+?)(?: =|:) (f8e\w+)\[", text))
    own = [d for d in dots if all(name.split()[-1].lstrip("%") in shapes for name in d.split(", "))]
    calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text))
    return {"library": calls[LIBRARY], "kernels": len(own)}


def timed(call: Callable[[Any], Any], state: Any, repeats: int) -> tuple[float, Any]:
    begun = time.perf_counter()
    for _ in range(repeats):
        state = call(state)
    jax.block_until_ready(state)
    return (time.perf_counter() - begun) / repeats, state


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.smoke:
        print("gpu_fp8.py: jax sees no GPU here. --smoke runs tiny sizes anywhere.", file=sys.stderr)
        return 2
    if options.smoke:
        options.width, options.rows, options.layers, options.turns = 128, 64, 2, 2
    width, rows, layers = options.width, options.rows, options.layers
    common = {"name": "gpu_fp8", "device": machine.device_name(device), "jax": jax.__version__}
    common |= {"date": machine.today(), "commit": machine.commit(), "width": width, "rows": rows, "layers": layers}
    if options.smoke:
        common["smoke"] = "sizes tiny: times mean nothing"
    lines = []

    def line(**fields: Any) -> None:
        lines.append(json.dumps({**common, **fields}))
        print(lines[-1], flush=True)

    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = tuple(
        (jax.random.normal(key, (width, width)) * (2 / width) ** 0.5).astype(jnp.bfloat16) for key in keys[1:]
    )
    x = jax.random.normal(keys[0], (rows, width)).astype(jnp.bfloat16)
    products = 3 * layers - 1
    flops = 2 * rows * width * width * products
    plain: Any = jax.jit(step_of(None)).lower(weights, x).compile()
    wrong = False
    for scales in SCALES:
        compiled: Any = jax.jit(step_of(scales)).lower(weights, x).compile()
        found = float8_products(compiled.as_text())
        seen = device.platform != "gpu" or sum(found.values()) == products
        line(case=f"products, {scales}", **found, wanted=products, wrong=not seen)
        wrong |= not seen
        if not seen:
            continue
        ours, theirs, pairs = weights, weights, []
        for turn in range(options.turns + 1):
            bf16_s, theirs = timed(lambda w: plain(w, x), theirs, 3)
            fp8_s, ours = timed(lambda w, c=compiled: c(w, x), ours, 3)
            if turn:  # the first warms up
                pairs.append((bf16_s, fp8_s))
        ratios = [a / b for a, b in pairs]
        bf16_s, fp8_s = (statistics.median(times) for times in zip(*pairs, strict=True))
        line(
            case=f"step, {scales}", bf16_s=bf16_s, fp8_s=fp8_s, ratio=statistics.median(ratios),
            bf16_tflops_per_s=flops / bf16_s / 1e12, fp8_tflops_per_s=flops / fp8_s / 1e12, flops=flops,
        )  # fmt: skip
    if options.json:
        with open(options.json, "w") as file:
            file.writelines(text + "\n" for text in lines)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
