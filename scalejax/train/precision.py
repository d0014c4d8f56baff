"""The dtypes of a run on the machine at hand."""

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from scalejax.errors import UserError
from scalejax.numerics.dtypes import Dtypes
from scalejax.train.experiment import Experiment, Precision
from scalejax.train.task import Task


def check_precision(experiment: Experiment) -> None:
    """Refuses float64 where jax would quietly compute in float32.

    Raises:
      UserError: names the field.
    """
    precision = experiment.precision
    dtypes = {
        "precision.params": precision.params,
        "precision.compute": precision.compute,
        "tables.dtype": experiment.tables.dtype,
    }
    for field, dtype in dtypes.items():
        if dtype == "float64" and jnp.result_type(float) != jnp.float64:
            raise UserError(
                f"{field} is float64, but this jax has 64-bit types switched off and would use float32. Set "
                f"JAX_ENABLE_X64=1 in the environment, or choose another type with --set {field}=..."
            )


def dtypes_of(precision: Precision, mesh: Mesh) -> Dtypes:
    """What a model is kept in and computes in on the devices of a mesh."""
    compute = precision.compute
    if compute == "platform":
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        compute = precision.params if on_cpu else "bfloat16"
    return Dtypes(precision.params, compute)


def init_model(task: Task, rngs: nnx.Rngs, precision: Precision, mesh: Mesh) -> nnx.Module:
    """The model of a task in the dtypes of its run."""
    return task.init(rngs, dtypes_of(precision, mesh))
