"""transformers on tokenspeed-kernel, through public hooks: `enable` puts a model on our kernels, and says what runs where.

Importing this imports neither transformers nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenspeed_kernel_transformers.version import __version__

if TYPE_CHECKING:
    from tokenspeed_kernel_transformers.receipt import Receipt

__all__ = ["__version__", "enable", "register"]


def register() -> None:
    """Registers attention and experts with transformers under the name ``tokenspeed``. May be called any number of times.

    Models change only if they ask for it, by ``attn_implementation="tokenspeed"`` or ``experts_implementation="tokenspeed"``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    from tokenspeed_kernel_transformers.attention import attention_forward
    from tokenspeed_kernel_transformers.enabling import NAME
    from tokenspeed_kernel_transformers.experts import experts_forward
    from tokenspeed_kernel_transformers.masks import attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    ExpertsInterface.register(NAME, experts_forward)


def enable(model: Any, *, attention: bool = True, experts: bool = True, norms: bool = True, gated_mlps: bool = True) -> Receipt:
    """Puts a loaded model on our kernels, as far as kernels are eligible on its device. Everything else remains as it was.

    Args:
        model: a `PreTrainedModel` with its weights, on its device, in its dtype.
        attention: whether attention runs on our kernels.
        experts: whether the experts of mixture-of-experts layers do. Their weights are arranged for the kernel now.
        norms: whether RMS norms do. They round once; many of transformers' own round twice.
        gated_mlps: whether gated MLPs do.

    Returns:
        What runs on which kernel, and why the rest does not; ``str()`` is a table. The log has it, too.
    """
    from tokenspeed_kernel_transformers.enabling import enable_parts

    register()
    return enable_parts(model, attention=attention, experts=experts, norms=norms, gated_mlps=gated_mlps)
