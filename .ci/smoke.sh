#!/usr/bin/env bash
# A kernel of each family, a step of each kind of model and a wire format compiled for a TPU, and processes that train and
# fail together; the full tier has the rest (tests/README.md). usage: smoke.sh
set -euo pipefail
timeout 900 python -m pytest -q -n 2 -p no:cacheprovider -m aot \
  "tests/aot/test_llama_step.py::test_compiles_with_kernels_on_fsdp_and_tensor[v5p:2x2x2-splash-explicit]" \
  "tests/aot/test_wukong_step.py::test_wukong_compiles_and_fits[flights-v6e:2x2]" \
  "tests/aot/test_graph_plan.py::test_a_gcn_over_cora_is_planned_on_one_chip" \
  "tests/aot/test_embedding_kernels.py::test_kernels_compile_for_a_tpu_without_a_copy_of_the_table[adagrad-float32-v5e:2x2]" \
  "tests/aot/test_flash_attention.py::test_kernels_compile_for_a_tpu[offset by row, documents, window-v5e:2x2]" \
  "tests/aot/test_grouped_matmul.py::test_kernels_compile_for_a_tpu_forward_and_with_both_gradients[few rows-v5e:2x2]" \
  "tests/aot/test_sampled_spmm.py::test_sums_of_picked_edges_compile_for_a_tpu[float32-v5e:2x2]" \
  "tests/aot/test_mx.py::test_products_compile_for_a_tpu[bdr_mx9, last axis-v6e:2x2]" \
  "tests/aot/test_block_quant.py::test_rows[v5e:2x2-int4]" \
  "tests/aot/test_number_formats.py::test_a_tile_in_a_kernel[v5e:2x2-bdr_mx9-ties_to_even]" \
  tests/aot/test_sdp4bit_step.py::test_eight_bits_travel_within_a_slice_and_four_between \
  tests/aot/test_sdp4bit_step.py::test_buckets_do_not_wait_for_each_other_and_work_goes_on_while_they_are_between_slices \
  "tests/aot/test_dhen_step.py::test_only_shards_of_dense_gradients_cross_between_slices[explicit]" \
  "tests/aot/test_tower_step.py::test_pooled_vectors_alone_cross_between_slices[table_wise]" \
  "tests/aot/test_wire_formats.py::test_rows_and_gradients_of_tables_travel_as_bytes[int8-float8_e5m2-68-68]"
timeout 600 python -m pytest -q -p no:cacheprovider -m multiprocess \
  tests/multiprocess/test_training.py::test_two_processes_record_what_one_does \
  tests/multiprocess/test_training.py::test_a_run_goes_on_at_another_number_of_processes \
  tests/multiprocess/test_training.py::test_an_error_of_process_0_alone_ends_the_whole_job_soon \
  tests/multiprocess/test_preempted_processes.py::test_a_process_that_is_stopped_ends_the_other_in_time \
  tests/multiprocess/test_compressed_processes.py::test_copies_of_rounded_steps_are_the_same_bits_on_all_devices_of_all_processes \
  tests/multiprocess/test_distributed_processes.py::test_a_worker_that_fails_does_not_leave_the_others_running \
  "tests/multiprocess/test_engine_processes.py::test_two_processes_give_the_tokens_of_one[context=8]"
