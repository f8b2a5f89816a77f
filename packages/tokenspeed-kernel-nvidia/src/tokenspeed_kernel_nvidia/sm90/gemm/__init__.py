"""Products of matrices on Hopper."""
