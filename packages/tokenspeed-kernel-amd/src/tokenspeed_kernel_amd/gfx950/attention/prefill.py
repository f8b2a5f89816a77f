"""Prefill: causal attention of whole sequences, with keys and values contiguous in memory, not paged.

`gluon.prefill` describes the persistent kernel. Keys and values are copied to LDS directly, into two buffers each. Values are
transposed while they are read.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gluon.prefill import SIGNATURES, TRAITS, Config, launch_prefill
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device = DeviceModule(__name__ + "_device")


def _config(head_dim: int, v_head_dim: int) -> Config:
    """Returns three waves per SIMD if head_dim and v_head_dim are 64, otherwise two. With three waves, head_dim 128 would spill
    registers."""
    return Config(3 if head_dim == v_head_dim == 64 else 2)


@register_kernel(
    "attention",
    "mha_prefill",
    solution="gluon",
    capability=GLUON_CDNA4,
    signatures=SIGNATURES,
    traits=TRAITS,
    priority=Priority.SPECIALIZED,
    tags={"determinism"},
)
def mha_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    window_left: int,
    logit_cap: float,
    sinks: Tensor | None,
    return_lse: bool,
    softmax_scale: float | None,
    out: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Implements the operator `tokenspeed_kernel_amd.mha_prefill`, which checks the arguments first. Does not synchronise with the
    device."""
    config = _config(q.shape[2], v.shape[2])
    return launch_prefill(
        device.mha_prefill_gfx950, config, q, k, v, cu_seqlens, window_left, logit_cap, sinks, return_lse, softmax_scale, out
    )
