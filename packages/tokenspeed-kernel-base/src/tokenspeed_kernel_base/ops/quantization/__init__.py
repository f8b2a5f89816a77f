"""Quantisation to narrow formats, and back."""
