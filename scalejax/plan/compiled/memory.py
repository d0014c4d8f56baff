"""Memory of a step on one chip, by kind, and whether it fits."""

import dataclasses
import re

import jax
import jax.numpy as jnp

from scalejax.chips import Chip
from scalejax.parallel.offload import HOST

# First field of `train.state.TrainState` -> kind. Tables are told apart by their leaves.
_FIELDS = {"params": "parameters", "optimizer": "optimizer state", "metrics": "metrics"}
KINDS = (
    "parameters", "optimizer state", "tables", "table optimizer state", "constants", "batch", "metrics", "other state",
    "layout padding", "outputs", "temporaries", "code",
)  # fmt: skip
"""Everything that `MemoryPlan.bytes_per_chip` may name, in the order in which it is shown."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes in the main memory of one chip.

    Attributes:
      fits: Whether the compiler found room.
      bytes_per_chip: By kind, see `KINDS`. State is updated in place where it is donated: "outputs" are results that
        found no argument to overwrite. "layout padding" is what tiles add to the arguments (a TPU stores arrays in
        tiles of 8 x 128 or more). "temporaries" is what the other kinds leave of the most that lives at one time; where
        the step does not fit, of what the compiler says is needed.
      hbm_bytes: Memory that a program may use.
      message: What the compiler said when it found no room, else "".
    """

    fits: bool
    bytes_per_chip: dict[str, int]
    hbm_bytes: int
    message: str = ""

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds on a chip."""
        return sum(self.bytes_per_chip.values())


def arguments_by_kind(state: object, batch: object) -> dict[str, int]:
    """Bytes of one device's share of the arguments of a step, without padding and what rests in host memory.

    Args:
      state: Pytree of `jax.ShapeDtypeStruct` with shardings, fields as in `train.state.TrainState`.
      batch: The same for one batch, or for all that a step takes besides the state; what is under `constants`, as in
        `train.task.Placed`, is the same in every step.
    """
    found: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if rests_on_host(leaf):
            continue
        kind = _kind([_name(part) for part in path])
        found[kind] = found.get(kind, 0) + bytes_per_device(leaf)
    found["batch"] = 0
    counted = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if id(leaf) in counted:
            continue  # one array in two places, such as a graph that is both trained on and scored
        counted.add(id(leaf))
        kind = "constants" if "constants" in map(_name, path[:2]) else "batch"
        found[kind] = found.get(kind, 0) + bytes_per_device(leaf)
    return found


def rests_on_host(leaf: jax.ShapeDtypeStruct) -> bool:
    """Whether an array lies in the memory of the host between steps."""
    return leaf.sharding is not None and leaf.sharding.memory_kind == HOST


def bytes_per_device(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of one device's share of an array; an array without sharding is whole on every device."""
    shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, leaf.dtype))
        shape = leaf.shape
    count = 1
    for size in shape:
        count *= size
    return count * leaf.dtype.itemsize


def of_compiled(state: object, batch: object, compiled: jax.stages.Compiled, chip: Chip) -> MemoryPlan:
    """Reads the memory of a step that compiled."""
    stats = compiled.memory_analysis()
    assert stats is not None, "this backend does not say what a program needs"
    kinds = arguments_by_kind(state, batch)
    # An argument that the step never reads is dropped, which can make the sum of the arguments too large.
    kinds["layout padding"] = max(0, stats.argument_size_in_bytes - sum(kinds.values()))
    kinds["outputs"] = stats.output_size_in_bytes - stats.alias_size_in_bytes
    # What temporaries add to all the rest when most lives at one time. The sum of their buffers counts one place more
    # than once, and goes past the memory of a chip in steps that fit.
    peak = stats.peak_memory_in_bytes - stats.argument_size_in_bytes - kinds["outputs"]
    kinds["temporaries"] = max(0, peak)
    kinds["code"] = stats.generated_code_size_in_bytes
    return _plan(kinds, chip, fits=True, message="")


def of_failure(state: object, batch: object, error: Exception, chip: Chip) -> MemoryPlan:
    """Reads the memory of a step that the compiler refused for want of memory.

    Raises:
      Exception: `error` itself, if it says anything else.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        raise error
    kinds = arguments_by_kind(state, batch)
    needed = needed_bytes(text)
    if needed is not None:
        kinds["temporaries"] = max(0, needed - sum(kinds.values()))
    return _plan(kinds, chip, fits=False, message=text.strip().splitlines()[0])


def needed_bytes(message: str) -> int | None:
    """Bytes that a program needs on one device, from the compiler's out-of-memory message; None if it has no figure."""
    for pattern in (
        r"\(([\d.]+)([KMGT]?)B?\) exceeds available HBM",  # "total memory ... (512.00G) exceeds available HBM (15.75G)"
        r"Used ([\d.]+)([KMGT]?)i?B? of [\d.]+[KMGT]?i?B? hbm",  # "Used 20.1G of 15.75G hbm"
        r"([\d.]+)([KMGT]?)i?B?[^.\d]{0,80}exceeds available HBM",
    ):
        match = re.search(pattern, message)
        if match:
            return int(float(match.group(1)) * 1024 ** " KMGT".index(match.group(2) or " "))
    return None


def _plan(kinds: dict[str, int], chip: Chip, *, fits: bool, message: str) -> MemoryPlan:
    per_chip = {kind: kinds[kind] * chip.devices_per_chip for kind in KINDS if kinds.get(kind)}
    return MemoryPlan(fits=fits, bytes_per_chip=per_chip, hbm_bytes=chip.usable_hbm_bytes, message=message)


def _kind(path: list[str]) -> str:
    if path[0] == "tables":
        other = any(name in path for name in ("faults", "maps", "key"))
        return "tables" if path[-1] == "rows" else "other state" if other else "table optimizer state"
    return _FIELDS.get(path[0], "other state")


def _name(part: object) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)
