"""`linear` with mxfp4 and fp8 weights and quantised activations on CDNA4. Quantisation and GEMM are one kernel for few tokens.

* Few tokens (at most 16, and at most 65,536 elements per tile): one launch. Each workgroup computes a tile of 4 or 8 tokens and
  some columns. Tokens and weights are copied to LDS. Waves divide k, and quantise tokens between LDS and MFMAs. All workgroups with
  the same tokens quantise them: this takes less time than a second launch, which would wait for the first.
* More tokens: a launch that quantises, and `mm`.

`mm` explains the tiles, the ring and the scales. `prepare_weights` pads mxfp4 scales, so that four of them are one aligned word for
any k. fp8 weights are read in the canonical layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_amd._machine import current_compute_units
from tokenspeed_kernel_amd._rows import deliver, rows, rows_to_write
from tokenspeed_kernel_amd.capability import GLUON_CDNA4
from tokenspeed_kernel_amd.gfx950.gemm.mm import (
    FORMATS,
    MOST_K,
    PAIR_BYTES,
    RING_BYTES,
    Config,
    Operand,
    Shape,
    in_words,
    is_near,
    launch,
    line_stride,
    operand_of,
)
from tokenspeed_kernel_base.alignment import aligned
from tokenspeed_kernel_base.discovery import DeviceModule
from tokenspeed_kernel_base.ops.gemm.linear_plan import LinearPlan
from tokenspeed_kernel_base.ops.gemm.linear_weights import LinearWeights
from tokenspeed_kernel_base.ops.quantization.encodings import BLOCK_FP8, BLOCK_MX
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import TensorFormat, dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import CANONICAL, Priority
from tokenspeed_kernel_base.traits import between, multiple_of

device = DeviceModule(__name__ + "_device")
quantize_device = DeviceModule(__name__ + "_quantize_device")

LAYOUT = "gfx950_mxfp4_words"
MOST_FEW = 16  # tokens of one launch: the rows of an MFMA
# The most elements of tokens in a tile. More would take longer than a second launch: 2.3 us, by published measurements, and the
# emulator's timing model of both kernels.
MOST_ELEMENTS = 1 << 16
ROWS_OF_MFMA = 16
BLOCK_K = 512
TOKENS_AT_ONCE = 4  # tokens of a workgroup of the launch that quantises


class Quantization(NamedTuple):
    """How a plan's activations are quantised.

    Attributes:
        kind: a compile-time constant of the kernels: ``"mx"``, ``"block"``, ``"token"`` or ``"static"``.
        format: the format of the quantised elements.
        trait: the trait of plans with these activations.
    """

    kind: str
    format: str
    trait: str


QUANTIZATIONS = {
    "mxfp8": Quantization("mx", "e4m3", "mxfp8_activations"),
    "mxfp4": Quantization("mx", "e2m1", "mxfp4_activations"),
    "fp8": Quantization("token", "e4m3", "fp8_activations"),
    "fp8_static": Quantization("static", "e4m3", "static_fp8_activations"),
    "fp8_block": Quantization("block", "e4m3", "fp8_block_activations"),
}


def prepare_weights(weights: LinearWeights, plan: LinearPlan) -> LinearWeights:
    """Pads the scales of each out-feature with zeros to a multiple of four. Copies weights that are not aligned to 16 bytes."""
    assert weights.weight_scale is not None  # checked by the operator
    scale = weights.weight_scale.view(torch.uint8)
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4)).contiguous()
    return LinearWeights(aligned(weights.weight), padded, bias=weights.bias, layout=LAYOUT)


def linear(x: Tensor, weights: LinearWeights, plan: LinearPlan, out: Tensor | None = None) -> Tensor:
    """Implements the operator `linear`. mxfp4 weights must be in the layout that `prepare_weights` makes."""
    written = rows_to_write(out if is_near(out) else None, x, len(x), plan.out_features)
    if written.numel():
        x = rows(x) if is_near(x) else x.contiguous()
        b = operand_of(weights.weight, weights.weight_scale)
        config = few_config(len(x), plan, FORMATS[b.codes.dtype])
        if config is not None:
            launch_few(x, b, weights, plan, config, written)
        else:
            a = quantised(x, weights, plan)
            formats = FORMATS[a.codes.dtype], FORMATS[b.codes.dtype]
            launch(a, b, written, weights.bias, plan.in_features, *formats)
    return deliver(written, out)


def few_config(tokens: int, plan: LinearPlan, weight_format: str) -> Config | None:
    """Returns the tile of the one launch for few tokens; None if the tokens need two launches."""
    quantization = QUANTIZATIONS[plan.activation_dtype]
    if tokens > MOST_FEW:
        return None
    folds = 4 if tokens <= 4 else 2
    blocks = -(-plan.in_features // (folds * BLOCK_K))
    held = ROWS_OF_MFMA * blocks * BLOCK_K
    if held > MOST_ELEMENTS:
        return None
    tiles_m = -(-tokens * folds // ROWS_OF_MFMA)
    compute_units = current_compute_units()
    block_n = next((size for size in (16, 32) if tiles_m * plan.out_features <= size * compute_units), 32)
    chunk = 1 << (blocks * BLOCK_K - 1).bit_length()
    stage_bytes = folds * block_n * BLOCK_K * PAIR_BYTES[weight_format] // 2
    ring = RING_BYTES - chunk // 32 * folds * block_n
    if quantization.kind == "token":
        ring -= 2 * held
    else:
        stage_bytes += 2 * ROWS_OF_MFMA * BLOCK_K
    stages = ring // stage_bytes
    if stages < min(2, blocks):
        return None
    return Config(ROWS_OF_MFMA, block_n, BLOCK_K, 1, 1, 4, min(3, blocks, stages), chunk, folds=folds)


def launch_few(x: Tensor, b: Operand, weights: LinearWeights, plan: LinearPlan, config: Config, out: Tensor) -> None:
    """Launches `linear_kernel`, which quantises the tokens and multiplies them. ``config``: from `few_config`."""
    quantization = QUANTIZATIONS[plan.activation_dtype]
    k, n = plan.in_features, plan.out_features
    split_k = -(-k // BLOCK_K) * BLOCK_K
    scales = {"mx": "mx", "block": "blocks"}.get(quantization.kind, "lines")
    shape = Shape(
        n, k, split_k, 1, k % BLOCK_K != 0, True, scales, quantization.format, FORMATS[b.codes.dtype], 0, b.codes.stride(0),
        0, line_stride(b.scale), False, in_words(b.scale), out.stride(0),
    )  # fmt: skip
    bias = None if weights.bias is None else weights.bias.contiguous()
    tiles = -(-len(x) * config.folds // ROWS_OF_MFMA) * -(-n // config.block_n)
    device.linear_kernel[(tiles,)](
        x, x.stride(0), weights.input_scale, b, len(x), out, bias, quantization=quantization.kind, config=config, shape=shape,
        num_warps=4, waves_per_eu=1,
    )  # fmt: skip


def quantised(x: Tensor, weights: LinearWeights, plan: LinearPlan) -> Operand:
    """Quantises the tokens in a launch of its own."""
    quantization = QUANTIZATIONS[plan.activation_dtype]
    tokens, k = x.shape
    packed = quantization.format == "e2m1"
    codes = x.new_empty(tokens, k // 2 if packed else k, dtype=torch.uint8 if packed else torch.float8_e4m3fn)
    if quantization.kind == "static":
        assert weights.input_scale is not None  # checked by the operator
        scale = weights.input_scale
    elif quantization.kind == "mx":
        scale = x.new_empty(tokens, -(-k // (4 * BLOCK_MX)) * 4, dtype=torch.uint8)
    else:
        scales = 1 if quantization.kind == "token" else -(-k // BLOCK_FP8)
        scale = x.new_empty(tokens, scales, dtype=torch.float32)
    grid = (-(-tokens // TOKENS_AT_ONCE), 1 if quantization.kind == "token" else -(-k // BLOCK_K))
    quantize_device.quantize_kernel[grid](
        x, x.stride(0), weights.input_scale, tokens, k, codes.view(torch.uint8), scale, line_stride(scale),
        quantization=quantization.kind, format=quantization.format, num_warps=4,
    )  # fmt: skip
    return Operand(codes, scale)


_E4M3 = torch.float8_e4m3fn
_CANONICAL: dict[str, Any] = {
    "weight_layout": CANONICAL,
    "in_features": between(BLOCK_MX, MOST_K) & multiple_of(BLOCK_MX),
}
_MXFP4: dict[str, Any] = {"weight_layout": LAYOUT, "processed_weights": True, "in_features": between(BLOCK_MX, MOST_K)}


def _registered(name: str, weight: TensorFormat, activations: str, traits: dict[str, Any]) -> None:
    register_kernel(
        "gemm",
        "linear",
        name=f"gluon_linear_{name}",
        solution="gluon",
        capability=GLUON_CDNA4,
        signatures={format_signature(x=dense_tensor_format(dtype), weight=weight) for dtype in (torch.bfloat16, torch.float16)},
        traits={"bias": any, QUANTIZATIONS[activations].trait: True, **traits},
        priority=Priority.SPECIALIZED,
        tags={"determinism"},
        weight_preprocessor=prepare_weights if traits is _MXFP4 else None,
    )(linear)


_registered("mxfp4_mxfp8", mxfp4_format(), "mxfp8", _MXFP4)
_registered("mxfp4_mxfp4", mxfp4_format(), "mxfp4", _MXFP4)
_registered("fp8", fp8_format(_E4M3, "channel"), "fp8", _CANONICAL)
_registered("fp8_static", fp8_format(_E4M3, "channel"), "fp8_static", _CANONICAL)
_registered("fp8_block", fp8_format(_E4M3, "block", (BLOCK_FP8, BLOCK_FP8)), "fp8_block", _CANONICAL)
