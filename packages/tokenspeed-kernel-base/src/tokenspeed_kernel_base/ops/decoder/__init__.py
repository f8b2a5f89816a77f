"""Whole layers of a decoder."""
