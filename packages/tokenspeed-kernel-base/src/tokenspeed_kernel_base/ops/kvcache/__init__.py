"""Operators on the paged cache of keys and values."""
