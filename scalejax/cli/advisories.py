"""Versions that are known to be wrong or slow, as data, and the check against what is installed."""

import dataclasses
import importlib.metadata
from collections.abc import Mapping
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advisory:
    """One known problem.

    Attributes:
      package: Distribution.
      versions: Affected versions, as a PEP 440 specifier.
      platform: Platform of jax on which it matters; "any" = everywhere.
      problem: What goes wrong.
      advice: What to do.
      source: Where it is reported.
    """

    package: str
    versions: str
    platform: Literal["any", "gpu", "tpu"] = "any"
    problem: str
    advice: str
    source: str


KNOWN = (
    Advisory(
        package="jax",
        versions="<0.10.2",
        problem="older than what scalejax is written for and tested with",
        advice="Install jax>=0.10.2.",
        source="scalejax's own floor",
    ),
    Advisory(
        package="jaxlib",
        versions=">=0.10.2,<=0.11.0",
        platform="gpu",
        problem="float32 scatter-add compiles to a compare-and-swap loop, hundreds of times slower with duplicate ids",
        advice="Use jaxlib>=0.11.1 (Python 3.12); scalejax's own sparse updates sort first and are not affected.",
        source="jax issue 38806, xla issue 46225",
    ),
    Advisory(
        package="jaxlib",
        versions="==0.11.0",
        platform="gpu",
        problem="gradients are wrong where the residuals of a scan are offloaded to the host",
        advice="Use another jaxlib, or no host offload.",
        source="xla pull request 46231",
    ),
)


def advisories(installed: Mapping[str, str], platform: str | None) -> list[Advisory]:
    """Those of `KNOWN` that hold for the installed versions on this platform ("gpu", "tpu", "cpu", None = unknown)."""
    return [
        advisory
        for advisory in KNOWN
        if advisory.package in installed
        and SpecifierSet(advisory.versions).contains(installed[advisory.package], prereleases=True)
        and advisory.platform in ("any", platform)
    ]


def mismatches(installed: Mapping[str, str]) -> list[Advisory]:
    """libtpu and CUDA plugins that are not the ones that the installed jax asks for."""
    found = []
    for line in importlib.metadata.requires("jax") or []:
        requirement = Requirement(line)
        name = requirement.name.lower()
        is_accelerator = name == "libtpu" or name.startswith("jax-cuda")
        if not (is_accelerator and name in installed and requirement.marker and requirement.specifier):
            continue
        if not requirement.specifier.contains(installed[name], prereleases=True):
            extra = "tpu" if name == "libtpu" else name.removeprefix("jax-").removesuffix("-plugin")
            advisory = Advisory(
                package=name,
                versions=f"=={installed[name]}",
                problem=f"not what jax {installed['jax']} asks for ({requirement.specifier}); larger programs may fail",
                advice=f"pip install 'jax[{extra}]=={installed['jax']}'",
                source="the requirements of the installed jax",
            )
            if advisory not in found:
                found.append(advisory)
    return found
