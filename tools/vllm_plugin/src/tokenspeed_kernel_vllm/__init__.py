"""vLLM on tokenspeed-kernel, through vLLM's public hooks. vLLM calls `register` in each of its processes; users need not call it.

Importing this package imports neither vLLM nor PyTorch.
"""

from __future__ import annotations

from tokenspeed_kernel_vllm.version import __version__

__all__ = ["__version__", "register"]


def register() -> None:
    """Registers the parts that the settings enable: the entry point ``tokenspeed_kernel`` of ``vllm.general_plugins``.

    May be called any number of times. If the installed vLLM lacks the hook of a part, the part is skipped with one line in the log.
    vLLM then uses its own code for this part.

    Raises:
        ValueError: a setting has an invalid value. The message names the setting and the value.
    """
    from tokenspeed_kernel_vllm.parts import register_parts
    from tokenspeed_kernel_vllm.settings import read_settings

    register_parts(read_settings())
