"""Repeats a block over stacked parameters, one scanned and rematerialised body.

Every parameter of the block has a leading axis of layers. A scan compiles the block once, whatever the depth, and the
parameters of one layer are fetched inside its body, where they can be gathered from shards and dropped again.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
from flax import nnx

Remat = Literal["none", "full", "dots"]
"""What the backward pass finds: "none" all that the forward pass computed, "full" the input of each layer, "dots" also
the results of matrix products with parameters."""

Arrays = dict[str, jax.Array]


class Gather(Protocol):
    """Makes the parameters of a block whole before they are used, {path: array} to the same.

    Called once for each layer, inside the scan and its rematerialisation, with the arrays of that layer. Its derivative
    may be a reduction over devices. A gather that has an attribute `remat`, a function of a jax rematerialisation
    policy to another, says so what of its own work is kept.
    """

    def __call__(self, params: Arrays) -> Arrays: ...


def whole(params: Arrays) -> Arrays:
    """The gather of parameters that are whole already."""
    return params


def remat_policy(remat: Remat, gather: Gather = whole) -> Callable[..., Any] | None:
    """jax's policy for a choice of `Remat`, as `gather` wants it; None = everything is kept.

    Raises:
      ValueError: there is no such choice.
    """
    policies = {
        "none": None,
        "full": jax.checkpoint_policies.nothing_saveable,
        "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    }
    if remat not in policies:
        raise ValueError(f"remat must be one of {', '.join(policies)}; got {remat!r}.")
    adapt = getattr(gather, "remat", None)
    policy = policies[remat]
    return policy if adapt is None else adapt(policy)


def scan_layers(
    layers: nnx.Module,
    body: Callable[[Any, Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any = None,
    *,
    prefix: str = "layers",
    remat: Remat = "none",
    gather: Gather = whole,
) -> tuple[Any, Any]:
    """carry, y_l = body(layer l, carry, x_l) for each layer in turn.

    Args:
      layers: One block whose parameters all have a leading axis of layers.
      body: (block with the parameters of one layer, carry, x of that layer) -> (carry, y).
      carry: Pytree of arrays.
      xs: Pytree of arrays with a leading axis of layers, or None.
      prefix: What comes before the paths of the parameters, as `gather` sees them.
      remat: What is kept for the backward pass.
      gather: Fetches the parameters of a layer.

    Returns:
      The last carry, and the ys stacked.
    """
    graph, state = nnx.split(layers)
    variables = {f"{prefix}/{'/'.join(map(str, path))}": (path, v) for path, v in nnx.to_flat_state(state)}
    # Before they are gathered, values may be other pytrees than single arrays.
    params = {name: variable.get_value() for name, (_, variable) in variables.items()}

    def step(carry: Any, scanned: Any) -> tuple[Any, Any]:
        params, x = scanned
        params = gather(params)
        flat = [(path, variable.replace(params[name])) for name, (path, variable) in variables.items()]
        return body(nnx.merge(graph, nnx.from_flat_state(flat)), carry, x)

    policy = remat_policy(remat, gather)
    if policy is not None:
        # In a scan nothing can be merged with the forward pass, so no barrier against that is needed.
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    return jax.lax.scan(step, carry, (params, xs))
