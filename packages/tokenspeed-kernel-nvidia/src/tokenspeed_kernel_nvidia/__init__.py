"""Attention kernels for NVIDIA Hopper (sm_90: H100, H200) as plain functions.

Importing the package imports neither PyTorch nor CuteDSL and works on any machine. Calling a function on a machine that cannot
run it raises RuntimeError, which names the machine.
"""

from typing import TYPE_CHECKING, Any

from tokenspeed_kernel_nvidia.version import __version__

if TYPE_CHECKING:
    from tokenspeed_kernel_nvidia.attention import mha_decode_with_kvcache, mha_extend_with_kvcache, mha_prefill

# Public function -> the module that defines it.
_FUNCTIONS = {
    "mha_prefill": "tokenspeed_kernel_nvidia.attention",
    "mha_extend_with_kvcache": "tokenspeed_kernel_nvidia.attention",
    "mha_decode_with_kvcache": "tokenspeed_kernel_nvidia.attention",
}

__all__ = ["__version__", "mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_prefill"]


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    function = getattr(importlib.import_module(_FUNCTIONS[name]), name)
    globals()[name] = function
    return function


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
