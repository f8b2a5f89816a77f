"""Computes q from the residual stream, and stores k and v to the cache, in one launch."""
