"""transformers on tokenspeed-kernel, through transformers' public hooks."""

from __future__ import annotations

from tokenspeed_kernel_transformers.version import __version__

__all__ = ["NAME", "__version__", "register"]

# The value of ``attn_implementation`` and ``experts_implementation``.
NAME = "tokenspeed"


def register() -> None:
    """Registers attention and experts with transformers under the name ``tokenspeed``. May be called any number of times.

    Models change only if they ask for it, by ``attn_implementation="tokenspeed"`` or ``experts_implementation="tokenspeed"``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    from tokenspeed_kernel_transformers.attention import attention_forward
    from tokenspeed_kernel_transformers.experts import experts_forward
    from tokenspeed_kernel_transformers.masks import attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    ExpertsInterface.register(NAME, experts_forward)
