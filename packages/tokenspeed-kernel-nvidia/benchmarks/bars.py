"""Acceptance bars of this package's attention kernels, and their check against measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from judging import Bar, Measure, Times, least_ratio, mean_ratio, of_ours
from shapes import SHAPES, Shape

# Largest error of an output against the float32 reference; see `measuring.relative_error`.
LARGEST_ERROR = 5e-3
# Largest error of one row: rounding to bfloat16 averages out less over the 64 elements of a row than over the whole output.
LARGEST_ROW_ERROR = 2e-2
# Baselines of decode are FlashInfer and FlashAttention-3; in prefill all baselines count.
PREFILL_BASELINES, DECODE_BASELINES = ("fa3", "fa4", "cudnn"), ("fa3", "flashinfer")


def _named(group: str, wanted: Callable[[Shape], bool] = lambda shape: True) -> tuple[str, ...]:
    return tuple(shape.name for shape in SHAPES if shape.group == group and wanted(shape))


def _tflops(names: Sequence[str]) -> Measure:
    """The lowest TFLOP/s: two MMAs, half of each masked."""
    shapes = {shape.name: shape for shape in SHAPES}

    def measure(times: Times) -> float:
        rates = []
        for name in names:
            shape = shapes[name]
            flops = 2 * shape.batch * shape.length**2 * shape.heads * shape.head_dim
            rates.append(flops / times[name]["ours"] / 1e6)
        return min(rates)

    return measure


def _bars() -> list[Bar]:
    prefill, decode, wide = _named("prefill"), _named("decode"), _named("prefill head_dim 128")
    long = _named("prefill", lambda shape: shape.length == 8192)
    many = ("prefill 1K x 16",)
    four = ("decode of 4 8K x 16", "decode 8K x 16")
    bars = [
        Bar("prefill: best peer, geometric mean", 1.05, False, prefill, mean_ratio(prefill, PREFILL_BASELINES), PREFILL_BASELINES),
        Bar("prefill: best peer, worst shape", 0.97, False, prefill, least_ratio(prefill, PREFILL_BASELINES), PREFILL_BASELINES),
        Bar("prefill 8K: TFLOP/s, worst batch", 530, False, long, _tflops(long)),
        Bar("prefill 1K x 16: TFLOP/s", 380, False, many, _tflops(many)),
        Bar("prefill head_dim 128: FA3, worst shape", 1.0, False, wide, least_ratio(wide, ("fa3",)), ("fa3",)),
        Bar("decode: best peer, geometric mean", 1.15, False, decode, mean_ratio(decode, DECODE_BASELINES), DECODE_BASELINES),
    ]
    for shape, bound in (
        ("window prefill 8K x 16", 850.0),
        ("window prefill 1K x 16", 120.0),
        ("window extend by 16 8K x 64", 15.0),
        ("decode 8K x 16", 76.0),
        ("decode 8K x 64", 262.0),
        ("decode 1K x 256", 142.0),
        ("decode 32K x 1", 25.0),
        ("decode 1K x 1", 7.0),
        ("window decode 8K x 64", 6.0),
    ):
        bars.append(Bar(f"{shape}: us", bound, True, (shape,), of_ours(shape)))
    bars.append(Bar("decode of 4 over decode of 1, 8K x 16", 1.15, True, four, lambda t: t[four[0]]["ours"] / t[four[1]]["ours"]))
    return bars


BARS = _bars()


def judge(times: Times, errors: Mapping[str, float], absent: Iterable[str] = ()) -> list[dict[str, Any]]:
    """Checks every bar against the times, and our errors (by shape) against the largest allowed one. ``absent``: see
    `Bar.judged`.
    """
    absent = {*absent}
    judged = [bar.judged(times, absent) for bar in BARS]
    worst = max(errors.values(), default=None)
    holds = None if worst is None else worst <= LARGEST_ERROR
    error = Bar("relative error, worst shape", LARGEST_ERROR, True, (), lambda times: 0.0)
    fields = asdict(error)
    judged.append({name: fields[name] for name in ("name", "bound", "most")} | {"value": worst, "holds": holds})
    return judged
