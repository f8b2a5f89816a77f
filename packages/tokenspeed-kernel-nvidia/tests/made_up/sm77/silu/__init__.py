"""`silu_and_mul` with persistent CTAs, to which rows are assigned round-robin."""
