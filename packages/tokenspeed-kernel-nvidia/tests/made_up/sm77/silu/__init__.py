"""`silu_and_mul`: persistent CTAs that take rows round-robin."""
