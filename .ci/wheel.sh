#!/usr/bin/env bash
# Builds sdist then wheel, compares the wheel with the checkout, installs it elsewhere and tests it there.
# usage: wheel.sh SCRATCH (an environment with `build` is active)
set -euo pipefail
scratch=$1 root=$PWD
git archive --format=tar HEAD | (mkdir -p "$scratch/src" && tar -x -C "$scratch/src")
python -m build -q --outdir "$scratch/dist" "$scratch/src"
python - "$scratch/dist" "$scratch/src" <<'PY'
import pathlib, sys, zipfile
dist, src = map(pathlib.Path, sys.argv[1:])
wheel = next(dist.glob("*.whl"))
packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
wanted = {str(p.relative_to(src)) for p in (src / "scalejax").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
if packed != wanted:
    sys.exit(f"wheel and checkout differ: missing {sorted(wanted - packed)}, extra {sorted(packed - wanted)}")
print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 1e6:.1f} MB, as in the checkout")
PY
python3 -m venv "$scratch/wheel-venv"
"$scratch/wheel-venv/bin/pip" install -q "$(ls "$scratch"/dist/*.whl)[train]" pytest pytest-timeout pytest-xdist hypothesis chex beartype scikit-learn
cp -r tests "$scratch/tests" && cp pyproject.toml "$scratch/"
cd "$scratch"
"$scratch/wheel-venv/bin/python" -c "import scalejax, sys; assert not scalejax.__file__.startswith('$root/'), scalejax.__file__"
# The programs are those that the checkout has compiled; the wheel is what is tested here.
JAX_COMPILATION_CACHE_DIR="$root/.cache/jax" "$scratch/wheel-venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 \
  tests/data tests/nn tests/models tests/configs
# What must be equal to the bit, compiled as users compile it.
XLA_FLAGS="" JAX_COMPILATION_CACHE_DIR="$scratch/cache" "$scratch/wheel-venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 \
  tests/parallel/embedding/test_kinds.py tests/parallel/test_fsdp.py tests/train/strategies/test_dense_strategies.py
XLA_FLAGS="" JAX_COMPILATION_CACHE_DIR="$scratch/cache" "$scratch/wheel-venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 -m "" \
  tests/train/checkpoints/test_resume.py::test_killed_run_goes_on_to_the_same_bits \
  tests/train/batches/test_pipeline.py::test_the_exchange_of_ids_a_step_ahead_changes_no_bit
"$scratch/wheel-venv/bin/scalejax" train wukong-smoke --workdir "$scratch/wheel-run"
