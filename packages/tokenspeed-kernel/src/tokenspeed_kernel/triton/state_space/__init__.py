"""State-space models: causal convolutions and recurrences with states in a cache."""
