"""Linear attention in Triton."""
