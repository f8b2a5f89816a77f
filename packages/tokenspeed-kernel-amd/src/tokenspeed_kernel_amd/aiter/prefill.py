"""Declarations of AITER's kernels for mha_prefill. The adapter is in ``prefill_device``.

Not declared:

* Logit cap. AITER computes tanh as a quotient of exponentials, which is NaN if a score is many times the cap. Without its compiled
  kernels, AITER's prefill ignores the cap.
* LSE with sinks. AITER does not document whether its LSE includes the sink.
* Sinks and windows at head_dim 128. AITER also calls its assembly kernels for sinks and for windows of one token, but those kernels
  support neither.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel_amd.aiter.package import UNTRIED
from tokenspeed_kernel_amd.capability import AITER
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures

_ADAPTER = f"{__name__}_device:mha_prefill"
_SIGNATURES = format_signatures(("q", "k", "v"), "dense", {torch.bfloat16, torch.float16})

register_kernel(
    "attention",
    "mha_prefill",
    name="aiter_mha_prefill_64",
    solution="aiter",
    capability=AITER,
    signatures=_SIGNATURES,
    traits={"head_dim": 64, "v_head_dim": 64, "sliding_window": any, "return_lse": any},
    priority=UNTRIED,
)(_ADAPTER)

register_kernel(
    "attention",
    "mha_prefill",
    name="aiter_mha_prefill_64_sinks",
    solution="aiter",
    capability=AITER,
    signatures=_SIGNATURES,
    traits={"head_dim": 64, "v_head_dim": 64, "sliding_window": any, "sinks": {True}},
    priority=UNTRIED,
)(_ADAPTER)

register_kernel(
    "attention",
    "mha_prefill",
    name="aiter_mha_prefill_128",
    solution="aiter",
    capability=AITER,
    signatures=_SIGNATURES,
    traits={"head_dim": 128, "v_head_dim": 128, "return_lse": any},
    priority=UNTRIED,
)(_ADAPTER)
