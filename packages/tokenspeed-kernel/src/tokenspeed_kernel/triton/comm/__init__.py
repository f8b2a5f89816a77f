"""Portable communication kernels between ranks that access each other's memory directly (peer memory)."""
