#!/usr/bin/env bash
# Kernels and exchanges compiled for NVIDIA's Hopper by CUDA's compiler; no GPU is needed. usage: hopper.sh SCRATCH
set -euo pipefail
scratch=$1
version=$(python -c 'import jax; print(jax.__version__)')
# In a folder of their own: in the environment every later step would look for a GPU.
if ! pip install -q --no-deps --target "$scratch/cuda" "jax-cuda13-plugin==$version" "jax-cuda13-pjrt==$version"; then
  echo "skipped: no wheels of CUDA's compiler for jax $version"
  exit 0
fi
PYTHONPATH="$scratch/cuda" timeout 600 python -m pytest -q -n 2 -p no:cacheprovider -m "aot and not slow" \
  -k "hopper or gpus or cuda or a_gpu" tests/aot | tee "$scratch/hopper.log"
if grep -q "CUDA's compiler" "$scratch/hopper.log"; then echo "its tests were skipped"; exit 1; fi
