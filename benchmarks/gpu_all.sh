#!/usr/bin/env bash
# Everything worth measuring on a GPU, the most valuable first, in at most ten minutes:
#
#     benchmarks/gpu_all.sh [OUTPUT_FOLDER]        # default: gpu_results
#     ONLY="checks mx_kernels" benchmarks/gpu_all.sh       # of these names alone; SECONDS_ALLOWED=300 for less time
#
# First the checks, side by side since they compile more than they compute: the tests of the kernels, compiled where a
# CPU interprets them, and the checks of each script. Then times, one after the other. What does not fit the time is
# left out and named at the end; what fails does not stop the rest. Attention is compared with cuDNN; peers of other
# benchmarks run on a CPU only, so scalejax is timed alone there. Each JSON file becomes a table with
# benchmarks/results_table.py; the embedding kernels are compared with XLA and with a copy, line by line, in
# embedding_kernels.jsonl, those of packed blocks in mx_kernels.jsonl, those of integer groups in group_kernels.jsonl,
# those of sparse products with cuSPARSE in sparse_kernels.jsonl.
set -uo pipefail

cd "$(dirname "$0")/.."
out=$(mkdir -p "${1:-gpu_results}" && cd "${1:-gpu_results}" && pwd)
python=${PYTHON:-python3}
deadline=$((SECONDS + ${SECONDS_ALLOWED:-570}))
export XLA_PYTHON_CLIENT_PREALLOCATE=${XLA_PYTHON_CLIENT_PREALLOCATE:-false}
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/compile_cache}
install -d -m 0700 "$JAX_COMPILATION_CACHE_DIR" # whoever can write a compile cache can run code in this process
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=() skipped=()

wanted() { # NAME
    [[ -z ${ONLY:-} || " $ONLY " == *" $1 "* ]]
}

run() { # NAME MOST_SECONDS ARGUMENTS...: one run of Python, its output in OUTPUT_FOLDER/NAME.log
    local name=$1 most=$2 left=$((deadline - SECONDS))
    shift 2
    wanted "$name" || return 0
    if ((left < 20)); then
        skipped+=("$name")
        return
    fi
    echo "== $name: python $*"
    timeout --kill-after=5 $((most < left ? most : left)) "$python" "$@" 2>&1 | tee "$out/$name.log"
    local status=${PIPESTATUS[0]}
    if ((status != 0)); then failed+=("$name (exit $status)"); fi
}

step() { # NAME MOST_SECONDS ARGUMENTS...: one command of scalejax
    run "$1" "$2" -m scalejax "${@:3}"
}

"$python" - <<'CHECK' || exit 2
import sys

import jax

device = jax.devices()[0]
print(f"jax {jax.__version__} on {device.device_kind} ({device.platform})")
sys.exit(0 if device.platform == "gpu" else "gpu_all.sh: jax sees no GPU here")
CHECK

checks() {
    local most=$((deadline - SECONDS < 200 ? deadline - SECONDS : 200)) name
    declare -A running
    check() { # NAME ARGUMENTS...
        timeout --kill-after=5 "$most" "$python" "${@:2}" >"$out/$1.log" 2>&1 &
        running[$1]=$!
    }
    for name in embedding mx groups spmm; do check "check_$name" "benchmarks/gpu_$name.py" --only checks; done
    # XLA's products, with which kernels are compared, have all bits of float32.
    JAX_PLATFORMS=cuda,cpu XLA_FLAGS='' JAX_DEFAULT_MATMUL_PRECISION=highest \
        check kernel_tests -m pytest tests/kernels -m '' -k 'gpu or kernel_of_lookups' -n "${TEST_PROCESSES:-8}" \
        --dist worksteal -q -W ignore --tb=short -p no:cacheprovider
    for name in "${!running[@]}"; do
        wait "${running[$name]}" || failed+=("$name (exit $?)")
        echo "== $name"
        tail -n 40 "$out/$name.log"
    done
}

wanted checks && checks
step doctor 60 doctor
run embedding_kernels 240 benchmarks/gpu_embedding.py --only times --seconds 210 --json "$out/embedding_kernels.jsonl"
run row_lookup 120 benchmarks/row_lookup.py --seconds 90 --json "$out/row_lookup.jsonl"
run mx_kernels 150 benchmarks/gpu_mx.py --only times --seconds 120 --json "$out/mx_kernels.jsonl"
run group_kernels 120 benchmarks/gpu_groups.py --only times --seconds 90 --json "$out/group_kernels.jsonl"
run sparse_kernels 150 benchmarks/gpu_spmm.py --only times --seconds 120 --json "$out/sparse_kernels.jsonl"
step flash_attention 150 bench flash_attention --against jax --json "$out/flash_attention.json"
run fp8 120 benchmarks/gpu_fp8.py --json "$out/fp8.jsonl"
step grouped_matmul 150 bench grouped_matmul --against dense --json "$out/grouped_matmul.json"
step moma_step 200 bench moma_step --against dense --json "$out/moma_step.json"
step llama_step_1b 200 bench llama_step --case 1b --json "$out/llama_step.json"
step llama_decode_8b 150 bench llama_decode --case 8b --json "$out/llama_decode.json"
run long_prefill 300 benchmarks/gpu_prefill.py --tokens "${PREFILL_TOKENS:-131072}" --json "$out/long_prefill.json" # 524288 on an H200
step vision_step 150 bench vision_step --json "$out/vision_step.json"
run recist_decode 120 benchmarks/recist_decode.py
step wukong_main_job 180 train wukong --workdir "$out/wukong" --resume never
step wukong_step 180 bench wukong_step --json "$out/wukong_step.json"
step dlrm_step 150 bench dlrm_step --json "$out/dlrm_step.json"
step data_pipeline 90 bench data_pipeline --json "$out/data_pipeline.json"

# The closing table of the main job, without its checkpoints.
if [[ -f $out/wukong/summary.json ]]; then cp "$out/wukong/summary.json" "$out/wukong_main_job.json"; fi
((${#failed[@]} == 0)) || printf 'failed: %s\n' "${failed[@]}"
((${#skipped[@]} == 0)) || printf 'left out for lack of time: %s\n' "${skipped[@]}"
((${#failed[@]} == 0))
