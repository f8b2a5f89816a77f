"""Acceptance bars of this package's MoE kernels, and their check against measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from judging import Bar, Times, least_ratio, mean_ratio, of_ours
from measuring import Limits
from moe_shapes import GPT_OSS_120B, SHAPES

# Largest error of an output against the float32 reference, by the dtype of activations. Rounding the activation's result and each
# slot's output to bfloat16 costs 3e-3. A value that was rounded differently before it became fp8 may become the neighbouring fp8
# value.
LIMITS = {"none": Limits(1e-2, 3e-2), "fp8": Limits(4e-2, 1e-1)}
# A baseline with a larger error computes something else. Baselines choose the scales of fp8 activations themselves.
BASELINE_LIMITS = {"none": Limits(2e-2, 8e-2), "fp8": Limits(8e-2, 2e-1)}
BASELINES = ("triton_kernels", "marlin", "humming")
# Microseconds.
_US = {"1": 18, "2": 32, "4": 54, "8": 95, "16": 165, "64": 350, "256": 430, "1024": 620, "8192": 2750, "8192 fp8": 1750}
_NAME = GPT_OSS_120B.name
_BF16 = tuple(shape.name for shape in SHAPES if shape.group == _NAME)

BARS = [
    *(Bar(f"{_NAME} {tokens}: us", us, True, (f"{_NAME} {tokens}",), of_ours(f"{_NAME} {tokens}")) for tokens, us in _US.items()),
    Bar(f"{_NAME}: best peer, geometric mean", 1.5, False, _BF16, mean_ratio(_BF16, BASELINES), BASELINES),
    Bar(f"{_NAME}: best peer, worst number of tokens", 1.1, False, _BF16, least_ratio(_BF16, BASELINES), BASELINES),
]


def _worst_error(errors: Times) -> float:
    """Our error divided by the portable kernel's, where that is largest."""
    return max(of_one["ours"] / of_one["triton"] for of_one in errors.values() if {"ours", "triton"} <= of_one.keys())


def judge(times: Times, errors: Times, prepare_ms: Mapping[str, float], absent: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Checks every bar.

    Args:
        times, errors: microseconds, and relative errors, by shape and implementation.
        prepare_ms: the time to arrange the weights of a layer, by implementation.
        absent: see `Bar.judged`.
    """
    absent = {*absent}
    compared = tuple(shape for shape, of_one in errors.items() if {"ours", "triton"} <= of_one.keys())
    error = Bar("relative error over the portable kernel's, worst shape", 1.2, True, compared, _worst_error, ("triton",))
    prepare = Bar(f"{_NAME}: ms to arrange a layer's weights", 50.0, True, ("weights",), of_ours("weights"))
    judged = [bar.judged(times, absent) for bar in BARS]
    if compared:
        judged.append(error.judged(errors))
    return [*judged, prepare.judged({"weights": prepare_ms})]
