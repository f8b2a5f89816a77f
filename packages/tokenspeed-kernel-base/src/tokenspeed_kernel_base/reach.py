"""Finds the reason why no call can select a kernel that is requested by name."""

from __future__ import annotations

from tokenspeed_kernel_base.platform import PlatformInfo
from tokenspeed_kernel_base.registry import KernelRegistry, nearest_kernel


def misnamed(kernel: str, operator: str) -> str | None:
    """Returns the reason why ``kernel`` names no kernel of ``operator``, ``"family.mode"``; None if it names one."""
    registry = KernelRegistry.get()
    try:
        spec = registry.get_by_name(kernel, operator)
    except KeyError as error:
        return str(error.args[0])
    if spec.operator == operator:
        return None
    family, _, mode = operator.partition(".")
    near = nearest_kernel(kernel, registry.get_for_operator(family, mode))
    return f"{kernel} implements {spec.operator}, not {operator}{near}"


def why_unreachable(kernel: str, operator: str, platform: PlatformInfo | None = None, *, by_name: bool = True) -> str | None:
    """Returns the reason why no call of the core's operator can select a kernel, whatever the arguments; None if some call may.

    Args:
        kernel: the kernel's name.
        operator: the operator for which the kernel is requested, ``"family.mode"``.
        platform: the platform of the calls. None if it is not known yet: the kernel's platform requirements are then ignored.
        by_name: whether the request names the kernel, as an override does. If not, a kernel that is declared with ``only_by_name``
            is unreachable.
    """
    problem = misnamed(kernel, operator)
    if problem is not None:
        return problem
    registry = KernelRegistry.get()
    spec = registry.get_by_name(kernel)
    if not registry.is_public(kernel):
        return f"{kernel} is private to the functions of {spec.package}"
    if spec.only_by_name and not by_name:
        return f"{kernel} is eligible only for calls that name it: {spec.only_by_name}"
    gap = None if platform is None else spec.capability.gap(platform)
    if gap is not None:
        return f"{kernel} cannot run on {platform}: {gap}"
    disabled = registry.why_disabled(kernel)
    return None if disabled is None else f"{kernel} {disabled}"
