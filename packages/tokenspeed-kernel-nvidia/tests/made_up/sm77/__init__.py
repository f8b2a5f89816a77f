"""Kernels for a made-up architecture: a folder beside `sm90`, with all that a new architecture must bring and nothing else."""
