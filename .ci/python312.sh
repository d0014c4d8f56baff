#!/usr/bin/env bash
# The newest jax on Python 3.12, where that Python exists; else a line that says it was skipped. usage: python312.sh SCRATCH
set -euo pipefail
scratch=$1
python=""
for candidate in python3.12 "$HOME"/.pyenv/versions/3.12*/bin/python3.12; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then python=$candidate; break; fi
done
if [ -z "$python" ]; then echo "skipped: no python3.12 on this machine"; exit 0; fi
"$python" -m venv "$scratch/venv312"
"$scratch/venv312/bin/pip" install -q -e '.[train]' pytest pytest-timeout pytest-xdist hypothesis scikit-learn
"$scratch/venv312/bin/python" -c "import jax, flax; print('jax', jax.__version__, 'flax', flax.__version__)"
# What depends on jax most: kernels, exchanges, models, and each kind of run once.
JAX_COMPILATION_CACHE_DIR="$scratch/cache312" timeout 1200 "$scratch/venv312/bin/python" -m pytest -q -p no:cacheprovider -n 2 \
  tests/kernels/test_attention_libraries.py tests/kernels/test_gpu_lowering.py tests/kernels/test_mx_kernels.py \
  tests/kernels/test_embedding_bag.py \
  tests/kernels/test_sampled_spmm_kernels.py::test_exact_products_equal_scipy_on_rows_of_every_bin_and_cut_rows \
  tests/kernels/test_flash_attention.py::test_chunks_of_xla_equal_the_reference_with_gradients \
  tests/kernels/test_flash_attention.py::test_interpreted_kernels_equal_the_reference_with_gradients \
  tests/kernels/test_embedding_kernels.py::test_updates_equal_those_of_the_reference_and_touch_nothing_else \
  tests/kernels/test_embedding_kernels.py::test_gradients_equal_those_of_the_reference \
  tests/kernels/test_block_quant.py::test_a_lookup_is_that_of_the_decoded_table_to_the_bit \
  tests/nn/test_attention.py tests/nn/test_linear.py tests/nn/test_layers.py tests/nn/test_cross_entropy_sharded.py \
  tests/numerics/quantized/test_products.py \
  tests/models/recsys/test_dlrm.py tests/models/recsys/test_dcnv2.py \
  tests/models/recsys/test_wukong.py::test_forward_matches_a_literal_numpy_form \
  tests/models/llm/test_llama3.py::test_logits_are_those_of_transformers \
  tests/models/llm/test_llama3.py::test_prefill_and_decode_equal_the_full_forward_pass \
  tests/models/llm/test_llama3.py::test_rematerialisation_changes_no_gradient \
  tests/models/graph/test_layers.py::test_logits_are_those_of_the_equations \
  tests/models/graph/test_layers.py::test_blocks_on_eight_devices_equal_one_with_gradients \
  tests/parallel/embedding/test_collection.py tests/parallel/embedding/test_kinds.py \
  tests/parallel/test_fsdp.py::test_equals_one_device \
  tests/parallel/test_ddp.py::test_any_buckets_and_parts_give_the_gradients_of_one_device \
  tests/parallel/test_context.py tests/parallel/test_offload.py tests/parallel/test_pipeline.py \
  tests/parallel/test_graph.py::test_gradients_of_eight_devices_are_those_of_one \
  tests/parallel/gradients/test_blocks.py tests/parallel/gradients/test_scaling.py \
  tests/inference/test_generate.py::test_greedy_tokens_are_those_of_full_forward_passes \
  tests/inference/test_context.py::test_decoded_tokens_are_read_again_on_whichever_device_they_lie \
  tests/train/test_dense.py::test_devices_and_parts_change_nothing_but_the_order_of_sums \
  tests/train/test_dense.py::test_a_run_in_parts_equals_one_in_one_piece_to_the_bit \
  tests/train/test_graph.py::test_eight_devices_train_as_one \
  tests/train/tables/test_tiers.py::test_a_killed_run_goes_on_to_the_same_bits \
  tests/train/checkpoints/test_checkpoint.py::test_comes_back_to_the_bit_on_any_mesh
