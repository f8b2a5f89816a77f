"""Paged latent (MLA) decode, with 16-bit and with fp8 latents."""
