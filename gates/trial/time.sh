#!/usr/bin/env bash
# Needs 35 s: the benchmark of families on four calls, with peers of PyTorch alone (vLLM's are absent and must say so).
commit=$(cat COMMIT 2>/dev/null)
checked=()
[ -s "$OUT/checked.json" ] && checked=(--checked "$OUT/checked.json")
timeout -k 2 50 python3 packages/tokenspeed-kernel/benchmarks/h200_families.py --seconds 40 --commit "${commit:-none}" "${checked[@]}" \
  --only 'argmax_with_value|mla_prefill: deepseek-v3 4 x|rmsnorm_quantize_fp8: llama-3-8b|top_k_indices: half' \
  --without '^(flashinfer|gluon|aiter)_' --output "$OUT/families.json" 2>&1 | tail -n 20
