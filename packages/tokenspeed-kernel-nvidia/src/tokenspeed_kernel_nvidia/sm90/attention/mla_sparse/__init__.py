"""Latent attention to selected slots of a paged latent cache."""
