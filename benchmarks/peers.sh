#!/usr/bin/env bash
# Installs the libraries that scalejax is compared with into the environment that is active now:
#
#     . .venv/bin/activate && benchmarks/peers.sh
#     PYTHON=/path/to/python benchmarks/peers.sh
#
# Every install is held to the torch that all peers were tried with. torch comes as its CPU build where the package
# index in use offers one (pip's --index-url and PIP_INDEX_URL work as always).
set -euo pipefail

python=${PYTHON:-python3}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
cat >"$constraints" <<'PINS'
torch==2.13.0
PINS

if ! "$python" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
    echo "peers.sh: $python is not in a virtual environment; activate one first, or set PYTHON." >&2
    exit 2
fi

"$python" -m pip install --constraint "$constraints" torch
# TorchRec asks for the CUDA build of fbgemm, so it comes without its requirements and they come by name. Only 1.8.0 of
# fbgemm-gpu-cpu loads beside torch 2.13.
"$python" -m pip install --constraint "$constraints" fbgemm-gpu-cpu==1.8.0
"$python" -m pip install --constraint "$constraints" --no-deps torchrec==1.8.0
"$python" -m pip install --constraint "$constraints" torchmetrics==1.0.3 iopath pyre-extensions tensordict
"$python" -m pip install --constraint "$constraints" transformers==5.23.0 safetensors tokenizers
"$python" -m pip install --constraint "$constraints" torchao==0.18.0
"$python" -m pip install --constraint "$constraints" compressed-tensors==0.20.0
# microxcaling is on no index, and its build would install an older torch, torchvision and torchaudio.
"$python" -m pip install hatchling hatch-vcs
"$python" -m pip install --no-deps --no-build-isolation "git+https://github.com/microsoft/microxcaling@7bc4195"
"$python" -m pip install --constraint "$constraints" torch_geometric==2.8.1
"$python" -m pip install --constraint "$constraints" torch-pruning==1.6.1

"$python" - <<'CHECK'
import torch

import torchao
import torchrec
import transformers

print(f"torchrec {torchrec.__version__}, transformers {transformers.__version__}, torchao {torchao.__version__}")
print(f"torch {torch.__version__}: {torch.get_num_threads()} threads, CUDA {torch.version.cuda or 'not built in'}")
CHECK
