"""Runs SGLang's layers on tokenspeed-kernel, through SGLang's public hooks. SGLang calls `register` in each of its processes; users
need not call it.

Importing this package imports neither SGLang nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenspeed_kernel_sglang.version import __version__

if TYPE_CHECKING:
    from tokenspeed_kernel_base.served import Receipt

__all__ = ["__version__", "receipt", "register", "register_decode_step"]


def register() -> None:
    """Registers the parts that the settings enable. This function is the entry point ``tokenspeed_kernel`` in the group
    ``sglang.srt.plugins``.

    The function may be called any number of times. If the installed SGLang lacks a hook that a part needs, the part is skipped,
    with one line in the log. SGLang then uses its own code for this part.

    Raises:
        ValueError: a setting has an invalid value. The message names the setting and the value.
    """
    from tokenspeed_kernel_sglang.parts import register_parts
    from tokenspeed_kernel_sglang.settings import read_settings

    register_parts(read_settings())


def register_decode_step() -> None:
    """Fills SGLang's slot for kernels that run a whole decode step, which ``--enable-nvidia-megakernel`` selects. This function is
    the entry point ``nvidia_megakernel``, a name that SGLang prescribes, in the group ``sglang.srt.plugins``. Releases before
    0.5.23 have no slot, and nothing happens.

    Raises:
        ValueError: another package has filled the slot for GPT-OSS.
    """
    from tokenspeed_kernel_sglang.parts import register_decode_step

    register_decode_step()


def receipt() -> Receipt:
    """Returns the receipt of this process: which layers run on which kernels, and why other layers run on SGLang's own kernels.
    ``str()`` makes a table.
    """
    from tokenspeed_kernel_sglang.record import receipt_of_process

    return receipt_of_process()
