"""RMSNorm of each head of queries and keys (QK norm)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel_base.cases import Case, Cost, Draw, nbytes, recipe
from tokenspeed_kernel_base.checks import FLOATS, Checker
from tokenspeed_kernel_base.operator import operator
from tokenspeed_kernel_base.ops.norm.rmsnorm import rms_normalise


@operator(
    "norm",
    "qk_rmsnorm",
    formats=("q", "k"),
    traits={"head_dim": int},
    outs=("q_out", "k_out"),
    in_place={"q_out": ("q",), "k_out": ("k",)},
    varying=("tokens",),
)
def qk_rmsnorm(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float = 1e-6,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """QK norm: `rmsnorm` of every head of q and k over head_dim, with one weight for all heads.

    Computes ``x / sqrt(mean(x^2) + eps) * weight`` for each head. The normalisation keeps attention logits bounded (Henry et al.,
    2020, arXiv:2010.04245; in this form Dehghani et al., 2023, arXiv:2302.05442). Arithmetic is float32 (float64 for float64
    inputs); the result is rounded to q's dtype once, after the multiplication by weight.

    Args:
        q: float16, bfloat16, float32 or float64 ``[tokens, heads, head_dim]``. May be a strided slice of a fused qkv.
        k: q's dtype ``[tokens, kv_heads, head_dim]``. May be strided.
        q_weight: float16, bfloat16, float32 or float64 ``[head_dim]``.
        k_weight: the weight of k, like q_weight.
        eps: added to the mean square, > 0.
        q_out: receives the normalised q; may be q.
        k_out: receives the normalised k; may be k.

    Returns:
        ``(q, k)`` normalised, in the shapes and dtype of the inputs, contiguous.

    Raises:
        TypeError, ValueError: an argument is not as stated above. Raised before anything is launched.

    Example:
        >>> import torch
        >>> from tokenspeed_kernel import qk_rmsnorm
        >>> q, k = torch.tensor([[[3.0, 4.0], [0.0, 2.0]]]), torch.tensor([[[1.0, 1.0]]])
        >>> q, k = qk_rmsnorm(q, k, torch.ones(2), 2 * torch.ones(2))
        >>> q
        tensor([[[0.8485, 1.1314],
                 [0.0000, 1.4142]]])
        >>> k
        tensor([[[2.0000, 2.0000]]])

    Safe in CUDA graphs.
    """
    return rms_normalise(q, q_weight, eps, q.dtype), rms_normalise(k, k_weight, eps, k.dtype)


@qk_rmsnorm.traits
def _(q: Tensor) -> dict[str, object]:
    return {"head_dim": q.shape[-1]}


@qk_rmsnorm.check
def _(check: Checker, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> None:
    check.tensor("q", q, "tokens heads head_dim", FLOATS)
    check.tensor("k", k, "tokens kv_heads head_dim", q.dtype)
    check.tensor("q_weight", q_weight, "head_dim", FLOATS)
    check.tensor("k_weight", k_weight, "head_dim", FLOATS)
    check.require(eps > 0, "eps", "positive", eps)


@qk_rmsnorm.fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), torch.empty_like(k, memory_format=torch.contiguous_format)


@recipe
def _inputs(
    tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.bfloat16, fused: bool = False
) -> Callable[[Draw], dict[str, Any]]:
    def make(draw: Draw) -> dict[str, Any]:
        # A fused projection stores q, k and v of a token contiguously; q and k are then strided slices.
        qkv = draw.normal(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
        q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
        return {
            "q": q if fused else q.clone(memory_format=torch.contiguous_format),
            "k": k if fused else k.clone(memory_format=torch.contiguous_format),
            "q_weight": 1 + draw.normal(head_dim, scale=0.1, dtype=dtype),
            "k_weight": 1 + draw.normal(head_dim, scale=0.1, dtype=dtype),
        }

    return make


@qk_rmsnorm.cases
def _() -> list[Case]:
    return [
        Case("one token, one head of 8, float32", _inputs(1, 1, 1, 8, torch.float32)),
        Case("qwen3-235b decode 16, slices of a fused qkv", _inputs(16, 64, 4, 128, fused=True)),
        Case("odd head_dim 57, float16", _inputs(5, 6, 3, 57, torch.float16)),
        Case("more kv heads than heads, float32", _inputs(3, 1, 4, 64, torch.float32)),
        Case("no tokens", _inputs(0, 8, 2, 64)),
        Case("qwen3-235b decode 64, slices of a fused qkv", _inputs(64, 64, 4, 128, fused=True), large=True),
        Case("qwen3-235b prefill 16384, slices of a fused qkv", _inputs(16384, 64, 4, 128, fused=True), large=True),
    ]


@qk_rmsnorm.cost
def _(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> Cost:
    return Cost(flops=4.0 * (q.numel() + k.numel()), bytes=2 * nbytes(q, k) + nbytes(q_weight, k_weight))
