"""Paged decode: attention of at most a few new tokens of a sequence, split-KV."""
