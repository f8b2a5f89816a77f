"""Portable kernels between processes that reach one another's memory."""
