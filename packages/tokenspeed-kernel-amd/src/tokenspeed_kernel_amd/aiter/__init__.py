"""Attention by AITER, AMD's own kernels for gfx942 and gfx950, where the package amd-aiter is installed.

Each module adapts one operator to AITER's public function for it. What they hand over was read from AITER's source, version
0.1.20, and what is declared of them is what that source serves. They have not been run on hardware; its portable kernels for paged
caches have been executed on the gfx950 emulator through them.
"""
