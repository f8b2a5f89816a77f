"""Kernels for a made-up architecture: a folder beside `sm90`, with only the code that a new architecture must provide."""
