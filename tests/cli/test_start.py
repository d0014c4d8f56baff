"""What starts without jax, what a command sets before jax is imported, and that libtpu stays quiet."""

import json
import os
import pathlib
import stat
import subprocess
import sys
import time

import pytest

import scalejax as package
from scalejax.cli import environment

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "numpy", "polars", "pyarrow")


@pytest.mark.default_cases(first=2)
@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["recipes", "--help"], ["--version"]])
def test_imports_nothing_heavy(arguments):
    code = (
        "import sys, scalejax.cli\n"
        f"sys.argv = ['scalejax', *{arguments}]\n"
        "try: scalejax.cli.main()\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        f"heavy = sorted(set({HEAVY}) & set(sys.modules)); assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_version(invoke):
    assert invoke("--version").stdout == f"scalejax {package.__version__}\n"


@pytest.mark.slow
def test_help_takes_no_longer_than_a_few_starts_of_its_library(scalejax):
    """In turns, the best of five: the machine may be busy, the commands are not."""

    def once(command):
        start = time.perf_counter()
        assert command().returncode == 0
        return time.perf_counter() - start

    typer = [sys.executable, "-c", "import typer"]
    times = [(once(lambda: scalejax("--help")), once(lambda: subprocess.run(typer))) for _ in range(5)]
    ours, theirs = (min(column) for column in zip(*times, strict=True))
    assert ours < 4 * theirs


@pytest.fixture
def devices(tmp_path):
    folder = tmp_path / "dev"
    folder.mkdir()
    return folder


@pytest.fixture
def installed(monkeypatch):
    """Says which top-level modules are installed."""
    names = {"libtpu"}
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object() if name in names else None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    return names


def test_names_the_cpu_where_libtpu_would_look_for_a_tpu(devices, installed):
    assert environment.platform_without_tpu(devices) == "cpu"


@pytest.mark.parametrize("node", ["accel0", "vfio/0"])
def test_lets_jax_look_where_a_tpu_may_be(devices, installed, node):
    (devices / node).parent.mkdir(exist_ok=True)
    (devices / node).touch()
    assert environment.platform_without_tpu(devices) is None


def test_names_cuda_where_libtpu_is_installed_beside_a_gpu(devices, installed):
    (devices / "nvidia0").touch()
    assert environment.platform_without_tpu(devices) == "cpu"  # no plugin
    installed.add("jax_cuda12_plugin")
    assert environment.platform_without_tpu(devices) == "cuda,cpu"


def test_says_nothing_without_libtpu(devices, installed):
    installed.clear()
    assert environment.platform_without_tpu(devices) is None


def test_what_the_user_has_set_stays(monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "tpu")
    monkeypatch.setitem(os.environ, environment.CACHE_VARIABLE, str(tmp_path / "mine"))
    environment.prepare()
    assert (os.environ["JAX_PLATFORMS"], os.environ[environment.CACHE_VARIABLE]) == ("tpu", str(tmp_path / "mine"))
    assert not (tmp_path / "mine").exists()


def test_virtual_cpu_devices(monkeypatch):
    monkeypatch.delitem(os.environ, "JAX_PLATFORMS", raising=False)
    monkeypatch.delitem(os.environ, "PJRT_NPROC", raising=False)
    environment.prepare(cpu_devices=3)
    assert (os.environ["JAX_PLATFORMS"], os.environ["JAX_NUM_CPU_DEVICES"]) == ("cpu", "3")
    assert os.environ["PJRT_NPROC"] == "24"  # a device may wait in several collectives at once


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """The compile cache that `prepare` makes in an empty cache folder of the user."""
    monkeypatch.delitem(os.environ, environment.CACHE_VARIABLE)
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    return environment.cache_folder()


def test_compile_cache_belongs_to_the_user_alone(cache):
    environment.prepare()
    assert os.environ[environment.CACHE_VARIABLE] == str(cache)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (cache, cache.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702], ids=oct)
def test_a_cache_that_others_can_write_is_not_used(cache, capsys, mode):
    cache.mkdir(parents=True)
    cache.chmod(mode)
    environment.prepare()
    assert environment.CACHE_VARIABLE not in os.environ
    assert f"can be written by others (mode {mode:04o})" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_is_not_used(cache, capsys):
    cache.parent.parent.mkdir()
    cache.parent.touch()
    environment.prepare()
    assert environment.CACHE_VARIABLE not in os.environ
    assert "cannot be made" in capsys.readouterr().err


@pytest.mark.slow
def test_a_start_with_libtpu_installed_is_quiet(scalejax, tmp_path):
    """Without JAX_PLATFORMS, on whatever this machine is: one device or more, and nothing on stderr."""
    variables = dict.fromkeys(("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_MIN_LOG_LEVEL"))
    variables |= dict.fromkeys(("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID", "TF_CPP_MIN_LOG_LEVEL"))
    result = scalejax("doctor", "--no-selftest", "--json", XDG_CACHE_HOME=str(tmp_path), **variables)
    assert result.stderr == ""
    assert json.loads(result.stdout)["devices"]


def test_python_m_is_the_same_command(scalejax):
    assert scalejax("--version").stdout == f"scalejax {package.__version__}\n"
    assert (pathlib.Path(package.__file__).parent / "__main__.py").is_file()
