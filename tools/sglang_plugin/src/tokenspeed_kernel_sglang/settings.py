"""The switches of this package. They are environment variables, because SGLang's processes inherit the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "TOKENSPEED_SGLANG_"
_FLAGS = {"1": True, "0": False}
# The switches and their defaults. The last four parts affect every model, and only GPT-OSS was measured with them, so they are off.
_SWITCHES = {"ATTENTION": "1", "MLA": "1", "EXPERTS": "1", "NORMS": "0", "ACTIVATIONS": "0", "ROPE": "0", "SAMPLING": "0"}
_REPLACES = "ATTENTION_REPLACES"


@dataclass(frozen=True)
class Settings:
    """The settings from the environment.

    Attributes:
        attention: whether the attention backend ``tokenspeed`` is registered (``TOKENSPEED_SGLANG_ATTENTION``).
        mla: whether this backend also runs latent attention (``TOKENSPEED_SGLANG_MLA``).
        attention_replaces: names of built-in attention backends that also select our backend
            (``TOKENSPEED_SGLANG_ATTENTION_REPLACES``, separated by commas). SGLang accepts only built-in names for some models,
            such as GPT-OSS.
        experts: whether MXFP4 experts run on one of our kernels, if one is eligible (``TOKENSPEED_SGLANG_EXPERTS``).
        norms: whether RMS norms run on our kernels if one is eligible (``TOKENSPEED_SGLANG_NORMS``).
        activations: whether gated SiLU and GELU run on our kernels if one is eligible (``TOKENSPEED_SGLANG_ACTIVATIONS``).
        rope: whether rotary embeddings run on our kernels if one is eligible (``TOKENSPEED_SGLANG_ROPE``).
        sampling: whether tokens are drawn by our kernels if one is eligible (``TOKENSPEED_SGLANG_SAMPLING``).
    """

    attention: bool = True
    mla: bool = True
    attention_replaces: tuple[str, ...] = ()
    experts: bool = True
    norms: bool = False
    activations: bool = False
    rope: bool = False
    sampling: bool = False


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Reads the environment.

    Raises:
        ValueError: a variable has an invalid value, or a variable with our prefix is unknown.
    """
    env = os.environ if environ is None else environ
    names = {PREFIX + name for name in (*_SWITCHES, _REPLACES)}
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in names:
            raise ValueError(f"{name} is no setting; expected one of {', '.join(sorted(names))}")
    flags = {}
    for switch, default in _SWITCHES.items():
        value = env.get(PREFIX + switch, default)
        if value not in _FLAGS:
            raise ValueError(f"{PREFIX}{switch} must be 1 or 0, got {value!r}")
        flags[switch.lower()] = _FLAGS[value]
    replaced = tuple(name.strip() for name in env.get(PREFIX + _REPLACES, "").split(",") if name.strip())
    return Settings(attention_replaces=replaced, **flags)
