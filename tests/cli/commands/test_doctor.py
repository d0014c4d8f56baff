"""doctor reports what is there, finds wrong collectives, and names bad versions and missing packages."""

import importlib.metadata
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from packaging.requirements import Requirement

from scalejax.cli import advisories, environment, requirements, selftest
from scalejax.parallel import mesh as meshes


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(meshes.MeshShape(fsdp=4, tensor=2))


def test_all_collectives_are_right_on_a_mesh_of_two_axes(mesh):
    assert selftest.run(mesh) == dict.fromkeys(("psum", "all_gather", "all_to_all", "ppermute", "psum_scatter"), "ok")


def test_a_collective_that_sends_to_the_wrong_device_is_found(mesh, monkeypatch):
    right = lax.ppermute
    monkeypatch.setattr(lax, "ppermute", lambda x, axes, pairs: right(x, axes, [(b, a) for a, b in pairs]))
    found = selftest.run(mesh)
    assert found.pop("ppermute").startswith("wrong on ")
    assert set(found.values()) == {"ok"}


def test_a_sum_that_is_wrong_on_one_device_is_found(mesh, monkeypatch):
    right = lax.psum

    def wrong(x, axes):
        last = lax.axis_index(axes) == mesh.size - 1
        return right(x, axes) + jnp.where(last, 1, 0).astype(x.dtype)

    monkeypatch.setattr(lax, "psum", wrong)
    assert "wrong on" in selftest.run(mesh)["psum"]


@pytest.mark.parametrize(("asked", "needed"), [(None, "cpu"), ("cpu", None)])
def test_it_names_the_platform_that_programs_of_a_user_need(invoke, monkeypatch, asked, needed):
    monkeypatch.setattr(environment, "platform_without_tpu", lambda: "cpu")  # libtpu is installed, and no TPU is here
    if asked is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", asked)
    assert json.loads(invoke("doctor", "--no-selftest", "--json").stdout)["jax_platforms_needed"] == needed
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if needed is not None:
        assert "set JAX_PLATFORMS=cpu" in invoke("doctor", "--no-selftest").stdout


def test_reports_as_json(invoke):
    result = invoke("doctor", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["healthy"]
    assert len(report["devices"]) == jax.device_count()
    assert report["packages"]["jax"] == jax.__version__
    assert set(report["selftest"].values()) == {"ok"}
    assert report["mesh"]["fsdp"] == jax.device_count()
    assert set(report["missing"]) == set(requirements.EXTRAS)


def test_prints_tables(invoke):
    shown = invoke("doctor", "--no-selftest").stdout
    for words in ("Versions", f"{jax.device_count()} x cpu", "scalejax[train]", "not run", "Known-bad versions"):
        assert words in shown


def test_memory_is_in_units_of_1024(invoke, monkeypatch):
    monkeypatch.setattr(meshes, "host_memory_bytes", lambda: 3 * 2**30)
    assert re.search(r"memory +3\.0 GiB", invoke("doctor", "--no-selftest").stdout)


def test_a_wrong_collective_is_exit_status_1(invoke, monkeypatch):
    monkeypatch.setattr(selftest, "run", lambda mesh: {"psum": "wrong on device 3"})
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "wrong on device 3" in result.stdout


@pytest.mark.slow
def test_a_platform_that_does_not_come_up_is_reported(scalejax):
    result = scalejax("doctor", "--json", JAX_PLATFORMS="no_such_platform")
    assert result.returncode == 1
    assert "no_such_platform" in json.loads(result.stdout)["problem"]


@pytest.mark.parametrize(
    ("installed", "platform", "count"),
    [
        ({"jaxlib": "0.10.2"}, "gpu", 1),
        ({"jaxlib": "0.10.2"}, "cpu", 0),
        ({"jaxlib": "0.11.0"}, "gpu", 2),
        ({"jaxlib": "0.11.1"}, "gpu", 0),
        ({"jaxlib": "0.12.0.1"}, "gpu", 0),
        ({"jax": "0.10.1"}, None, 1),
        ({"jax": "0.10.2"}, None, 0),
    ],
)
def test_known_bad_versions(installed, platform, count):
    assert len(advisories.advisories(installed, platform)) == count


def test_a_libtpu_that_jax_does_not_ask_for_is_named():
    asked = next(r for r in map(Requirement, importlib.metadata.requires("jax") or []) if r.name == "libtpu")
    version = str(asked.specifier).removeprefix("==").replace("*", "1")
    assert advisories.mismatches({"jax": jax.__version__, "libtpu": version}) == []
    (found,) = advisories.mismatches({"jax": jax.__version__, "libtpu": "0.0.1"})
    assert str(asked.specifier) in found.problem
    assert found.advice == f"pip install 'jax[tpu]=={jax.__version__}'"


def test_missing_packages_of_an_extra_follow_nested_extras(monkeypatch):
    lines = [
        "numpy>=2.0",
        "flax>=0.1; extra == 'train'",
        "no-such-package>=3; extra == 'train'",
        "numpy>=99; extra == 'train'",
        "old-only>=1; (python_version < '3') and extra == 'train'",
        "scalejax[train]; extra == 'test'",
        "another-absent-one; extra == 'test'",
    ]
    monkeypatch.setattr(requirements, "scalejax_requirements", lambda: [Requirement(line) for line in lines])
    lacks = ["no-such-package>=3", f"numpy>=99 (installed: {importlib.metadata.version('numpy')})"]
    assert requirements.missing("train") == lacks
    assert requirements.missing("test") == [*lacks, "another-absent-one"]
    assert requirements.missing("plan") == []


def test_requirements_of_a_checkout_come_from_pyproject():
    names = {r.name for r in requirements.scalejax_requirements()}
    assert {"jax", "numpy", "flax", "typer", "pytest"} <= names


@pytest.mark.multiprocess
def test_two_processes_test_their_collectives_together(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "scalejax", "doctor", "--json", "--cpu-devices", "2", "--processes", "2"]
    command += ["--coordinator", f"localhost:{port}", "--process-id"]
    environ = {**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])}
    started = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True, env=environ, cwd=tmp_path)
        for i in range(2)
    ]
    try:
        texts = [process.communicate(timeout=120)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    report = json.loads(texts[0])
    assert (report["processes"], len(report["devices"])) == (2, 4)
    assert set(report["selftest"].values()) == {"ok"}
    assert texts[1] == ""
