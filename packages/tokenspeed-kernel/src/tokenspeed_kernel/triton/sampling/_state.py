"""The size of the state that the sampling kernels keep for each row."""

STATE = 8
"""int64 numbers of a row's state; `_state_device` names them."""
