"""Softplus, of which several families' operators make gates and step sizes."""

from __future__ import annotations

import torch
from torch import Tensor


def softplus(x: Tensor) -> Tensor:
    """Returns ``log(1 + exp(x))`` in x's dtype. torch.nn.functional.softplus returns x above 20, which is inexact in float64."""
    return torch.logaddexp(x, x.new_zeros(()))
