#!/usr/bin/env bash
# Old and new results held against each other, every variant compiled, and the cases verified; about 60 to 100 s.
for op in token_logprobs merge_token_logprobs build_draft_tree verify_draft_probs rmsnorm_gated quantize_nvfp4 rmsnorm_moe_topk silu_and_mul_quantize_nvfp4; do
  timeout -k 2 105 python3 "$TRIAL/trial.py" --check $op >"$OUT/check_$op.log" 2>&1 &
done
for kernel in triton_token_logprobs triton_merge_token_logprobs triton_build_draft_tree triton_verify_draft_probs; do
  timeout -k 2 105 python3 -m tokenspeed_kernel verify $kernel --shrink 0 >"$OUT/verify_$kernel.log" 2>&1 &
done
wait
grep -h -E "same bits|within|DIFFERS|FAILED" "$OUT"/check_*.log
tail -n 3 "$OUT"/verify_*.log
