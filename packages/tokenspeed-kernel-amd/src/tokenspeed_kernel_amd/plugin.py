"""The entry point that tokenspeed-kernel calls: it registers every kernel that a module of this package declares."""

from tokenspeed_kernel_base.registry import register_package


def register() -> None:
    """Registers the kernels of this package. The entry point ``amd`` of the group ``tokenspeed_kernel.plugins``.

    Launchers are imported, and neither Triton nor AITER: these are imported when a kernel of theirs is first launched.
    """
    register_package("tokenspeed_kernel_amd")
