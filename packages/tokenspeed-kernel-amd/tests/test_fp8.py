"""Tests attention to fp8 (e4m3) paged caches against the core's fp32 reference on the same values."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
import tokenspeed_kernel_amd
from tokenspeed_kernel_base.explanation import NoKernelFoundError
from tokenspeed_kernel_base.launchers import unchecked

from .paging import (
    check,
    check_compiled,
    inputs,
    longest_loop_without_loops,
    nothing_read_on_the_host,
    pretend_compute_units,
    reference,
)

E4M3 = torch.float8_e4m3fn
# The e4m3 of each architecture's conversions.
FP8 = {"gfx950": E4M3, "gfx942": torch.float8_e4m3fnuz}
NO_SCALES: dict[str, Any] = {"cache_dtype": E4M3}
ONE_SCALE: dict[str, Any] = {**NO_SCALES, "scales": ("k_scale", "v_scale")}
SCALE_A_HEAD: dict[str, Any] = {**ONE_SCALE, "scale_per_head": True}
SCALES = {"no scales": NO_SCALES, "one scale": ONE_SCALE, "a scale a key head": SCALE_A_HEAD}

DECODE, EXTEND, MIXED = "mha_decode_with_kvcache", "mha_extend_with_kvcache", "mha_with_kvcache"


def _make(function: str, device: torch.device, kv_lens: list[int], q_lens: list[int] | None, **options: Any) -> dict[str, Any]:
    """Returns the arguments of the operator ``function``."""
    needed = {EXTEND: {"is_causal": True}, MIXED: {"running_sums": False}, DECODE: {}}[function]
    return inputs(device, kv_lens, q_lens, **{**needed, **options})


def _wanted(function: str, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the reference's results for caches dequantised to fp32. The reference gets no scales, because fp32 caches have
    none."""
    wide = dict(arguments)
    for name in ("k", "v"):
        scale = wide.pop(f"{name}_scale", None)
        if scale is not None:
            wide[f"{name}_cache"] = wide[f"{name}_cache"].float() * scale.reshape(-1, 1)
    return reference(getattr(tokenspeed_kernel, function), wide)


def _check(function: str, arguments: dict[str, Any]) -> None:
    got = getattr(tokenspeed_kernel_amd, function)(**arguments, return_lse=True)
    check(got, _wanted(function, arguments))


def _run(function: str, device: torch.device, kv_lens: list[int], q_lens: list[int] | None = None, **options: Any) -> None:
    _check(function, _make(function, device, kv_lens, q_lens, **options))


def _of(options: dict[str, Any], arch: str) -> dict[str, Any]:
    """Returns options with the cache dtype of an architecture."""
    return {**options, "cache_dtype": FP8[arch]}


def _slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# -- decode --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, _slow(torch.float16)], ids=str)
def test_every_number(gpu: torch.device, arch: str, dtype: torch.dtype) -> None:
    """If a token sees only one key, its output is exactly this key's value."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8[arch]).float()
    numbers[numbers.isnan()] = 0
    arguments = inputs(gpu, [1] * 4, dtype=dtype, heads=1, kv_heads=1, **_of(NO_SCALES, arch))
    pages = arguments["page_table"][:, 0].long()
    arguments["v_cache"].view(torch.uint8)[pages, 0, 0] = numbers.to(FP8[arch]).view(torch.uint8).view(4, 64).to(gpu)
    out = tokenspeed_kernel_amd.mha_decode_with_kvcache(**arguments)
    assert out.dtype == dtype
    assert torch.equal(out.float().cpu().flatten(), numbers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["one large", "no large", _slow("powers")])
def test_magnitudes_of_queries(gfx950: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Results are as accurate as with 16-bit keys if the elements of a query differ in magnitude, although the kernels split
    queries into fp8 planes. The large element does not count, because the keys are 0 there."""
    arguments = inputs(gfx950, [300, 33], dtype=dtype, page_size=64, **ONE_SCALE)
    q = arguments["q"].float()
    if kind == "powers":
        q = q * torch.logspace(-6, 0, q.shape[-1], 2.0, device=gfx950)
    if kind == "one large":
        q[..., 3] = 2000
        arguments["k_cache"].view(torch.uint8)[..., 3] = 0
    arguments["q"] = q.to(dtype)
    got, lse = tokenspeed_kernel_amd.mha_decode_with_kvcache(**arguments, return_lse=True)
    wanted, wanted_lse = _wanted(DECODE, arguments)
    # The output's own rounding has an error of 1.7e-3 in bf16, and 2.1e-4 in fp16.
    assert (got.float() - wanted).norm() <= (2.5e-3 if dtype == torch.bfloat16 else 3.2e-4) * wanted.norm()
    assert (lse - wanted_lse).abs().max() <= 1e-4


@pytest.mark.parametrize("page_size", [16, 64, _slow(128)])
@pytest.mark.parametrize("scales", ["a scale a key head", _slow("one scale"), _slow("no scales")])
def test_decode_lengths(gpu: torch.device, arch: str, scales: str, page_size: int) -> None:
    """Results are correct for a batch of sequences of length 0, of length 1, and with lengths at the edges of pages and blocks."""
    lengths = [1, 15, 16, 17, 0, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200]
    _run(DECODE, gpu, lengths, page_size=page_size, **_of(SCALES[scales], arch))


@pytest.mark.parametrize("page_size", [64, _slow(16), _slow(128)])
def test_decode_divided_sequences(gpu: torch.device, arch: str, page_size: int) -> None:
    """Results are correct for a batch of sequences with many splits, with one split, and without keys."""
    _run(DECODE, gpu, [1500, 1, 0, 700, 64, 65, 257], page_size=page_size, sinks=True, **_of(ONE_SCALE, arch))


@pytest.mark.parametrize("page_size", [16, _slow(32)])
def test_decode_much_work(gpu: torch.device, arch: str, monkeypatch: pytest.MonkeyPatch, page_size: int) -> None:
    """Results are correct if waves have one block in flight and pages are smaller than a block."""
    pretend_compute_units(monkeypatch, 2)
    _run(DECODE, gpu, [700, 0, 330, 1, 90], page_size=page_size, **_of(SCALE_A_HEAD, arch))


@pytest.mark.parametrize("window_left", [127, *map(_slow, (0, 1, 128, 1000))])
def test_decode_windows(gpu: torch.device, arch: str, window_left: int) -> None:
    _run(
        DECODE, gpu, [1, 127, 128, 129, 130, 0, 1300], window_left=window_left, sinks=True, page_size=64, **_of(SCALE_A_HEAD, arch)
    )


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(128, 128), _slow(128, 64), _slow(64, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, _slow(torch.bfloat16)], ids=str)
def test_decode_head_dims(gpu: torch.device, arch: str, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> None:
    _run(DECODE, gpu, [37, 365], dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim, page_size=64, **_of(SCALE_A_HEAD, arch))


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 1), (40, 1)])
@pytest.mark.parametrize("new", [1, 3, 9])
def test_decode_several_new_tokens(gpu: torch.device, arch: str, new: int, heads: int, kv_heads: int) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads}
    _run(DECODE, gpu, [1, 20, 300, 0, 64], max_seqlen_q=new, page_size=64, sinks=True, **shape, **_of(SCALE_A_HEAD, arch))


# -- extend and mixed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [64, _slow(16), _slow(128)])
@pytest.mark.parametrize("longest", [40, *map(_slow, (1, 3, 8, 16))])
def test_extend_lengths(gfx950: torch.device, longest: int, page_size: int) -> None:
    """Results are correct for every tile, and for caches that end at edges of pages and blocks. Some sequences have no new token,
    some have one, and some have only new tokens."""
    kv_lens, q_lens = [63, 64, 65, 0, 1, 200], [min(longest, 7), 1, longest, 0, 1, longest]
    _run(EXTEND, gfx950, kv_lens, q_lens, page_size=page_size, **SCALE_A_HEAD)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("longest", [1, 3, 8, 16])
def test_extend_divided_sequences(gfx950: torch.device, longest: int, head_dim: int) -> None:
    options = {"page_size": 64, "head_dim": head_dim, "sinks": True, **SCALE_A_HEAD}
    _run(EXTEND, gfx950, [900, 64, 0, 65, 700], [longest, 1, 0, 0, min(longest, 2)], **options)


@pytest.mark.slow
@pytest.mark.parametrize("window_left", [0, 1, 127, 128, 1000])
def test_extend_windows(gfx950: torch.device, window_left: int) -> None:
    _run(EXTEND, gfx950, [300, 129, 5], [70, 1, 5], window_left=window_left, sinks=True, page_size=64, **ONE_SCALE)


@pytest.mark.slow
@pytest.mark.parametrize("window_left", [-1, 13])
def test_extend_not_causal(gfx950: torch.device, window_left: int) -> None:
    _run(EXTEND, gfx950, [100, 5, 0], [9, 8, 2], window_left=window_left, is_causal=False, **NO_SCALES)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(128, 128), (128, 64), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_extend_head_dims(gfx950: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int) -> None:
    shape = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    _run(EXTEND, gfx950, [37, 200], [20, 33], dtype=dtype, page_size=64, **shape, **SCALE_A_HEAD)


@pytest.mark.parametrize(
    ("head_dim", "page_size"), [(64, 64), *(_slow(head_dim, size) for head_dim, size in ((64, 16), (64, 128), (128, 64)))]
)
def test_mixed(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, head_dim: int, page_size: int) -> None:
    """Results are correct if short and long sequences get separate launches."""
    pretend_compute_units(monkeypatch, 1)
    kv_lens, q_lens = [500, 40, 0, 64, 130, 65], [1, 40, 0, 4, 33, 65]
    _run(MIXED, gfx950, kv_lens, q_lens, head_dim=head_dim, page_size=page_size, sinks=True, **SCALE_A_HEAD)


@pytest.mark.slow
@pytest.mark.parametrize(("kv_lens", "q_lens"), [([90, 9, 1], [1, 1, 1]), ([70, 200, 9], [1, 64, 9]), ([900, 64], [8, 1])])
def test_mixed_in_one_launch(gfx950: torch.device, kv_lens: list[int], q_lens: list[int]) -> None:
    _run(MIXED, gfx950, kv_lens, q_lens, page_size=64, **SCALE_A_HEAD)


EVERYTHING = {"window_left": 31, "logit_cap": 5.0, "softmax_scale": 0.2, "sinks": True, "dtype": torch.float16, "page_size": 64}


@pytest.mark.parametrize(
    ("function", "kv_lens", "q_lens"),
    [(DECODE, [190, 1, 900], None), _slow(EXTEND, [190, 1, 131], [60, 1, 131]), _slow(MIXED, [190, 1, 131], [60, 1, 131])],
)
def test_everything_together(gfx950: torch.device, function: str, kv_lens: list[int], q_lens: list[int] | None) -> None:
    _run(function, gfx950, kv_lens, q_lens, **EVERYTHING, **SCALE_A_HEAD)


# -- scales and strides --------------------------------------------------------------------------------------------------------


def _scales(device: torch.device, which: str) -> dict[str, Tensor]:
    keys, values = torch.tensor([[0.5, 7.0, 1.5, 7.0], [2.0, 7.0, 0.25, 7.0]], device=device)
    return {
        "keys": {"k_scale": keys[0]},
        "values": {"v_scale": values[::2]},
        "one and a head": {"k_scale": keys[:1], "v_scale": values[::2]},
        "expanded": {"k_scale": keys[2].expand(2), "v_scale": values[2].expand(2)},
    }[which]


@pytest.mark.parametrize(("function", "q_lens"), [(DECODE, None), _slow(EXTEND, [1, 9]), _slow(MIXED, [1, 9])])
@pytest.mark.parametrize("which", ["one and a head", *map(_slow, ("keys", "values", "expanded"))])
def test_scales(gfx950: torch.device, monkeypatch: pytest.MonkeyPatch, function: str, q_lens: list[int] | None, which: str) -> None:
    """Results are correct with scales of keys, of values or of both, with any stride. The host does not read the scales."""
    arguments = {**_make(function, gfx950, [70, 9], q_lens, **NO_SCALES), **_scales(gfx950, which)}
    wanted = _wanted(function, arguments)
    module = {DECODE: "decode", EXTEND: "extend", MIXED: "mixed"}[function]
    launch = getattr(__import__(f"tokenspeed_kernel_amd.gfx950.attention.{module}", fromlist=[function]), function)
    with nothing_read_on_the_host(monkeypatch):
        got = unchecked(getattr(tokenspeed_kernel, function), launch)(**arguments, return_lse=True)
    check(got, wanted)


def test_other_strides(gfx950: torch.device) -> None:
    """Results are correct if keys and values are slices of one cache, and if rows are not aligned to 16 bytes. Such a cache is
    copied."""
    arguments = inputs(gfx950, [140, 9], **SCALE_A_HEAD)
    wanted = _wanted(DECODE, arguments)
    keys, values = (arguments[name].view(torch.uint8) for name in ("k_cache", "v_cache"))
    both = dict(zip(("k_cache", "v_cache"), torch.cat([keys, values], 2).view(E4M3).split(2, 2), strict=True))
    check(tokenspeed_kernel_amd.mha_decode_with_kvcache(**{**arguments, **both}, return_lse=True), wanted)
    odd = torch.nn.functional.pad(keys, (8, 0)).view(E4M3)[..., 8:]
    check(tokenspeed_kernel_amd.mha_decode_with_kvcache(**{**arguments, "k_cache": odd}, return_lse=True), wanted)


# -- rejected ------------------------------------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "e5m2": ({"cache_dtype": torch.float8_e5m2}, {}, NoKernelFoundError, "formats: k_cache: float8_e5m2 wanted"),
    "fnuz": ({"cache_dtype": torch.float8_e4m3fnuz}, {}, NoKernelFoundError, "formats: k_cache: float8_e4m3fnuz wanted"),
    "values of another dtype": (
        NO_SCALES,
        {"v_cache": torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)},
        TypeError,
        "v_cache must be a tensor of float8_e4m3fn, got bfloat16",
    ),
    "fp8 q": ({"dtype": E4M3}, {}, NoKernelFoundError, "formats: .*q: float8_e4m3fn wanted"),
    "a scale of q": (NO_SCALES, {"q_scale": torch.ones(())}, ValueError, "q_scale must be None, because q is not fp8"),
    "a scale of bfloat16 keys": ({}, {"k_scale": torch.ones(())}, ValueError, "k_scale must be None, because k_cache is not fp8"),
    "a scale of bfloat16 values": ({}, {"v_scale": torch.ones(2)}, ValueError, "v_scale must be None, because v_cache is not fp8"),
    "a scale a query head": (
        NO_SCALES,
        {"k_scale": torch.ones(8)},
        ValueError,
        r"k_scale must be of shape \[\], \[1\] or \[2\] \(kv_heads\), got \[8\]",
    ),
    "a scale a page": (NO_SCALES, {"v_scale": torch.ones(1, 2)}, ValueError, r"v_scale must be of shape .* or \[2\] \(kv_heads\)"),
    "a scale of float64": (NO_SCALES, {"k_scale": torch.ones((), dtype=torch.float64)}, TypeError, "k_scale must be .* float32"),
    "a number": (NO_SCALES, {"v_scale": 0.5}, TypeError, "v_scale must be a tensor or None, got float 0.5"),
    "pages of 8": ({**NO_SCALES, "page_size": 8}, {}, NoKernelFoundError, "traits: page_size=8 is not one of 16"),
}


@pytest.mark.parametrize("what", REFUSALS)
@pytest.mark.parametrize(("function", "q_lens"), [(DECODE, None), (EXTEND, [3]), (MIXED, [3])])
def test_refusals(emulator: Any, function: str, q_lens: list[int] | None, what: str) -> None:
    options, changed, error, message = REFUSALS[what]
    arguments = {**_make(function, torch.device("cpu"), [20], q_lens, **options), **changed}
    where = f"gluon_{function} +" if error is NoKernelFoundError else f"^{function}: "
    with pytest.raises(error, match=where + message):
        getattr(tokenspeed_kernel_amd, function)(**arguments)
    assert not emulator.launches


# -- compiled code -------------------------------------------------------------------------------------------------------------


def _check_conversions(launch: Any, dtype: torch.dtype) -> None:
    """Asserts that the hot loop converts values two at a time, keys never, reads each element once, and writes only lists of pages
    to LDS."""
    body = Counter(longest_loop_without_loops(launch.program.assembly.text))
    converted = body["v_cvt_scalef32_pk_bf16_fp8" if dtype == torch.bfloat16 else "v_cvt_scalef32_pk_f16_fp8"]
    assert converted == 4 * body["ds_read_b64_tr_b8"]
    planes = 2 if dtype == torch.bfloat16 else 3
    row_tiles = body["v_mfma_f32_16x16x32_fp8_fp8"] / (2 * planes * body["ds_read_b128"])
    assert row_tiles in (1, 2)
    assert min(body["ds_read_b128"], body["ds_read_b64_tr_b8"]) > 0
    others = r"ds_(read2|read_[iu]|b?perm|swizzle|write_b(8|16|64|96|128))|v_perm_b32|v_bfe"
    assert not [name for name in body if re.match(others, name)]


@pytest.mark.parametrize(
    ("options", "most", "waves"),
    [
        ({}, 160, 4),
        _slow({"dtype": torch.float16}, 140, 4),
        _slow({"page_size": 16}, 180, 4),
        _slow({"window_left": 127}, 190, 4),
        _slow({"head_dim": 128}, 120, 2),
        _slow({"max_seqlen_q": 4}, 120, 2),
        _slow({"max_seqlen_q": 4, "head_dim": 128}, 90, 2),
    ],
    ids=str,
)
def test_decode_resources(emulator: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], most: int, waves: int) -> None:
    pretend_compute_units(monkeypatch, 1)  # the batch is now large for the device: one block in flight
    shape = {"heads": 64, "kv_heads": 8, "sinks": True, "page_size": 64, **options}
    tokenspeed_kernel_amd.mha_decode_with_kvcache(**inputs(torch.device("cpu"), [600], **shape, **SCALE_A_HEAD))
    check_compiled(emulator.launches[0], waves, most)
    _check_conversions(emulator.launches[0], options.get("dtype", torch.bfloat16))


@pytest.mark.parametrize(
    ("new", "options", "most"),
    [
        (8, {}, 120),
        _slow(1, {}, 160),
        _slow(4, {}, 120),
        _slow(4, {"head_dim": 128}, 120),
        _slow(32, {}, 120),
        _slow(8, {"window_left": 127}, 150),
        _slow(32, {"head_dim": 128}, 120),
    ],
    ids=str,
)
def test_extend_resources(emulator: Any, new: int, options: dict[str, Any], most: int) -> None:
    shape = {"heads": 16, "kv_heads": 2, "sinks": True, "page_size": 64, "is_causal": True, **options}
    tokenspeed_kernel_amd.mha_extend_with_kvcache(**inputs(torch.device("cpu"), [400], [new], **shape, **SCALE_A_HEAD))
    check_compiled(emulator.launches[0], 2, most, scalar_spills=40)
    _check_conversions(emulator.launches[0], torch.bfloat16)
