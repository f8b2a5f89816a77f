"""The attention backend: `backend` has its capabilities, `metadata` describes a batch, `impl` runs attention, `serving` finds
kernels."""
