"""Sizes of the per-row state of the sampling kernels."""

STATE = 8
"""int64 fields of a row's state; `_state_device` names them."""

FEW = 128
"""The cutoff search compares at most this many keys pairwise in its last step."""
