"""Sizes of what the sampling kernels keep for each row."""

STATE = 8
"""int64 numbers of a row's state; `_state_device` names them."""

FEW = 128
"""Keys that are compared pair by pair at the end of the search for the last token kept."""
