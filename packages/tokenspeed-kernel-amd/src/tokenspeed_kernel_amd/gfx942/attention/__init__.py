"""Attention. Modules whose name ends in ``_device`` import Triton; launchers import them at the first launch."""
