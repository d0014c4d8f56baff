#!/usr/bin/env bash
# Builds sdist then wheel, compares the wheel with the checkout, and tests it away from there.
# usage: wheel.sh SCRATCH (an environment with scalejax[dev] is active)
set -euo pipefail
scratch=$1 root=$PWD
git archive --format=tar HEAD | (mkdir -p "$scratch/src" && tar -x -C "$scratch/src")
python -m build -q --outdir "$scratch/dist" "$scratch/src"
python - "$scratch/dist" "$scratch/src" <<'PY'
import pathlib, sys, zipfile
dist, src = map(pathlib.Path, sys.argv[1:])
wheel = next(dist.glob("*.whl"))
packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
expected = {str(p.relative_to(src)) for p in (src / "scalejax").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
if packed != expected:
    sys.exit(f"wheel and checkout differ: missing {sorted(expected - packed)}, extra {sorted(packed - expected)}")
print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 1e6:.1f} MB, as in the checkout")
PY
# In a folder before the environment's packages, which are those that its extras ask for.
pip install -q --no-deps --target "$scratch/wheel" "$scratch"/dist/*.whl
cp -r tests "$scratch/tests" && cp pyproject.toml "$scratch/"
cd "$scratch"
export PYTHONPATH="$scratch/wheel"
python -c "import scalejax; assert scalejax.__file__.startswith('$scratch/wheel/'), scalejax.__file__"
# Bundled data, formats of files, and one of each kind of kernel, exchange, model and run.
: "${JAX_COMPILATION_CACHE_DIR:=$root/.cache/jax}"
export JAX_COMPILATION_CACHE_DIR
python -m pytest -q -p no:cacheprovider -n 2 \
  tests/data/graphs/test_readers.py::test_cora_is_bundled_with_its_published_sizes \
  tests/data/tables/test_parquet.py::test_windows_resume_anywhere_at_any_number_of_processes \
  tests/data/click_logs/test_criteo.py::test_a_converted_file_gives_the_same_examples \
  tests/data/text/test_corpus.py::test_documents_are_the_files_in_order_with_their_marks \
  tests/models/llm/test_safetensors.py::test_a_slice_is_what_numpy_cuts \
  tests/parallel/embedding/plan/test_plan_file.py::test_what_was_saved_is_loaded \
  tests/parallel/embedding/stored/test_torchrec.py::test_what_is_written_reads_back \
  tests/train/checkpoints/test_checkpoint.py::test_comes_back_to_the_bit_on_any_mesh \
  tests/kernels/test_flash_attention.py::test_chunks_of_xla_equal_the_reference_with_gradients \
  tests/kernels/test_mx.py::test_short_scales_and_other_widths_give_the_codes_of_numerics \
  tests/kernels/test_block_quant.py::test_bytes_are_those_of_the_oracle \
  tests/parallel/embedding/test_collection.py::test_lookup_equals_numpy \
  tests/parallel/embedding/update/test_optimizer_formulas.py::test_twenty_steps_of_every_optimizer_follow_its_formula \
  tests/models/recsys/test_wukong.py::test_forward_matches_a_literal_numpy_form \
  tests/models/llm/test_llama3.py::test_logits_are_those_of_transformers \
  tests/models/graph/test_layers.py::test_logits_are_those_of_the_equations \
  tests/train/test_dense.py::test_a_run_in_parts_equals_one_in_one_piece_to_the_bit
python -m scalejax train wukong-smoke --workdir "$scratch/wheel-run"
