"""State-space models: the causal convolution in front of them, and their states, which a cache holds by slot."""
