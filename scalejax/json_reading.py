"""JSON of files, read in one place and within limits: a damaged file ends in an error and nothing worse."""

import hashlib
import json
import pathlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

LARGEST_BYTES = 2**28
"""Of a file that is read whole. What is written here stays below a hundredth of it."""

DEEPEST = 100
"""Lists and objects inside one another. Configurations and manifests have about ten."""


def parse(text: str | bytes) -> Any:
    """What a text of JSON holds.

    Raises:
      ValueError: it is not JSON, not UTF-8, nested more than `DEEPEST` deep, or has a number of thousands of digits.
    """
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        # Python's own words are of a setting of the interpreter.
        raise ValueError(f"a number has more than {sys.get_int_max_str_digits():,} digits") from None
    level = [found]
    for _ in range(DEEPEST + 1):
        level = [inner for item in level for inner in _inside(item) if isinstance(inner, dict | list)]
        if not level:
            return found
    raise ValueError(f"nested more than {DEEPEST} deep")


def digest(content: Mapping[str, object]) -> str:
    """SHA-256 of what an object of JSON says, but for its own "digest"."""
    rest = {name: value for name, value in content.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def sealed(content: Mapping[str, object]) -> dict[str, object]:
    """The same with its digest, for `read_sealed`."""
    return {**content, "digest": digest(content)}


def read_sealed(path: str | pathlib.Path) -> Any:
    """What a file holds that people may write or edit, who leave the digest out; without its digest.

    Raises:
      ValueError: as `read`, or the digest is that of other content.
      OSError: it cannot be read.
    """
    found = read(path)
    if not isinstance(found, dict) or "digest" not in found:
        return found
    if found["digest"] != digest(found):
        raise ValueError("its digest is that of other content: copy it anew, or, after an edit, take the digest out")
    return {name: value for name, value in found.items() if name != "digest"}


def read(path: str | pathlib.Path) -> Any:
    """What a file of JSON, UTF-8, holds.

    Raises:
      ValueError: as `parse`, or the file is larger than `LARGEST_BYTES`.
      OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise ValueError(f"larger than {LARGEST_BYTES >> 20} MiB")
    return parse(text)


def _inside(item: object) -> Iterable[object]:
    return item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
