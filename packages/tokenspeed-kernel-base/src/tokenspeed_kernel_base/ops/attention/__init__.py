"""Attention operators: attention within whole sequences, attention of new tokens to a paged cache, and merging of partial
results."""
