"""Runs models of transformers on tokenspeed-kernel, through public hooks. `enable` switches a model's layers to our kernels, and
returns which layer runs on which kernel.

Importing this package imports neither transformers nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenspeed_kernel_transformers.version import __version__

if TYPE_CHECKING:
    from tokenspeed_kernel_base.served import Receipt

__all__ = ["__version__", "enable", "register"]


def register() -> None:
    """Registers attention and experts with transformers under the name ``tokenspeed``. This function may be called repeatedly.

    Only models with ``attn_implementation="tokenspeed"`` or ``experts_implementation="tokenspeed"`` use this package's kernels.
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
    """Switches the layers of a loaded model to our kernels, if kernels are eligible on the model's device. All other layers remain
    unchanged.

    Args:
        model: a `PreTrainedModel` with its weights, on its device, in its dtype.
        attention: whether attention runs on our kernels.
        experts: whether the experts of mixture-of-experts layers run on our kernels. `enable` arranges their weights for the
            kernel.
        norms: whether RMS norms run on our kernels. Our norms round once; many of transformers' own norms round twice. Outside of
            graphs, PyTorch's ``rms_norm`` runs at most 256 rows on a GPU, and rounds once too.
        gated_mlps: whether gated MLPs run on our kernels. Outside of graphs, the model's own functions run at most 256 rows on a
            GPU.

    Returns:
        The receipt: the layers with their kernels, and the reasons why other layers run on none of our kernels. ``str()`` makes a
        table. The table is also logged.
    """
    from tokenspeed_kernel_transformers.enabling import enable_parts

    register()
    return enable_parts(model, attention=attention, experts=experts, norms=norms, gated_mlps=gated_mlps)
