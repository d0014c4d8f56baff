#!/usr/bin/env bash
# Builds sdist then wheel, compares the wheel with the checkout, installs it elsewhere and tests it there.
# usage: wheel.sh SCRATCH (an environment with `build` is active)
set -euo pipefail
scratch=$1 root=$PWD
git archive --format=tar HEAD | (mkdir -p "$scratch/src" && tar -x -C "$scratch/src")
python -m build -q --outdir "$scratch/dist" "$scratch/src"
python - "$scratch/dist" "$scratch/src" <<'PY'
import pathlib, sys, zipfile
dist, src = map(pathlib.Path, sys.argv[1:])
wheel = next(dist.glob("*.whl"))
packed = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
wanted = {str(p.relative_to(src)) for p in (src / "scalejax").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
if packed != wanted:
    sys.exit(f"wheel and checkout differ: missing {sorted(wanted - packed)}, extra {sorted(packed - wanted)}")
print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 1e6:.1f} MB, as in the checkout")
PY
python3 -m venv "$scratch/wheel-venv"
"$scratch/wheel-venv/bin/pip" install -q "$(ls "$scratch"/dist/*.whl)[train,llm]" pytest pytest-timeout pytest-xdist hypothesis scikit-learn safetensors
cp -r tests "$scratch/tests" && cp pyproject.toml "$scratch/"
cd "$scratch"
"$scratch/wheel-venv/bin/python" -c "import scalejax, sys; assert not scalejax.__file__.startswith('$root/'), scalejax.__file__"
# The programs are those that the checkout has compiled; the wheel is what is tested here: bundled data, formats of files,
# and one of each kind of kernel, exchange, model and run.
JAX_COMPILATION_CACHE_DIR="$root/.cache/jax" "$scratch/wheel-venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 \
  tests/data/click_logs/test_flights.py \
  tests/data/graphs/test_readers.py::test_cora_is_bundled_with_its_published_sizes \
  tests/data/tables/test_parquet.py::test_windows_resume_anywhere_at_any_number_of_processes \
  tests/data/click_logs/test_criteo.py::test_a_converted_file_gives_the_same_examples \
  tests/data/text/test_corpus.py::test_documents_are_the_files_in_order_with_their_marks \
  tests/models/llm/test_safetensors.py::test_shards_hold_no_more_than_the_limit_unless_a_tensor_does \
  tests/models/llm/test_safetensors.py::test_a_slice_is_what_numpy_cuts \
  tests/parallel/embedding/plan/test_plan_file.py::test_what_was_saved_is_loaded \
  tests/parallel/embedding/stored/test_torchrec.py::test_what_is_written_reads_back \
  tests/train/checkpoints/test_checkpoint.py::test_comes_back_to_the_bit_on_any_mesh \
  tests/train/checkpoints/test_checkpoint.py::test_a_flipped_bit_in_any_file_is_noticed_and_the_intact_step_named \
  tests/configs/test_earlier.py tests/configs/test_recd.py \
  tests/kernels/test_flash_attention.py::test_interpreted_kernels_equal_the_reference_with_gradients \
  tests/kernels/test_embedding_kernels.py::test_updates_equal_those_of_the_reference_and_touch_nothing_else \
  tests/kernels/test_mx_kernels.py::test_products_decode_their_tile \
  tests/kernels/test_block_quant.py::test_bytes_are_those_of_the_oracle \
  tests/kernels/test_sampled_spmm_kernels.py::test_exact_products_equal_scipy_on_rows_of_every_bin_and_cut_rows \
  tests/parallel/embedding/test_collection.py::test_lookup_equals_numpy \
  tests/parallel/embedding/exchange/test_wire.py::test_forward_and_backward_travel_as_they_are_told \
  tests/parallel/test_context.py::test_results_and_gradients_are_those_of_dense_attention \
  tests/models/recsys/test_wukong.py::test_forward_matches_a_literal_numpy_form \
  tests/models/recsys/test_baselines.py::test_forward_matches_a_literal_numpy_form \
  tests/models/llm/test_llama3.py::test_logits_are_those_of_transformers \
  tests/models/graph/test_layers.py::test_logits_are_those_of_the_equations \
  tests/train/test_graph.py::test_a_run_in_two_parts_ends_at_the_same_numbers \
  tests/train/test_dense.py::test_a_run_in_parts_equals_one_in_one_piece_to_the_bit
# What must be equal to the bit, compiled as users compile it.
XLA_FLAGS="" JAX_COMPILATION_CACHE_DIR="$scratch/cache" "$scratch/wheel-venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 -m "" \
  "tests/parallel/embedding/test_kinds.py::test_every_kind_equals_one_device_to_the_bit[row_wise-shard-adam-True-8]" \
  "tests/parallel/embedding/test_kinds.py::test_every_kind_equals_one_device_to_the_bit[grid-copy-sgd-False-8]" \
  tests/parallel/test_fsdp.py::test_sharded_initialisation_equals_that_of_one_device_to_the_bit \
  tests/train/checkpoints/test_resume.py::test_killed_run_goes_on_to_the_same_bits \
  tests/train/batches/test_pipeline.py::test_the_exchange_of_ids_a_step_ahead_changes_no_bit
"$scratch/wheel-venv/bin/scalejax" train wukong-smoke --workdir "$scratch/wheel-run"
