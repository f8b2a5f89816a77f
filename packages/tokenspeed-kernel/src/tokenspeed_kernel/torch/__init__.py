"""PyTorch's own kernels."""
