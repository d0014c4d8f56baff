import pathlib
import subprocess
import sys

import scalejax.data


def test_no_module_of_data_imports_jax_or_grain() -> None:
    root = pathlib.Path(scalejax.data.__file__).parent
    modules = [
        ".".join(["scalejax.data", *p.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
        for p in sorted(root.rglob("*.py"))
    ]
    assert len(modules) > 15
    code = f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
    code += "import scalejax.data as d\n[getattr(d, n) for n in d.__all__]\n"
    code += "bad = [m for m in ('jax', 'jaxlib', 'grain', 'flax', 'torch') if m in sys.modules]\nassert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root.parent.parent, timeout=120)


def test_importing_the_package_loads_neither_pyarrow_nor_polars() -> None:
    code = "import sys, scalejax.data\nassert not {'numpy', 'pyarrow', 'polars'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=pathlib.Path(scalejax.data.__file__).parents[2], timeout=60
    )
