"""mha_prefill by AITER: what is declared. The adapter is in ``prefill_device``.

No logit cap: AITER computes tanh as a quotient of exponentials, which is NaN where a score is many times the cap, and its prefill
ignores the cap where its compiled kernels are missing. No log-sum-exp with sinks: AITER does not document whether it includes the
sink. At head_dim 128 AITER has assembly kernels, which it also calls for sinks and for windows of one token, and these they do not
support.
"""

from __future__ import annotations

import torch

from tokenspeed_kernel_amd.capability import AITER
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import format_signatures
from tokenspeed_kernel_base.spec import Priority

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
    priority=Priority.PERFORMANT,
)(_ADAPTER)

register_kernel(
    "attention",
    "mha_prefill",
    name="aiter_mha_prefill_64_sinks",
    solution="aiter",
    capability=AITER,
    signatures=_SIGNATURES,
    traits={"head_dim": 64, "v_head_dim": 64, "sliding_window": any, "sinks": {True}},
    priority=Priority.PERFORMANT,
)(_ADAPTER)

register_kernel(
    "attention",
    "mha_prefill",
    name="aiter_mha_prefill_128",
    solution="aiter",
    capability=AITER,
    signatures=_SIGNATURES,
    traits={"head_dim": 128, "v_head_dim": 128, "return_lse": any},
    priority=Priority.PERFORMANT,
)(_ADAPTER)
