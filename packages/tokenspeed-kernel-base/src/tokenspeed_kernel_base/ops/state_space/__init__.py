"""State-space models: causal convolution and recurrence, with states in the slots of a cache."""
