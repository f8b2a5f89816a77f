"""Attention. Modules whose name ends in ``_device`` import Triton; launchers import these at the first launch."""
