"""Multi-head latent attention (DeepSeek): `backend` has the capabilities, `builder` describes a batch, `impl` attends to the cached
latents, `prefill` runs prompts with expanded keys and values, `serving` finds kernels."""
