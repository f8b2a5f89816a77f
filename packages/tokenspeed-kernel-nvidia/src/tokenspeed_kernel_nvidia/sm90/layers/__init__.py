"""Layers of a decode step, from the output projection to the experts, in one persistent launch."""
