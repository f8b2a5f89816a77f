"""Registers PyTorch's own functions as kernels of the backend ``torch``."""
