"""Attention on Hopper."""
