"""A small language model in plain jax, for tests of strategies: a scanned, rematerialised stack of residual MLPs.

    x = embed[tokens];  x = x + relu(norm(x) up) down, L times;  logits = (norm(x) head)

Its parameters have the names, axes and hooks that models of the package have, so that what holds for it is about the
strategy and not about a model.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from scalejax.parallel import fsdp
from scalejax.parallel import mesh as meshes

V, E, F, L = 16, 8, 32, 3


def axes(layers=L, dim=E, hidden=F):
    """Path -> (logical axes, shape)."""
    return {
        "embed/weight": (("vocabulary", "embed"), (V, dim)),
        "layers/norm/scale": (("layers", "norm"), (layers, dim)),
        "layers/mlp/up": (("layers", "embed", "hidden"), (layers, dim, hidden)),
        "layers/mlp/down": (("layers", "hidden", "embed"), (layers, hidden, dim)),
        "final_norm/scale": (("norm",), (dim,)),
        "head/weight": (("embed", "vocabulary"), (dim, V)),
    }


def params(dtype=np.float64, seed=0, **sizes):
    """Random parameters as NumPy arrays."""
    rng = np.random.default_rng(seed)
    return {
        path: (
            np.ones(shape) + 0.1 * rng.normal(size=shape) if "norm" in path else rng.normal(size=shape) * 0.3
        ).astype(dtype)
        for path, (_, shape) in axes(**sizes).items()
    }


def batch(rows=16, length=4, seed=1):
    """Tokens, the tokens after them, and uneven weights: a mean of means would be wrong."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, (rows, length + 1), dtype=np.int32)
    weights = (rng.random((rows, length)) < np.linspace(0.1, 0.9, rows)[:, None]).astype(np.float64)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def whole(block):
    return block


def loss(params, batch, key, gather=whole, *, remat="full", scan=jax.lax.scan):
    """(sum of cross-entropies, number of targets, {"correct": targets that were guessed}).

    `scan` runs the layers, as `jax.lax.scan` does.
    """
    del key
    policy = {"full": jax.checkpoint_policies.nothing_saveable, "none": None}[remat]
    adapt = getattr(gather, "remat", None)
    policy = policy if adapt is None else adapt(policy)
    stacked = {path: p for path, p in params.items() if path.startswith("layers/")}

    def body(x, layer):
        layer = gather(layer)
        hidden = jax.nn.relu(norm(x, layer["layers/norm/scale"]) @ layer["layers/mlp/up"])
        return x + hidden @ layer["layers/mlp/down"], None

    if policy is not None:
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)
    table = gather({"embed/weight": params["embed/weight"]})["embed/weight"]
    x, _ = scan(body, table[batch["tokens"]], stacked)
    last = gather({path: params[path] for path in ("final_norm/scale", "head/weight")})
    logits = norm(x, last["final_norm/scale"]) @ last["head/weight"]
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    weights = batch["weights"].astype(logits.dtype)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)[..., 0]
    correct = (logits.argmax(-1) == batch["targets"]) * weights
    return -(chosen * weights).sum(), weights.sum(), {"correct": correct.sum()}


def norm(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale[None, None]


without_remat = functools.partial(loss, remat="none")


def lowered(strategy, mesh, *, layers=L, dim=E, hidden=F, rows=16, length=4, parts=1, rules=None, loss=loss):
    """The gradients of a batch in float32 under a strategy, for `compile` or for what collectives it states."""
    described = axes(layers, dim, hidden)
    specs = {p.name: p.spec for p in fsdp.place(described, strategy, mesh=mesh, rules=rules)}
    params = {
        path: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, specs[path]))
        for path, (_, shape) in described.items()
    }
    batch = {
        name: jax.ShapeDtypeStruct(
            (rows, length), np.float32 if name == "weights" else np.int32, sharding=meshes.batch_sharding(mesh)
        )
        for name in ("tokens", "targets", "weights")
    }
    return jax.jit(fsdp.gradients(loss, strategy, mesh=mesh, specs=specs, parts=parts)).lower(params, batch)
