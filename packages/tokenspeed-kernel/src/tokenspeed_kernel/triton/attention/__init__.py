"""Portable attention kernels, in Triton."""
