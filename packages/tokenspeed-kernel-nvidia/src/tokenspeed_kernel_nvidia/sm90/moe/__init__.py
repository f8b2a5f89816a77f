"""MoE expert kernels on Hopper."""
