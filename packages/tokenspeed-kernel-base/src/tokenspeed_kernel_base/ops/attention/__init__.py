"""Attention: of whole sequences, of new tokens to a paged cache, and the merging of partial results."""
