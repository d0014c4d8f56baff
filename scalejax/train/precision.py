"""The dtypes of a run on the machine at hand."""

import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh

from scalejax.errors import UserError
from scalejax.train.experiment import Precision


def check_precision(precision: Precision) -> None:
    """Refuses float64 where jax would quietly compute in float32.

    Raises:
      UserError: names the field.
    """
    for field in dataclasses.fields(precision):
        if getattr(precision, field.name) == "float64" and jnp.result_type(float) != jnp.float64:
            raise UserError(
                f"precision.{field.name} is float64, but this jax has 64-bit types switched off and would use float32. "
                f"Set JAX_ENABLE_X64=1 in the environment, or choose another type with --set precision.{field.name}=..."
            )


def compute_dtype(precision: Precision, mesh: Mesh) -> jnp.dtype:
    """Dtype of matrix products and activations on the devices of a mesh."""
    compute = precision.compute
    if compute == "platform":
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        compute = precision.params if on_cpu else "bfloat16"
    return jnp.dtype(compute)
