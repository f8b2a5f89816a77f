"""vLLM's configurations of quantised checkpoints, in which linear layers use the core's `linear`. A module for each format.

vLLM takes the first kernel in a list that supports a layer, and `register_linear_kernel` appends to this list. So a registered
kernel would never precede vLLM's own kernels. Therefore the configurations of these formats are replaced.
"""
