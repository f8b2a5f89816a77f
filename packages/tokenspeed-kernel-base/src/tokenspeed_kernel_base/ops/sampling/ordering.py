"""The order in which operators rank logits, scores and router logits."""

from __future__ import annotations

import torch
from torch import Tensor


def descending_order(values: Tensor) -> Tensor:
    """Sorts each row of a float tensor ``[..., columns]`` in descending order. Returns the columns in this order: int64, with the
    shape of ``values``.

    NaN ranks above every number. Equal values keep their order, and so do NaNs.
    """
    # On a GPU, sort orders NaNs by their bits: a NaN with the sign bit set ranks below every number. So all NaNs are first replaced
    # by one NaN.
    return values.where(~values.isnan(), torch.nan).sort(dim=-1, descending=True, stable=True).indices
