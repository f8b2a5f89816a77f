"""Portable normalisation kernels, in Triton."""
