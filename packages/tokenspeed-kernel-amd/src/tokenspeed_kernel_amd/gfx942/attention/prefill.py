"""Prefill: causal attention of whole sequences, with keys and values contiguous in memory, not paged.

`gluon.prefill` describes the persistent kernel. gfx942 can neither copy 16 bytes per lane to LDS directly, nor transpose while it
reads LDS. So the keys and values of the next block are loaded to registers while a block is computed. There is one buffer in LDS:
after all waves have finished the block, they write the next one, with the values transposed.
"""

from __future__ import annotations

from torch import Tensor

from tokenspeed_kernel_amd.capability import GLUON_CDNA3
from tokenspeed_kernel_amd.gluon.prefill import SIGNATURES, TRAITS, Config, launch_prefill
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.spec import Priority

device = DeviceModule(__name__ + "_device")


def _config(head_dim: int, v_head_dim: int, window_left: int) -> Config:
    """Returns the tile. Figures are microseconds of the emulator's timing model."""
    if max(head_dim, v_head_dim) > 64:
        # Keys and values take 34 KB of the 64 KB of LDS, so only one wave fits on a SIMD. The wave may use accumulation registers.
        return Config(1, attributes="")
    if 0 <= window_left < 256:
        # Small tiles compute fewer keys that the window hides. 4 x 1024 tokens with a window of 128: 28.7 us; 35.1 us with tiles of
        # 128 rows, 32.4 us with two waves per SIMD. 1 x 1024: 9.4 us; 11.4 us with tiles of 128 rows, 11.3 us with four waves.
        return Config(3, block_n=32, block_m=64, warps=2)
    return Config(3)


@register_kernel(
    "attention",
    "mha_prefill",
    name="gluon_mha_prefill_gfx942",
    solution="gluon",
    capability=GLUON_CDNA3,
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
    config = _config(q.shape[2], v.shape[2], window_left)
    return launch_prefill(
        device.mha_prefill_gfx942, config, q, k, v, cu_seqlens, window_left, logit_cap, sinks, return_lse, softmax_scale, out
    )
