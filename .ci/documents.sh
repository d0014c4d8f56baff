#!/usr/bin/env bash
# What a reader is told: the README's language model, the documents as a site, trackers on their real packages.
# usage: documents.sh SCRATCH (an environment with scalejax[dev] is active)
set -euo pipefail
scratch=$1
bash .ci/readme_commands.sh language "$VIRTUAL_ENV" "$scratch"
# In an environment of their own, as these packages ask for other versions.
python3 -m venv "$scratch/documents"
. "$scratch/documents/bin/activate"
pip install -q -e '.[test,docs,trackers]'
python -m pytest -q -p no:cacheprovider -m "" tests/test_docs_site.py tests/train/trackers
