"""A compiled function of a trained model with its arrays, as a folder that jax and numpy alone can run.

`reload` is copied into the folder and says what is in it.
"""

import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.core
import jax.export
import numpy as np

from scalejax.errors import UserError
from scalejax.inference import reload
from scalejax.models.llm import safetensors
from scalejax.train import disk

PLATFORMS = ("cpu", "cuda", "tpu")
PROGRAM = "model.stablehlo"
SIGNATURE = "signature.json"

# What a chip has kernels of its own for is not portable: whatever this is compiled for, it computes as on a CPU.
_PORTABLE = jax.sharding.AbstractMesh(
    (), (), abstract_device=jax.sharding.AbstractDevice(device_kind="cpu", num_cores=None, platform="cpu")
)


def write(
    folder: pathlib.Path,
    function: Callable[[dict[str, jax.Array], dict[str, jax.Array]], tuple[jax.Array, ...]],
    weights: Mapping[str, jax.Array],
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    outputs: Sequence[str],
    *,
    described: Mapping[str, object],
    platforms: Sequence[str] = PLATFORMS,
) -> dict[str, object]:
    """Writes a function.

    Args:
      folder: Must not be there yet.
      function: (weights, inputs) -> outputs.
      weights: By name, on one device.
      inputs: By name; sizes may be symbols of one scope.
      outputs: Their names.
      described: What the signature says besides, "format" and "model" among it.
      platforms: That the program is lowered for; none of them has to be here.

    Returns:
      The signature, as signature.json has it.

    Raises:
      UserError: the folder is there already, or the disk refuses.
    """
    if folder.exists():
        raise UserError(f"OUT {folder} is there already. Give a new folder, or remove it.")
    names = list(weights)

    def score(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        given = arguments[: len(names)], arguments[len(names) :]
        with jax.sharding.use_abstract_mesh(_PORTABLE):
            return function(dict(zip(names, given[0], strict=True)), dict(zip(inputs, given[1], strict=True)))

    abstract = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights.values()]
    exported = jax.export.export(jax.jit(score), platforms=list(platforms))(*abstract, *inputs.values())
    with disk.explained(f"cannot make {folder}"):
        folder.mkdir(parents=True)
    written = tuple(safetensors.Written(n, np.dtype(w.dtype), tuple(w.shape)) for n, w in weights.items())
    # In one file whatever its size: `reload` knows no index of several.
    safetensors.write_folder(folder, written, lambda name: np.asarray(weights[name]), shard_bytes=2**62)
    disk.write_atomically(folder / PROGRAM, bytes(exported.mlir_module_serialized))
    with disk.explained(f"cannot write to {folder}"):
        shutil.copyfile(reload.__file__, folder / "reload.py")
    signature: dict[str, object] = {
        **described,
        "weights": {name: _described(x) for name, x in weights.items()},
        "inputs": {name: _described(x) for name, x in inputs.items()},
        "outputs": {n: _described(x) for n, x in zip(outputs, exported.out_avals, strict=True)},
        "calling": {
            "version": exported.calling_convention_version,
            "platforms": list(exported.platforms),
            "kept": list(exported.module_kept_var_idx),
            "uses_global_constants": exported.uses_global_constants,
        },
        "jax": jax.__version__,
        "sha256": {name: _digest(folder / name) for name in (safetensors.FILE, PROGRAM, "reload.py")},
    }
    signature["digest"] = reload.signature_digest(json.loads(json.dumps(signature)))
    disk.write_atomically(folder / SIGNATURE, json.dumps(signature, indent=1) + "\n")  # last: a folder with it is whole
    return signature


def _described(array: jax.Array | jax.ShapeDtypeStruct | jax.core.ShapedArray) -> dict[str, object]:
    return {
        "dtype": np.dtype(array.dtype).name,
        "shape": [int(n) if isinstance(n, int | np.integer) else str(n) for n in array.shape],
    }


def _digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
