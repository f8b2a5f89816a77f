"""Attention and experts by AITER, AMD's own kernels for gfx942 and gfx950, where the package amd-aiter is installed.

For each operator one module declares what is used of AITER, and imports nothing of it. The module beside it, whose name ends in
``_device``, adapts the operator's arguments to AITER's public function; it is imported when one of its kernels is first selected.
Where that fails, the kernels are left out with a warning.

The adapters were written from AITER's source, version 0.1.20, and only what that source serves is declared. They have not been run
on hardware. AITER's portable kernels for paged caches have been executed on the gfx950 emulator through them.
"""
