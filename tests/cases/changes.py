"""Experiments that differ in fields of their groups."""

import dataclasses
from typing import Any


def changed(config: Any, **changes: Any) -> Any:
    """A dataclass with other fields, at any depth: changed(experiment, placement__mesh=MeshShape(fsdp=2), steps=4).

    Those of a group come on top of what the group itself is changed to.
    """
    own: dict[str, Any] = {}
    within: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, _, rest = path.partition("__")
        if rest:
            within.setdefault(name, {})[rest] = value
        else:
            own[name] = value
    for name, further in within.items():
        own[name] = changed(own.get(name, getattr(config, name)), **further)
    return dataclasses.replace(config, **own)
