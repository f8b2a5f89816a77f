"""The switches of this package. They are environment variables, because vLLM passes these on to all of its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tokenspeed_kernel_base.installation import wrong_distributions
from tokenspeed_kernel_base.platform import current_platform

PREFIX = "TOKENSPEED_VLLM_"
CORE = "tokenspeed_kernel"  # the package that has all operators, which is called the core
_NAMES = (
    *("ATTENTION", "MLA", "EXPERTS", "OTHER_EXPERTS", "ACTIVATIONS", "LINEAR", "FP8_LINEAR", "FP4_LINEAR", "FP4_ACTIVATIONS"),
    *("DELTA_RULE", "GATED_NORMS", "PACKAGE", "WARMUP", "RECEIPTS"),
)
# Why parts are off by default: their speed on an H200 relative to vLLM's own kernels (docs/engines.md). The log and the README say
# the same. A part is on only if none of its measured rows is below 0.98. `default_of` makes an exception for MXFP4.
WHY_OFF = {
    PREFIX + "MLA": "no faster than vLLM's own in DeepSeek-V3, 0.98 to 1.00",
    PREFIX + "OTHER_EXPERTS": "slower in Qwen3-30B-A3B in fp8 at batch 16, 0.96",
    PREFIX + "FP8_LINEAR": "measured in Llama-3.1-8B at batch 1 only, 1.05",
    PREFIX + "FP4_LINEAR": "slower in Llama-3.1-8B in NVFP4 at batch 16, 0.96",
    PREFIX + "DELTA_RULE": "not measured",
    PREFIX + "GATED_NORMS": "not measured",
}
# MXFP4 layers that these switches control run on our kernels by default, on the architecture on which they were measured. `WHY_ON`
# says how fast they are there, relative to vLLM's own kernels.
_ON_FOR_MXFP4 = (PREFIX + "OTHER_EXPERTS", PREFIX + "FP4_LINEAR")
_MEASURED_ON = "sm_90"
WHY_ON = "faster in Qwen3-30B-A3B in MXFP4, 1.26 to 1.75"
_FLAGS = {"1": True, "0": False}
# Formats to which experts can round activations without scales from the checkpoint.
ACTIVATIONS = ("none", "fp8", "mxfp4")


def core_is_there() -> bool:
    """Returns whether the core is installed. Another project's package of the same name does not count, because its functions
    differ.
    """
    return find_spec(CORE) is not None and "tokenspeed-kernel" not in {wrong.name for wrong in wrong_distributions()}


@dataclass(frozen=True)
class Settings:
    """The settings from the environment.

    Attributes:
        attention: whether the attention backend is registered (``TOKENSPEED_VLLM_ATTENTION``, 1 by default).
        mla: whether the backend for multi-head latent attention is registered, instead of the backend for other models
            (``TOKENSPEED_VLLM_MLA``, 0 by default).
        experts: whether GPT-OSS's experts run on our kernels if one is eligible (``TOKENSPEED_VLLM_EXPERTS``, 1 by default).
        other_experts: whether unquantised experts, fp8 experts with block scales, and MXFP4 and NVFP4 experts of other models than
            GPT-OSS run on our kernels if one is eligible (``TOKENSPEED_VLLM_OTHER_EXPERTS``); None if it is not set: `default_of`
            then decides for each format.
        activations: the format that experts round their activations to: ``none``, ``fp8`` with a scale per token, or ``mxfp4``
            (``TOKENSPEED_VLLM_ACTIVATIONS``, ``none`` by default).
        linear: whether unquantised linear layers use the core's ``mm`` (``TOKENSPEED_VLLM_LINEAR``, 0 by default).
        fp8_linear: whether fp8 linear layers use the core's ``linear`` (``TOKENSPEED_VLLM_FP8_LINEAR``, 0 by default).
        fp4_linear: whether MXFP4 and NVFP4 linear layers use the core's ``linear`` (``TOKENSPEED_VLLM_FP4_LINEAR``); None if it is
            not set: `default_of` then decides for each format.
        fp4_activations: whether these layers round activations to the checkpoint's format (``TOKENSPEED_VLLM_FP4_ACTIVATIONS``, 0
            by default).
        delta_rule: whether the gated delta rule of prompts runs on our kernels if one is eligible
            (``TOKENSPEED_VLLM_DELTA_RULE``, 0 by default).
        gated_norms: whether the gated norms of hybrid models run on our kernels if one is eligible
            (``TOKENSPEED_VLLM_GATED_NORMS``, 0 by default).
        package: the package whose attention functions are called (``TOKENSPEED_VLLM_PACKAGE``); None for the core if it is
            installed, otherwise the first vendor's wheel with an eligible kernel.
        warmup: whether kernels are warmed up in all sizes before the first request (``TOKENSPEED_VLLM_WARMUP``, 1 by default).
        receipts: the folder that each process writes a receipt of its kernels to after a warm-up
            (``TOKENSPEED_VLLM_RECEIPTS``); None for no receipts. Needs the core.
    """

    attention: bool = True
    mla: bool = False
    experts: bool = True
    other_experts: bool | None = None
    activations: str = "none"
    linear: bool = False
    fp8_linear: bool = False
    fp4_linear: bool | None = None
    fp4_activations: bool = False
    delta_rule: bool = False
    gated_norms: bool = False
    package: str | None = None
    warmup: bool = True
    receipts: Path | None = None


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the environment.

    Raises:
        ValueError: a variable has an invalid value, or a variable with our prefix is unknown.
    """
    env = os.environ if environ is None else environ
    names = {PREFIX + name for name in _NAMES}
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in names:
            raise ValueError(f"{name} is no setting; expected one of {', '.join(sorted(names))}")

    def flag(name: str, default: str = "1") -> bool:
        value = env.get(PREFIX + name, default)
        if value not in _FLAGS:
            raise ValueError(f"{PREFIX}{name} must be 1 or 0, got {value!r}")
        return _FLAGS[value]

    def by_format(name: str) -> bool | None:
        return flag(name) if PREFIX + name in env else None

    package = env.get(PREFIX + "PACKAGE") or None
    activations = env.get(PREFIX + "ACTIVATIONS", ACTIVATIONS[0])
    if activations not in ACTIVATIONS:
        raise ValueError(f"{PREFIX}ACTIVATIONS must be one of {', '.join(ACTIVATIONS)}, got {activations!r}")
    return Settings(
        attention=flag("ATTENTION"),
        mla=flag("MLA", "0"),
        experts=flag("EXPERTS"),
        other_experts=by_format("OTHER_EXPERTS"),
        activations=activations,
        linear=flag("LINEAR", "0"),
        fp8_linear=flag("FP8_LINEAR", "0"),
        fp4_linear=by_format("FP4_LINEAR"),
        fp4_activations=flag("FP4_ACTIVATIONS", "0"),
        delta_rule=flag("DELTA_RULE", "0"),
        gated_norms=flag("GATED_NORMS", "0"),
        package=package,
        warmup=flag("WARMUP"),
        receipts=Path(folder) if (folder := env.get(PREFIX + "RECEIPTS")) else None,
    )


class Default(NamedTuple):
    """Whether a part is on if its switch is not set, and the measurement that decides it. As a string: both, for the log."""

    on: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on' if self.on else 'off'} by default: {self.reason}"


def default_of(switch: str, weight_format: str, unmeasured: str = "") -> Default:
    """Returns whether layers of a format run on our kernels on the current platform if the switch is not set.

    Args:
        switch: a name in `WHY_OFF`.
        weight_format: the core's name of the format, such as ``mxfp4``.
        unmeasured: why the format's measurements do not apply to a layer; empty if they do.
    """
    if switch not in _ON_FOR_MXFP4 or weight_format != "mxfp4":
        return Default(False, WHY_OFF[switch])
    arch = current_platform().arch
    if arch != _MEASURED_ON:
        unmeasured = f"not measured on {arch}"
    return Default(not unmeasured, unmeasured or WHY_ON)


def is_on(setting: bool | None, switch: str, weight_format: str, unmeasured: str = "") -> bool:
    """Returns whether layers of a format run on our kernels on the current platform: as set, otherwise by default.

    Args:
        setting: the value in `Settings`; None if the switch is not set.
        switch, weight_format, unmeasured: see `default_of`.
    """
    return default_of(switch, weight_format, unmeasured).on if setting is None else setting
