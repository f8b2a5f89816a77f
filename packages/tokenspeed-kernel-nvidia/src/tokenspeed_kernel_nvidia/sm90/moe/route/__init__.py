"""Residual add, RMSNorm, router and top-k of up to 256 tokens, fused in one kernel."""
