"""Sizes of the per-row state of the sampling kernels."""

STATE = 8
"""The number of int64 fields of a row's state; `_state_device` names them."""

FEW = 128
"""The largest number of sort keys that the cutoff search compares pairwise in its last step."""
