#!/usr/bin/env bash
# final.sh: every family beside all peers, vLLM 0.26's among them, in at most 150 s: 60 s of checks and compilation, side by side,
# then up to 82 s of measurement, alone. Start it at the root of a checkout, with PYTHONPATH set to its packages/*/src, OUT set, and
# COMMIT set where it is a copy. Options of the last run may be given: final.sh --only mla
#   VLLM_SITE=/tmp/vllm_site bash final.sh
# Results: $OUT/h200_families.json, $OUT/final.log, and a log a process of the checks.
site=${VLLM_SITE:-/tmp/vllm_site}
commit=${COMMIT:-$(git rev-parse HEAD 2>/dev/null || cat COMMIT 2>/dev/null || echo none)}
program=packages/tokenspeed-kernel/benchmarks/h200_families.py
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
checks=$OUT/checks
mkdir -p "$checks"
more=()
for folder in ${OTHER_SITES:-}; do more+=(--peers "$folder"); done # flash-linear-attention, say
common=(--peers "$site" "${more[@]}" --commit "$commit" --without '^(flashinfer|gluon|aiter)_')
check() { # NAME SECONDS OPTIONS...
  local name=$1 seconds=$2
  shift 2
  timeout -k 2 $((seconds + 10)) python3 $program --check --seconds "$seconds" --peer-seconds 45 "${common[@]}" \
    --output "$checks/$name.json" "$@" >"$checks/$name.log" 2>&1 || echo "$name: ended with $?" >>"$checks/$name.log"
}
check linear 50 --family "linear attention" &
check state 50 --family "state space" &
check sparse 50 --family "sparse attention" --only 'mla_sparse|top_k_indices' &
check paged_scores 50 --family "sparse attention" --only 'dsa_indexer_scores_with_kvcache' &
check scores 50 --family "sparse attention" --only 'dsa_indexer_scores:|dsa_select|store_index|positions' &
check decode 50 --family "latent attention" --only 'mla_decode|rope|store' &
check latent 50 --family "latent attention" --only 'mla_prefill|mla_extend' &
check fp8 50 --family "fp8 attention" &
check prologues 50 --family "fused prologues" &
check products 50 --family "products" --only 'mm: .*(blo|per token)' &
check weights 50 --family "products" --only 'mm: .*(nvfp4|mxfp4|mxfp8|row of)' &
check others 50 --family "scales and codes" --family sampling --family speculation --family "cache movement" &
wait
files=()
for file in "$checks"/*.json; do [ -s "$file" ] && files+=(--checked "$file"); done
grep -hE 'absent:|not measured|stopped|ended with| (failed|error|no time):' "$checks"/*.log | cut -c1-300
echo "-- measured"
timeout -k 2 92 python3 $program --seconds "${SECONDS_OF_RUN:-80}" --peer-seconds 6 "${common[@]}" "${files[@]}" \
  --output "$OUT/h200_families.json" "$@" 2>&1 | tee "$OUT/final.log"
