#!/usr/bin/env bash
# What optional packages are for: the documents as a site, trackers on their real packages.
# usage: optional.sh (an environment with scalejax[dev] is active)
set -euo pipefail
pip install -q -e '.[docs]'
timeout 300 python -m pytest -q -p no:cacheprovider -m "" tests/test_docs_site.py
pip install -q -e '.[trackers]'
timeout 300 python -m pytest -q -p no:cacheprovider -m "" tests/train/trackers
