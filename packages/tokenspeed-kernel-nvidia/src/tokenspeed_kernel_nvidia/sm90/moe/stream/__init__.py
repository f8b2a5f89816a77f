"""Experts of few tokens: weights are streamed once, activations stay on chip."""
