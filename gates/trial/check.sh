#!/usr/bin/env bash
# The conformance kit on the newer kernels (100 s, 12 processes), and beside it the benchmark of families without times (45 s).
# Prints a line a kernel, then the lines of the benchmark. Started at the root of a copy of the branch.
commit=$(cat COMMIT 2>/dev/null)
timeout -k 2 60 python3 packages/tokenspeed-kernel/benchmarks/h200_families.py --check --seconds 45 --commit "${commit:-none}" \
  --only 'argmax_with_value|mla_prefill: deepseek-v3 4 x|rmsnorm_quantize_fp8: llama-3-8b|top_k_indices: half' \
  --without '^(flashinfer|gluon|aiter)_' --output "$OUT/checked.json" >"$OUT/families_check.log" 2>&1 &
bash "$TRIAL/conformance.sh" 98 12
wait
echo "-- families, checked"
tail -n 12 "$OUT/families_check.log"
