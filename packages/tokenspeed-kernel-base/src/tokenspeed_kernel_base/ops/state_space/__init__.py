"""State-space models: their causal convolution and their recurrence, with states in a cache, by slot."""
