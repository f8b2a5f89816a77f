"""Quantisation to narrow formats and dequantisation."""
