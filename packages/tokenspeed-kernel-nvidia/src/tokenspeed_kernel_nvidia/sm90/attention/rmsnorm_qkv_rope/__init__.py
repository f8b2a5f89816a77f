"""From the residual stream to q, and k and v in the cache, in one launch."""
