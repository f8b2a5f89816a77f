"""Attention and MoE experts by AITER, AMD's own kernels for gfx942 and gfx950, if the package amd-aiter is installed.

Each operator has two modules. The first declares the AITER kernels that are used, and does not import AITER. The second, whose name
ends in ``_device``, adapts the operator's arguments to AITER's public function. The second module is imported when one of its
kernels is first selected. If the import fails, its kernels are excluded with a warning.

The adapters were written from AITER's source, version 0.1.20, and declare only what that source supports. Later sources only add
optional parameters; the tests bind the adapters' calls to both signatures. The adapters have not been run on hardware. On the
gfx950 emulator, they have run AITER's portable kernels for paged caches.
"""
