"""Normalisation operators."""
