"""The packages that each extra of scalejax asks for, and those of them that are missing."""

import importlib.metadata
import pathlib
import tomllib

from packaging.requirements import Requirement

EXTRAS = ("train", "llm", "serve", "plan", "tpu", "cuda", "notebooks", "trackers", "test")


def missing(extra: str) -> list[str]:
    """Requirements of `scalejax[extra]`, those of nested extras included, that are not met here."""
    return _unmet(scalejax_requirements(), extra, seen=set())


def scalejax_requirements() -> list[Requirement]:
    """From the installed distribution, or from pyproject.toml beside a checkout that is not installed."""
    try:
        return [Requirement(line) for line in importlib.metadata.requires("scalejax") or []]
    except importlib.metadata.PackageNotFoundError:
        pass
    path = pathlib.Path(__file__).parents[2] / "pyproject.toml"
    if not path.is_file():
        return []
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    found = [Requirement(line) for line in project["dependencies"]]
    for extra, lines in project["optional-dependencies"].items():
        for line in lines:
            head, _, marker = line.partition(";")
            condition = f"({marker.strip()}) and extra == '{extra}'" if marker else f"extra == '{extra}'"
            found.append(Requirement(f"{head}; {condition}"))
    return found


def _unmet(requirements: list[Requirement], extra: str, seen: set[tuple[str, str]]) -> list[str]:
    unmet = []
    for requirement in requirements:
        marker = requirement.marker
        if marker is None or not marker.evaluate({"extra": extra}) or marker.evaluate({"extra": ""}):
            continue
        name = requirement.name.lower()
        if name == "scalejax":
            nested_requirements = scalejax_requirements()
        else:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                unmet.append(_short(requirement))
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                unmet.append(f"{_short(requirement)} (installed: {version})")
                continue
            nested_requirements = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        for nested in sorted(requirement.extras):
            if (name, nested) not in seen:
                seen.add((name, nested))
                unmet += [u for u in _unmet(nested_requirements, nested, seen) if u not in unmet]
    return unmet


def _short(requirement: Requirement) -> str:
    return requirement.name + str(requirement.specifier)
