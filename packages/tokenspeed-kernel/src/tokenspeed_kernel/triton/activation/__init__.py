"""Portable activation kernels, in Triton."""
