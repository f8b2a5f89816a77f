"""The paged cache of keys and values."""
