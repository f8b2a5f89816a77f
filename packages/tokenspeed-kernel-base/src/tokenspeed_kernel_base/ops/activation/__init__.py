"""Activation functions of feed-forward layers."""
