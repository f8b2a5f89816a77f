#!/usr/bin/env bash
# conformance.sh [SECONDS=100] [PROCESSES=14]: the conformance kit on the newer kernels, a line a kernel; what there was no time for
# is named. Kernels start in the order below.
seconds=${1:-100} processes=${2:-14}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${OUT:-/tmp/gates_out}/conformance
mkdir -p "$out"
export OMP_NUM_THREADS=1
end=$(($(date +%s) + seconds)) here=$here out=$out
export end here out
one() {
  left=$((end - $(date +%s) - 3))
  ((left > 12)) || { echo "$1: not begun" >"$out/$1.txt"; return; }
  timeout -k 2 $((left + 2)) python3 "$here/conformance.py" "$1" "$((left - 8))" >"$out/$1.txt" 2>"$out/$1.err" ||
    echo "$1: ENDED with $?: $(tail -c 300 "$out/$1.err" | tr '\n' ' ')" >>"$out/$1.txt"
}
export -f one
xargs -P "$processes" -I{} bash -c 'one {}' <<'K'
cutedsl_mla_prefill
cutedsl_mla_decode_with_kvcache
cutedsl_mla_decode_with_kvcache_fp8
cutedsl_mla_sparse_with_kvcache
triton_gated_delta_rule_prefill
triton_gated_delta_rule_decode
triton_ssd_prefill
triton_ssd_decode
triton_sample_top_k_top_p
cutedsl_mha_prefill_64
cutedsl_mha_extend_with_kvcache_128
cutedsl_mha_decode_with_kvcache_64
cutedsl_mha_prefill_96
cutedsl_mha_decode_with_kvcache_256
cutedsl_mha_prefill_80
cutedsl_mha_prefill_256
cutedsl_mha_extend_with_kvcache_96
cutedsl_mha_decode_with_kvcache_96
cutedsl_mha_decode_with_kvcache_any_cache_80
cutedsl_mha_prefill_128
cutedsl_mha_extend_with_kvcache_64
cutedsl_mha_decode_with_kvcache_128
triton_token_logprobs
triton_argmax_with_value
K
cat "$out"/*.txt | grep -v '^$'
find "$out" -name '*.err' -empty -delete
