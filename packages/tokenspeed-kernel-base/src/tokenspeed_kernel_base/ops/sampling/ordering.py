"""The order in which operators rank logits, scores and router logits."""

from __future__ import annotations

import torch
from torch import Tensor


def descending_order(values: Tensor) -> Tensor:
    """Returns the indices, int64 of the values' shape, that sort the last axis of a float tensor in descending order.

    NaN ranks above every number. Equal values, and NaNs, keep their order.
    """
    # On a GPU, sort orders NaNs by their bits: a NaN with the sign bit set ranks below every number. So all NaNs are first replaced
    # by one NaN.
    return values.where(~values.isnan(), torch.nan).sort(dim=-1, descending=True, stable=True).indices
