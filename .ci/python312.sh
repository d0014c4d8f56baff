#!/usr/bin/env bash
# The newest jax on Python 3.12, where that Python exists; else a line that says it was skipped. usage: python312.sh SCRATCH
set -euo pipefail
scratch=$1
python=""
for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then echo "skipped: no python3.12 on this machine"; exit 0; fi
"$python" -m venv "$scratch/venv312"
"$scratch/venv312/bin/pip" install -q -e '.[train]' pytest pytest-timeout pytest-xdist hypothesis chex beartype scikit-learn
"$scratch/venv312/bin/python" -c "import jax, flax; print('jax', jax.__version__, 'flax', flax.__version__)"
# What depends on jax most: kernels, exchanges, models, and each kind of run once.
JAX_COMPILATION_CACHE_DIR="$scratch/cache312" timeout 1200 "$scratch/venv312/bin/python" -m pytest -q -p no:cacheprovider -n 2 \
  tests/kernels/test_{flash_attention,attention_libraries,embedding_kernels,mx,mx_kernels,block_quant,sampled_spmm_kernels,gpu_lowering}.py \
  tests/models tests/nn tests/numerics/test_products.py tests/parallel/embedding/test_collection.py \
  tests/parallel/test_{fsdp,ddp,blocks,pipeline,context,offload,graph}.py tests/train/test_{dense,program,checkpoint}.py
