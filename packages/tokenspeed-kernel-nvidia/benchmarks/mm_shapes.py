"""The decode GEMMs that are measured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel.workbench.benchmark.runner import Limits
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.ops.gemm._inputs import dense, fp8, micro

TOKENS = (1, 2, 4, 8, 16)
# Largest allowed relative errors against float32, of all rows together and of the worst row. Rounding to bfloat16 alone causes an
# error of 1.7e-3, and slightly more in the worst row.
LIMITS = Limits(4e-3, 8e-3)
_BYTES_PER_US = 4.35e6  # measured read bandwidth of an H200, in bytes per microsecond

_BF16 = torch.bfloat16
# For each weight format, the function that makes random operands. `_BYTES` has the bytes per weight, scales included.
_MADE: Mapping[str, Callable[[int, int, int], Any]] = {
    "": functools.partial(dense, bias=_BF16),
    "fp8 weights": functools.partial(fp8, a_scale="", b_scale="channel", a_dtype=_BF16, bias=_BF16),
    "fp8 weights, one scale": functools.partial(fp8, a_scale="", b_scale="tensor", a_dtype=_BF16, bias=_BF16),
    "fp8 weights in blocks": functools.partial(fp8, a_scale="", b_scale="block", a_dtype=_BF16, bias=_BF16),
    "fp8": functools.partial(fp8, a_scale="token", b_scale="channel", bias=_BF16),
    "fp8 in blocks": functools.partial(fp8, a_scale="block", b_scale="block", bias=_BF16),
    "mxfp4 weights": functools.partial(micro, a="dense", b="mxfp4", bias=_BF16),
}
_BYTES = {"": 2.0, "mxfp4 weights": 17 / 32, **dict.fromkeys([name for name in _MADE if name.startswith("fp8")], 1.0)}


@dataclass(frozen=True)
class Gemm:
    """A layer's GEMM ``[m, k] x [k, n]``, with a bfloat16 bias and result; weights are stored ``[n, k]``.

    Attributes:
        model, layer: the model, and the name of the model's layer that has this GEMM.
        bar: the bar for one row, in microseconds; the bar for 16 rows is 15% higher.
        weights: the weight format, see `_MADE`; empty for bfloat16.
    """

    model: str
    layer: str
    k: int
    n: int
    bar: float | None = None
    weights: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (f"{self.model} {self.layer}", self.weights)))

    @property
    def bytes(self) -> float:
        """Bytes of the weights, scales included."""
        return self.k * self.n * _BYTES[self.weights]

    @property
    def floor_us(self) -> float:
        """The time to read the weights, in microseconds."""
        return self.bytes / _BYTES_PER_US

    def case(self, m: int) -> Case:
        return Case(self.name, _MADE[self.weights](m, self.k, self.n), large=True)


@dataclass(frozen=True)
class Shape:
    """A GEMM with a given number of rows."""

    gemm: Gemm
    m: int

    @property
    def name(self) -> str:
        return f"{self.gemm.name} x {self.m}"

    @property
    def group(self) -> str:
        return self.gemm.name

    @property
    def operator(self) -> str:
        return "gemm.mm"


_QKV = ("GPT-OSS-120B", "qkv", 2880, 5120)
GEMMS = (
    Gemm(*_QKV, 7.8),
    Gemm("GPT-OSS-120B", "output", 4096, 2880, 6.4),
    Gemm("GPT-OSS-120B", "router", 2880, 128, 1.8),
    Gemm("GPT-OSS-120B", "unembedding", 2880, 201088),
    Gemm("GPT-OSS-20B", "router", 2880, 32),
    Gemm("Llama-8B", "gate and up", 4096, 28672),
    Gemm("Llama-8B", "down", 14336, 4096),
    Gemm("DeepSeek-V3", "q and kv down", 7168, 2112),
    Gemm("DeepSeek-V3", "router", 7168, 256),
    Gemm("Qwen3-235B", "router", 4096, 128),
    *(Gemm(*_QKV, weights=name) for name in _MADE if name),
    Gemm("Llama-8B", "gate and up", 4096, 28672, weights="fp8"),
    Gemm("DeepSeek-V3", "q and kv down", 7168, 2112, weights="fp8 in blocks"),
)
SHAPES = tuple(Shape(gemm, m) for gemm in GEMMS for m in TOKENS)
