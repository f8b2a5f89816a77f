"""Mixtures of experts on CDNA4."""
