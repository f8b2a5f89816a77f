"""Attention and MoE experts by AITER, AMD's own kernels for gfx942 and gfx950, if the package amd-aiter is installed.

For each operator one module declares the AITER kernels that are used, and does not import AITER. The module beside it, whose name
ends in ``_device``, adapts the operator's arguments to AITER's public function. It is imported when one of its kernels is first
selected; if the import fails, its kernels are excluded with a warning.

The adapters were written from AITER's source, version 0.1.20, and declare only what that source supports. They have not been run
on hardware. On the gfx950 emulator they have run AITER's portable kernels for paged caches.
"""
