"""Attention kernels. Each module imports Triton: import one only where a kernel is to be launched."""
