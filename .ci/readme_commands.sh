#!/usr/bin/env bash
# Runs the README's commands in a given environment. usage: readme_commands.sh VENV SCRATCH
set -euo pipefail
venv=$1 scratch=$2
. "$venv/bin/activate"
# The first command, after its venv part; the run goes to a scratch folder.
first=$(grep -m1 -F "scalejax train wukong" README.md)
second=$(grep -m1 -F "python -m pytest" README.md)
[ "$first" = "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[train]' && scalejax train wukong" ] || { echo "README: the first command changed: $first"; exit 1; }
language=$(grep -m1 -F "scalejax train llama" README.md)
[ "$language" = 'scalejax train llama --workdir runs/llama && scalejax generate runs/llama --prompt "def main("' ] || { echo "README: the command of a language model changed: $language"; exit 1; }
[ "$second" = "pip install -e '.[test]' && python -m pytest -n 2" ] || { echo "README: the second command changed: $second"; exit 1; }
pip install -q -e '.[train]'
SECONDS=0
scalejax train wukong --workdir "$scratch/wukong"
echo "scalejax train wukong: ${SECONDS}s"
[ "$SECONDS" -lt 240 ] || { echo "the main job took over 4 minutes"; exit 1; }
SECONDS=0
scalejax train llama --workdir "$scratch/llama"
echo "scalejax train llama: ${SECONDS}s"
[ "$SECONDS" -lt 480 ] || { echo "the language model took over 8 minutes, of 3 that it is to take"; exit 1; }
scalejax generate "$scratch/llama" --prompt "def main(" --max-tokens 64
pip install -q -e '.[test]'
python -m pytest -q -p no:cacheprovider -n 2
