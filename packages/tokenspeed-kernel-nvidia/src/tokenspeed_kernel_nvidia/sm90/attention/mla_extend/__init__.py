"""Latent attention of new tokens to a paged latent cache."""
