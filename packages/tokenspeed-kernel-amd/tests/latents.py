"""Inputs and references that the tests of latent attention share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Draw
from tokenspeed_kernel_base.operator import Operator
from tokenspeed_kernel_base.ops.attention._inputs import paged

E4M3 = torch.float8_e4m3fn
FP8_ERROR = 2.5e-2  # probabilities are rounded to e4m3, with 4 significant bits
DEEPSEEK: dict[str, Any] = {"heads": 16, "head_dim": 576, "kv_lora_rank": 512, "page_size": 64, "softmax_scale": 0.1352}


def inputs(device: torch.device, kv_lens: Sequence[int], new: Sequence[int] | None = None, **options: Any) -> dict[str, Any]:
    """Returns an operator's arguments, with NaN in cache slots without a token. Without ``new``, these are arguments of a decode
    operator."""
    return paged(kv_lens, new, **{"stale": True, **DEEPSEEK, **options})(Draw(device, sum(kv_lens)))


def reference(operator: Operator[Any, Any], arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the output and LSE of the operator's body, computed in fp32."""
    plain = dict(arguments)
    for name, scale in (("q", plain.pop("q_scale", None)), ("kv_cache", plain.pop("kv_scale", None))):
        plain[name] = plain[name].float() if scale is None else plain[name].float() * scale
    found: tuple[Tensor, Tensor] = operator(**plain, return_lse=True, solution="reference")
    return found
