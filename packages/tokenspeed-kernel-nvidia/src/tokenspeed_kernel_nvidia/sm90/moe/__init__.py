"""Mixtures of experts on Hopper."""
