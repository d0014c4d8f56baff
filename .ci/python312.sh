#!/usr/bin/env bash
# The newest jax on Python 3.12, where that Python exists; else a line that says it was skipped: the quick tier, and the
# folders that depend on jax most. usage: python312.sh SCRATCH
set -euo pipefail
scratch=$1
python=""
for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then echo "skipped: no python3.12 on this machine"; exit 0; fi
"$python" -m venv "$scratch/venv312"
"$scratch/venv312/bin/pip" install -q -e '.[train]' pytest pytest-timeout pytest-xdist hypothesis scikit-learn safetensors
"$scratch/venv312/bin/python" -c "import jax, flax; print('jax', jax.__version__, 'flax', flax.__version__)"
export JAX_COMPILATION_CACHE_DIR="$scratch/cache312"
"$scratch/venv312/bin/python" -m tests.tiers quick
"$scratch/venv312/bin/python" -m pytest -q -p no:cacheprovider -n 2 tests/kernels tests/nn tests/numerics tests/parallel
