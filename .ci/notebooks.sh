#!/usr/bin/env bash
# Executes the notebooks, small. usage: notebooks.sh (an environment with scalejax[dev] is active)
set -euo pipefail
SCALEJAX_NOTEBOOK_SIZE=smoke python .ci/notebooks.py
