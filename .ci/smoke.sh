#!/usr/bin/env bash
# A step compiled for a TPU, a kernel for NVIDIA's Hopper by CUDA's compiler, and a job of two processes; the full tier
# has the rest (tests/README.md). usage: smoke.sh SCRATCH (an environment with scalejax[dev] is active)
set -euo pipefail
scratch=$1
python -m pytest -q -p no:cacheprovider -m "aot or multiprocess" \
  "tests/aot/test_llama_step.py::test_compiles_with_kernels_on_fsdp_and_tensor[v5p:2x2x2-splash-explicit]" \
  tests/multiprocess/test_training.py::test_two_processes_record_what_one_does
version=$(python -c 'import jax; print(jax.__version__)')
# In a folder of their own: in the environment every later step would look for a GPU.
if ! pip install -q --no-deps --target "$scratch/cuda" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version"; then
  echo "skipped: no wheels of CUDA's compiler for jax $version"
  exit 0
fi
PYTHONPATH="$scratch/cuda" python -m pytest -q -p no:cacheprovider -m aot -k "hopper" \
  "tests/aot/test_embedding_kernels.py" | tee "$scratch/hopper.log"
if grep -q "CUDA's compiler" "$scratch/hopper.log"; then echo "its tests were skipped"; exit 1; fi
