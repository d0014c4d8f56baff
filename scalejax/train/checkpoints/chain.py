"""Chains of checkpoints: a full one, and after it those that hold only the rows updated since the one before.

Each of the latter names its base by step and by the digest in the base's manifest, so that a chain cannot be put
together of parts that do not belong together.
"""

import dataclasses
import pathlib

from scalejax.train.checkpoints import manifest as manifests
from scalejax.train.checkpoints.manifest import Damaged, DeltaRecord, Manifest


@dataclasses.dataclass(frozen=True)
class Delta:
    """What the manifest of a checkpoint of touched rows says besides.

    Attributes:
      base_step: Step of the checkpoint that it goes with.
      base_digest: Digest of that checkpoint's manifest.
      since: Updates of the tables at the base; rows of later updates are here.
      whole: Names of the arrays that are here in full.
    """

    base_step: int
    base_digest: str
    since: int
    whole: tuple[str, ...]

    def to_dict(self) -> DeltaRecord:
        """As JSON values."""
        return {
            "base_step": self.base_step,
            "base_digest": self.base_digest,
            "since": self.since,
            "whole": list(self.whole),
        }


def delta_of(manifest: Manifest) -> Delta | None:
    """The base and contents of a checkpoint of touched rows; None for a full one."""
    if manifest.delta is None:
        return None
    said = manifest.delta
    return Delta(said["base_step"], said["base_digest"], said["since"], tuple(said["whole"]))


def chain_to(folder: pathlib.Path, step: int) -> list[Manifest]:
    """Manifests from the full checkpoint to that of a step, each the base of the next.

    Args:
      folder: Of all checkpoints of the run.
      step: Of the last.

    Raises:
      Damaged: A manifest or a base is missing, is not as it was written, or another checkpoint stands in its place.
    """
    found = [manifests.read(folder / str(step))]
    while (delta := delta_of(found[0])) is not None:
        here, base = folder / str(found[0].step), folder / str(delta.base_step)
        only = f"checkpoint {here} holds only the rows updated since step {delta.base_step}"
        if not base.is_dir():
            raise Damaged(f"{only}, and {base} is missing")
        # Otherwise two checkpoints that name each other would be followed for ever.
        if delta.base_step >= found[0].step:
            raise Damaged(f"{only}, which is not before it. Bring {here} back from a copy.")
        manifest = manifests.read(base)
        if manifests.stored_digest(base) != delta.base_digest:
            raise Damaged(
                f"{only}, but {base} is another checkpoint of that step than the one it was made from. Bring the "
                f"right one back from a copy, or move {here} away to restore an earlier step."
            )
        if manifest.arrays != found[0].arrays:
            raise Damaged(f"{only}, but {base} holds other arrays or tables. Bring the right one back from a copy.")
        found.insert(0, manifest)
    return found


def with_bases(steps: set[int], bases: dict[int, int | None]) -> set[int]:
    """Steps, and all that their chains need.

    Args:
      steps: Some steps.
      bases: Step -> base; None for full checkpoints.
    """
    found: set[int] = set()
    for step in steps:
        link: int | None = step
        while link is not None and link not in found:
            found.add(link)
            link = bases.get(link)
    return found
