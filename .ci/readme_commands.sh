#!/usr/bin/env bash
# Runs the README's commands in a given environment. usage: readme_commands.sh train|test|language VENV SCRATCH
set -euo pipefail
which=$1 venv=$2 scratch=$3
. "$venv/bin/activate"
# What the README says, and what is run here, which adds a scratch folder.
says() { found=$(grep -m1 -F "$1" README.md); [ "$found" = "$2" ] || { echo "README: a command changed: $found"; exit 1; }; }
case $which in
  train)
    says "scalejax train wukong" "python3 -m venv .venv && . .venv/bin/activate && pip install -e '.[train]' && scalejax train wukong"
    pip install -q -e '.[train]'
    SECONDS=0
    scalejax train wukong --workdir "$scratch/wukong"
    echo "scalejax train wukong: ${SECONDS}s"
    ;;
  test)
    says "python -m pytest" "pip install -e '.[test]' && python -m pytest -n 2"
    pip install -q -e '.[test]'
    SECONDS=0
    python -m pytest -q -p no:cacheprovider -n 2
    echo "python -m pytest -n 2: ${SECONDS}s"
    ;;
  language)
    says "scalejax train llama" 'scalejax train llama --workdir runs/llama && scalejax generate runs/llama --prompt "def main("'
    SECONDS=0
    scalejax train llama --workdir "$scratch/llama"
    echo "scalejax train llama: ${SECONDS}s"
    scalejax generate "$scratch/llama" --prompt "def main(" --max-tokens 64
    ;;
esac
