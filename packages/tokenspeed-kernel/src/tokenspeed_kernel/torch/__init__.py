"""Kernels of PyTorch itself, registered as a backend."""
