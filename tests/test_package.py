"""The shape of the package: cheap imports, one direction of imports, links at the root that nobody imports."""

import ast
import pathlib
import subprocess
import sys

import pytest

import scalejax

PACKAGE = pathlib.Path(scalejax.__file__).parent
ROOT = PACKAGE.parent

# What a layer may import of scalejax; `errors`, `compat` and `json_reading` are everybody's.
ALLOWED = {
    "numerics": set(),
    "kernels": {"numerics"},
    "data": set(),
    "parallel": {"numerics", "kernels", "data"},
    "optim": set(),
    "nn": {"numerics", "kernels", "parallel"},
    "models": {"numerics", "kernels", "parallel", "nn", "data", "train"},  # what a task is, and its metrics
    "train": {"numerics", "parallel", "data", "optim"},
    "inference": {"numerics", "kernels", "parallel", "nn", "models", "data", "train"},
    "surgery": {"numerics", "kernels", "parallel", "optim", "nn", "models", "data", "train", "inference"},
    "plan": {"numerics", "parallel", "data", "optim", "train"},
    "configs": {"numerics", "parallel", "data", "optim", "nn", "models", "train", "surgery"},
}


def _imports(path: pathlib.Path) -> set[str]:
    """Names of the scalejax sub-packages that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("scalejax.")}
    return found - {"errors", "compat", "units", "chips", "json_reading"}


@pytest.mark.default_cases(first=3)
@pytest.mark.parametrize("layer", sorted(ALLOWED))
def test_imports_point_one_way(layer):
    for path in (PACKAGE / layer).rglob("*.py"):
        beyond = _imports(path) - ALLOWED[layer] - {layer}
        assert not beyond, f"{path.relative_to(PACKAGE)} imports {sorted(beyond)}"


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_import_scalejax_imports_nothing_heavy():
    code = "import sys, scalejax; print([m for m in ('jax', 'flax', 'numpy', 'grain', 'pyarrow') if m in sys.modules])"
    assert _run(code).stdout.strip() == "[]"


@pytest.mark.slow
def test_data_never_imports_jax():
    code = (
        "import importlib, pkgutil, sys, scalejax.data as d\n"
        "for m in pkgutil.walk_packages(d.__path__, 'scalejax.data.'): importlib.import_module(m.name)\n"
        "print('jax' in sys.modules)"
    )
    done = _run(code)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["kernels", "parallel"])
def test_kernels_and_parallel_need_only_jax(layer):
    code = (
        "import sys\n"
        "for name in ('flax', 'optax', 'grain', 'orbax', 'pyarrow', 'rich', 'pydantic'): sys.modules[name] = None\n"
        f"import importlib, pkgutil, scalejax.{layer} as d\n"
        f"for m in pkgutil.walk_packages(d.__path__, 'scalejax.{layer}.'): importlib.import_module(m.name)\n"
        "print('ok')"
    )
    done = _run(code)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.slow
def test_kernels_lists_its_kernels_and_loads_each_on_first_use():
    """And importing all of them looks for no device, so that a program of a user decides where jax looks."""
    import scalejax.kernels as kernels

    folders = sorted(path.parent.name for path in (PACKAGE / "kernels").glob("*/api.py"))
    assert dir(kernels) == folders
    documented = [line.split()[0] for line in kernels.__doc__.splitlines() if line.startswith("    ")]
    assert documented == folders
    code = (
        "import sys, scalejax\nscalejax.kernels\n"
        "print('jax' in sys.modules, [n for n in sys.modules if n.startswith('scalejax.kernels.')])\n"
        "for name in dir(scalejax.kernels): getattr(scalejax.kernels, name)\n"
        "import jax._src.xla_bridge as b\n"
        "print(scalejax.kernels.flash_attention.flash_attention.__name__, b.backends_are_initialized())"
    )
    done = _run(code)
    assert done.stdout.splitlines() == ["False []", "flash_attention False"], done.stderr


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="runs in a checkout")
def test_root_links_point_into_the_package():
    for name in ("models", "parallel", "kernels", "configs"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / name


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="runs in a checkout")
def test_ruff_forbids_importing_through_the_links():
    pytest.importorskip("ruff", reason="ruff is a developer's tool")
    code = "import models.recsys\nfrom kernels import embedding_bag\n"
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "scalejax/x.py", "--select", "TID", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.stdout.count("TID251") == 2, done.stdout
