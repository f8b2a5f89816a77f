"""The attention backend: `backend` says what it can do, `metadata` describes a batch, `impl` attends, `serving` finds kernels."""
