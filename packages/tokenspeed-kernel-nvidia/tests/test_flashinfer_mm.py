"""Tests the adapter to FlashInfer's block-scaled GEMMs: FlashInfer's signatures and conventions, and the arguments that the adapter
passes.

As in ``test_flashinfer``, a stand-in computes the documented results in PyTorch on a CPU, and rejects calls that the real functions
reject.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_base.cases import Case, Draw
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.gemm._inputs import micro
from tokenspeed_kernel_base.platform import named_platform, platform_of
from tokenspeed_kernel_base.registry import KernelRegistry
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_base.spec import KernelSpec, Priority

from .flashinfer_stand_in import declared, fixtures, forget_adapters, unparsed, with_signature

# FlashInfer's signatures, copied from the source of flashinfer-python 0.7.2 without annotations.
SIGNATURES = {
    "mm_fp4": (
        "(a, b, a_descale, b_descale, alpha=None, out_dtype=torch.bfloat16, out=None, block_size=16, use_8x4_sf_layout=False, "
        "backend='auto', use_nvfp4=True, enable_pdl=True)"
    ),
    "mm_bf16_fp4": "(a, b, b_descale, alpha=None, *, backend, out_dtype=None, out=None, block_size=16, enable_pdl=True)",
    "mm_mxfp8": ("(a, b, a_descale, b_descale, out=None, out_dtype=torch.bfloat16, use_8x4_sf_layout=False, backend='auto')"),
}
_BASE, _WEIGHTS = "flashinfer/gemm/gemm_base.py", "flashinfer/gemm/gemm_bf16_fp4.py"
_CSRC = "flashinfer/data/csrc"
# Layouts and sizes that the adapter relies on: a source file of FlashInfer, and the text in this file that states the layout or
# size.
FACTS = {
    "CUTLASS's fp4 turns weights and their scales back": (
        _BASE,
        "a, b.T, a_descale, b_descale.T, alpha, out, workspace_buffer, tactic",
    ),
    "and wants contiguous tensors": (f"{_CSRC}/fp4_gemm_cutlass.cu", "CHECK_INPUT_AND_TYPE(mat2Scale, SF_DTYPE);"),
    "k of fp4": (f"{_CSRC}/fp4_gemm_cutlass.cu", "constexpr int alignment = 32;"),
    "n of mxfp8": (f"{_CSRC}/mxfp8_gemm_cutlass.cu", "constexpr int alignment = 32;"),
    "the least n and k of mxfp8": (_BASE, "MXFP8 requires n >= {min_n} and k >= {min_k} for CUTLASS MXFP8."),
    "mxfp8's scales are flat": (_BASE, "shape (M_padded * K_padded,) where M_padded = round_up(m, 8 if 8x4"),
    "tiles of 128x4": (_BASE, "both a and b should quantized with nvfp4_quantize using the 128x4 scale factor layout"),
    "cuDNN alone has mxfp4": (_BASE, "Only cudnn and auto FP4 GEMM supports mxfp4 quantization."),
    "weights of sm_100 are left as they are": (
        "flashinfer/gemm/gemm_bf16_fp4_blackwell.py",
        "return b.contiguous(), linear_sf.view(torch.float8_e4m3fn), alpha",
    ),
    "the scales of them": (_WEIGHTS, "blackwell-native expects linear float8_e4m3fn scales with shape"),
    "weights of sm_120 are left as they are": (_WEIGHTS, "The explicit ``cute-dsl-native`` backend needs no preparation"),
    "the most of them": ("flashinfer/gemm/kernels/native_bf16_fp4/support.py", "cute-dsl-native requires N*K below 2**31"),
    "the tiles": ("flashinfer/quantization/fp4_quantization.py", "128x4"),
}
KERNELS = [
    "flashinfer_mm_mxfp4_sm100",
    *(f"flashinfer_mm_{fmt}_{arch}" for fmt in ("mxfp8", "nvfp4", "nvfp4_weights") for arch in ("sm100", "sm120")),
]
_CALLS: list[str] = []
_F4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


# -- against the source --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_source(source: Callable[[str], str], name: str) -> None:
    assert declared(source(_WEIGHTS if name == "mm_bf16_fp4" else _BASE), name) == unparsed(SIGNATURES[name])
    assert f"{name} as {name}" in source("flashinfer/gemm/__init__.py")


@pytest.mark.parametrize("fact", FACTS)
def test_conventions_are_those_of_the_source(source: Callable[[str], str], fact: str) -> None:
    file, text = FACTS[fact]
    assert text in source(file)


# -- the stand-in --------------------------------------------------------------------------------------------------------------


def _scales(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Reads the scales as the kernels do: the scale of row i and column j is at its offset in CUTLASS's scale layout."""
    i, j = torch.arange(rows)[:, None], torch.arange(columns)
    across = -(-columns // 4)
    at = ((i // 128) * across + j // 4) * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    assert flat.numel() == -(-rows // 128) * across * 512
    found = flat.flatten()[at]
    return 2.0 ** (found.float() - 127) if found.dtype == torch.uint8 else found.float()


def _values(codes: Tensor, flat: Tensor, block: int) -> Tensor:
    wide = codes.float()
    if codes.dtype == torch.uint8:
        wide = _F4[torch.stack((codes % 16, codes // 16), -1).flatten(-2).long()]
    scale = _scales(flat, wide.shape[0], wide.shape[1] // block)
    return wide * scale.repeat_interleave(block, 1)


def _gemm(given: dict[str, Any], b_scale: Tensor, block: int) -> Tensor:
    a, b, out = given["a"], given["b"].T, given["out"]
    for tensor in (a, b, given["a_descale"], b_scale, out):
        assert tensor.is_contiguous()
    assert out.dtype == given["out_dtype"]
    assert out.dtype in (torch.bfloat16, torch.float16)
    assert b.shape[0] % 32 == 0
    result = _values(a, given["a_descale"], block) @ _values(b, b_scale, block).T
    alpha = given.get("alpha")
    if alpha is not None:
        assert (alpha.dtype, alpha.shape) == (torch.float32, (1,))
        result = result * alpha
    return out.copy_(result)


@with_signature(SIGNATURES["mm_fp4"], "a b a_descale b_descale alpha out_dtype out block_size backend use_nvfp4", {"torch": torch})
def _mm_fp4(given: dict[str, Any]) -> Tensor:
    nvfp4 = given["use_nvfp4"]
    assert (given["block_size"], given["backend"]) == ((16, "cutlass") if nvfp4 else (32, "cudnn"))
    for name in ("a_descale", "b_descale"):
        assert given[name].dtype == (torch.float8_e4m3fn if nvfp4 else torch.uint8)
        assert given[name].dim() == 2
    assert (given["alpha"] is not None) == nvfp4
    return _gemm(given, given["b_descale"].T, given["block_size"])


@with_signature(SIGNATURES["mm_mxfp8"], "a b a_descale b_descale out out_dtype backend", {"torch": torch})
def _mm_mxfp8(given: dict[str, Any]) -> Tensor:
    assert given["backend"] == "cutlass"
    assert min(given["b"].shape) >= 128
    for name in ("a_descale", "b_descale"):
        assert (given[name].dtype, given[name].dim()) == (torch.uint8, 1)
    return _gemm(given, given["b_descale"], 32)


@with_signature(SIGNATURES["mm_bf16_fp4"], "a b b_descale alpha backend out_dtype out", {"torch": torch})
def _mm_bf16_fp4(given: dict[str, Any]) -> Tensor:
    a, b, scale, out = (given[name] for name in ("a", "b", "b_descale", "out"))
    assert all(tensor.is_contiguous() for tensor in (a, b, scale, out))
    assert (a.dtype, b.dtype, scale.dtype) == (torch.bfloat16, torch.uint8, torch.float8_e4m3fn)
    assert (given["alpha"].dtype, given["alpha"].shape) == (torch.float32, (1,))
    assert out.dtype == given["out_dtype"]
    n, columns = b.shape[0], b.shape[1] // 8
    codes = _F4[torch.stack((b % 16, b // 16), -1).flatten(-2).long()]
    if given["backend"] == "blackwell-native":
        assert scale.shape == (n, columns)
        scales = scale.float()
    else:
        assert given["backend"] == "cute-dsl-native"
        scales = _scales(scale, n, columns)
    return out.copy_(a.float() @ (codes * scales.repeat_interleave(16, 1)).T * given["alpha"])


_FUNCTIONS = {
    "flashinfer.gemm.mm_bf16_fp4": _mm_bf16_fp4,
    "flashinfer.gemm.mm_fp4": _mm_fp4,
    "flashinfer.gemm.mm_mxfp8": _mm_mxfp8,
}


flashinfer, specs = fixtures(_FUNCTIONS, "sm_100", _CALLS, "gemm")


# -- declarations --------------------------------------------------------------------------------------------------------------


def test_these_are_declared_below_the_portable_ones(specs: dict[str, KernelSpec]) -> None:
    assert sorted(specs) == sorted(KERNELS)
    assert all(Priority.REFERENCE < spec.priority < Priority.PORTABLE for spec in specs.values())


def test_other_machines_are_refused_first(specs: dict[str, KernelSpec]) -> None:
    for name, spec in specs.items():
        other = "sm_100" if name.endswith("_sm120") else "sm_120"
        for platform in ("sm_90", "sm_110", "cpu", "gfx950", other):
            assert spec.capability.gap(named_platform(platform)).startswith(("needs an ", "needs architecture"))


def _arguments(m: int = 5, k: int = 128, n: int = 160, **changes: Any) -> dict[str, Any]:
    formats = {"a": "nvfp4", "b": "nvfp4", "layout": "128x4"}
    return micro(m, k, n, **{**formats, **changes})(Draw())


@pytest.mark.usefixtures("flashinfer", "specs")
@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, "flashinfer_mm_nvfp4_sm100"),
        ({"k": 96, "out_dtype": torch.float16}, "flashinfer_mm_nvfp4_sm100"),
        ({"a": "mxfp8", "b": "mxfp8"}, "flashinfer_mm_mxfp8_sm100"),
        ({"a": "mxfp4", "b": "mxfp4"}, "flashinfer_mm_mxfp4_sm100"),
        ({"layout": "linear"}, None),
        ({"n": 40}, None),
        ({"k": 80}, None),
        ({"bias": torch.bfloat16}, None),
        ({"out_dtype": torch.float32}, None),
        ({"a": "dense"}, None),
        ({"a": "dense", "layout": "linear", "n": 40, "k": 80}, "flashinfer_mm_nvfp4_weights_sm100"),
        ({"a": "dense", "layout": "linear", "bias": torch.bfloat16}, None),
        ({"a": "dense", "b": "mxfp4", "layout": "linear"}, None),
        ({"a": "mxfp8", "b": "mxfp8", "n": 96}, None),
        ({"a": "mxfp8", "b": "mxfp4"}, None),
        ({"a": "mxfp4", "b": "mxfp4", "k": 160}, None),
    ],
)
def test_eligible_calls(changes: dict[str, Any], served: str | None) -> None:
    arguments = _arguments(**changes)
    if served is None:
        with pytest.raises(NoKernelFoundError):
            tokenspeed_kernel.mm(**arguments, solution="flashinfer")
        return
    assert tokenspeed_kernel.mm.explain(**arguments, solution="flashinfer").chosen.name == served


# -- the adapter with the stand-in ---------------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    formats = {fmt: {"a": fmt, "b": fmt, "layout": "128x4"} for fmt in ("nvfp4", "mxfp8", "mxfp4")}
    return [
        Case("nvfp4", micro(5, 96, 160, **formats["nvfp4"])),
        Case("nvfp4, more than a tile", micro(131, 160, 160, **formats["nvfp4"], out_dtype=torch.float16)),
        Case("mxfp8", micro(131, 160, 160, **formats["mxfp8"])),
        Case("mxfp4", micro(3, 256, 160, **formats["mxfp4"])),
        Case("nvfp4, no tokens", micro(0, 96, 160, **formats["nvfp4"])),
        Case("nvfp4 weights", micro(5, 80, 40, a="dense", b="nvfp4")),
        Case("nvfp4 weights to float16", micro(131, 160, 130, a="dense", b="nvfp4", out_dtype=torch.float16)),
    ]


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("case", _cases(), ids=lambda case: case.name)
def test_results(specs: dict[str, KernelSpec], case: Case) -> None:
    found = [verify_case(spec, case, "cpu") for name, spec in specs.items() if name.endswith("sm100")]
    assert_none_wrong(found)
    assert [result.status for result in found if result.status is not Status.SKIPPED] == [Status.PASSED]
    assert bool(_CALLS) == ("no tokens" not in case.name)


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("out_dtype", [None, torch.float16])
def test_weights_with_scales_in_tiles(specs: dict[str, KernelSpec], out_dtype: torch.dtype | None) -> None:
    """Tests the kernel for workstation Blackwell (sm_120), whose compute capability differs from the stand-in's."""
    case = Case("a case", micro(5, 80, 130, a="dense", b="nvfp4", layout="128x4", out_dtype=out_dtype))
    arguments = get_operator("mm").complete(case.build())
    got = KernelRegistry.get().get_impl(specs["flashinfer_mm_nvfp4_weights_sm120"].name)(*arguments.values())
    torch.testing.assert_close(got, tokenspeed_kernel.mm(**arguments, solution="reference"), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("flashinfer", "specs")
def test_rows_with_room_behind_them() -> None:
    arguments = _arguments()
    wide = torch.zeros(5, 96, dtype=torch.uint8)
    wide[:, :64] = arguments["a"]
    got = tokenspeed_kernel.mm(**{**arguments, "a": wide[:, :64]}, solution="flashinfer")
    torch.testing.assert_close(got, tokenspeed_kernel.mm(**arguments, solution="reference"), atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("flashinfer", "specs")
def test_operands_and_outputs_of_other_strides() -> None:
    for fmt in ("nvfp4", "mxfp8"):
        arguments = _arguments(a=fmt, b=fmt)
        wanted = tokenspeed_kernel.mm(**arguments, solution="reference")
        wide = torch.full((5, 320), 7.0, dtype=torch.bfloat16)
        strange = {**arguments, "b": arguments["b"].contiguous(), "a": arguments["a"].t().contiguous().t()}
        strange["a_scale"] = arguments["a_scale"].transpose(-1, -2).contiguous().transpose(-1, -2)
        got = tokenspeed_kernel.mm(**strange, out=wide[:, 160:], solution="flashinfer")
        assert got.data_ptr() == wide[:, 160:].data_ptr()
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
        assert (wide[:, :160] == 7).all()


# -- the real FlashInfer -------------------------------------------------------------------------------------------------------


@pytest.mark.nvidia
@pytest.mark.parametrize("name", KERNELS)
def test_on_the_device(specs: dict[str, KernelSpec], name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    device, spec = torch.device("cuda"), specs[name]
    gap = spec.capability.gap(platform_of(device))
    if gap is not None:
        pytest.skip(gap)
    forget_adapters()
    results = [verify_case(spec, case, device) for case in _cases()]
    assert_none_wrong(results)
