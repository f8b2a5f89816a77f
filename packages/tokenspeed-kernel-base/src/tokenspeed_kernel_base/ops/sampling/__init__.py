"""Sampling: from logits to the next token."""
