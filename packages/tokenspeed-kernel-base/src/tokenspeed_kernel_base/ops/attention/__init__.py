"""Attention: of whole sequences, of new tokens to a paged cache, and of partial results made one."""
