"""Prefill, extend and latent prefill: attention of many new tokens of a sequence."""
