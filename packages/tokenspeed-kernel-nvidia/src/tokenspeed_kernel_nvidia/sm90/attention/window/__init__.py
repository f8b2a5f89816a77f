"""Prefill and extend in a sliding window."""
