"""Tensor formats: how the bits of an operand encode its values.

A `TensorFormat` is a storage dtype, a format name (``"dense"``, ``"mxfp4"``...) and, for scaled formats, the format of the scales
(`ScaleFormat`). A `FormatSignature` maps an operator's roles (``q``, ``k``, ``weight``) to formats. A kernel declares the
signatures that it accepts. A request has one signature. A kernel is eligible only if it declares an equal signature.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

GRANULARITIES = ("tensor", "token", "channel", "block")
SCALE_LAYOUTS = ("linear", "128x4")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype's name without the module: ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    """The names of some dtypes, in alphabetical order."""
    return tuple(sorted(map(dtype_name, dtypes)))


@dataclass(frozen=True)
class ScaleFormat:
    """The format of a tensor's scales.

    Attributes:
        storage_dtype: dtype of one scale: float32, float8_e4m3fn, or uint8 for e8m0 exponents (also if the tensor of scales is
            float8_e8m0fnu). int32 packs the e8m0 exponents of four consecutive blocks along k, the first exponent in the lowest
            byte.
        granularity: one scale per ``"tensor"``, ``"token"`` (row), ``"channel"`` (column) or ``"block"``.
        block_shape: shape of the block of elements that one scale applies to: ``(1, 32)`` is 32 consecutive elements of the last
            axis.
        dynamic_block_shape: whether the kernel reads the block's shape from the tensors. If so, ``block_shape`` is None.
        layout: ``"linear"``, or ``"128x4"`` for block scales in the order that `swizzle_scales` produces.
    """

    storage_dtype: torch.dtype
    granularity: str
    block_shape: tuple[int, ...] | None = None
    dynamic_block_shape: bool = False
    layout: str = "linear"

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {self.granularity!r}")
        if self.block_shape is not None:
            object.__setattr__(self, "block_shape", tuple(self.block_shape))
        if self.block_shape is not None and self.dynamic_block_shape:
            raise ValueError(f"block_shape is None where it is dynamic, got {self.block_shape}")
        if (self.granularity == "block") != (self.block_shape is not None or self.dynamic_block_shape):
            raise ValueError(
                f"block_shape belongs to granularity 'block' and only there, got granularity {self.granularity!r} "
                f"with block_shape {self.block_shape}"
            )
        if self.layout not in SCALE_LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(SCALE_LAYOUTS)}, got {self.layout!r}")
        if self.layout != "linear" and self.granularity != "block":
            raise ValueError(f"layout {self.layout!r} belongs to granularity 'block', got {self.granularity!r}")

    def __str__(self) -> str:
        shape = "x".join(map(str, self.block_shape)) if self.block_shape else ""
        layout = "" if self.layout == "linear" else f" in tiles of {self.layout}"
        return f"{dtype_name(self.storage_dtype)}/{self.granularity}{shape}{layout}"


@dataclass(frozen=True)
class TensorFormat:
    """The encoding of one operand: storage dtype, format name, and the scales' format if it has scales."""

    storage_dtype: torch.dtype
    format: str = "dense"
    scale: ScaleFormat | None = None

    def __str__(self) -> str:
        head = dtype_name(self.storage_dtype)
        if self.format != "dense":
            head = f"{self.format}<{head}>"
        return f"{head} scaled by {self.scale}" if self.scale else head


@dataclass(frozen=True, eq=False)
class Decoded:
    """Dequantised values. If a tolerance allows an error of one quantisation step, kernels' results are compared in this form,
    because one step of a scale changes every quantised value of its block.

    Attributes:
        values: float32.
        format: the format that the values were dequantised from.
    """

    values: torch.Tensor
    format: TensorFormat


@dataclass(frozen=True)
class FormatSignature:
    """The format of each role, in the roles' alphabetical order. `format_signature` makes a signature."""

    roles: tuple[tuple[str, TensorFormat], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(sorted(self.roles, key=lambda role: role[0])))
        names = [name for name, _ in self.roles]
        if len(set(names)) != len(names):
            raise ValueError(f"a role may appear once in a signature, got {', '.join(names)}")

    def format_for(self, role: str) -> TensorFormat:
        for name, fmt in self.roles:
            if name == role:
                return fmt
        raise KeyError(f"no role {role!r} in {self}")

    def difference(self, other: FormatSignature) -> list[str]:
        """Returns a phrase for each role whose format differs in ``other``, the wanted signature: ``"k: bfloat16 wanted, float16
        offered"``."""
        mine, theirs = dict(self.roles), dict(other.roles)
        return [
            f"{role}: {theirs.get(role, 'nothing')} wanted, {mine.get(role, 'nothing')} offered"
            for role in sorted(mine.keys() | theirs.keys())
            if mine.get(role) != theirs.get(role)
        ]

    def __str__(self) -> str:
        return ", ".join(f"{name}: {fmt}" for name, fmt in self.roles)


def tensor_format(format: str, storage_dtype: torch.dtype, *, scale: ScaleFormat | None = None) -> TensorFormat:
    """A `TensorFormat` from its name: ``tensor_format("mxfp4", torch.uint8, scale=ScaleFormat(torch.uint8, "block", (1, 32)))``."""
    return TensorFormat(storage_dtype, format, scale)


def dense_tensor_format(storage_dtype: torch.dtype) -> TensorFormat:
    """The format of unquantised elements of one dtype, without scales."""
    return TensorFormat(storage_dtype)


def format_signature(**roles: TensorFormat) -> FormatSignature:
    """Makes a signature from keywords: each role's name and its format.

    >>> import torch
    >>> str(format_signature(q=dense_tensor_format(torch.bfloat16), k=dense_tensor_format(torch.float16)))
    'k: float16, q: bfloat16'
    """
    wrong: dict[str, Any] = {name: fmt for name, fmt in roles.items() if not isinstance(fmt, TensorFormat)}
    if wrong:
        name, value = next(iter(wrong.items()))
        raise TypeError(f"role {name!r} must be a TensorFormat, got {value!r}; dense_tensor_format(dtype) makes one")
    return FormatSignature(tuple(roles.items()))


def format_signatures(
    roles: str | Iterable[str], format: str, storage_dtypes: Iterable[torch.dtype], *, scale: ScaleFormat | None = None
) -> frozenset[FormatSignature]:
    """Makes one signature for each dtype. Every role of a signature has the same format.

    >>> import torch
    >>> len(format_signatures(("q", "k", "v"), "dense", {torch.bfloat16, torch.float16}))
    2
    """
    names = (roles,) if isinstance(roles, str) else tuple(roles)
    return frozenset(
        FormatSignature(tuple((name, TensorFormat(dtype, format, scale)) for name in names)) for dtype in storage_dtypes
    )
