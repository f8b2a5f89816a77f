"""Tests the kernel that calls PyTorch's scaled fp8 GEMM: the eligible calls, the arguments that PyTorch gets, and on a GPU the
results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel as tk
from tokenspeed_kernel.torch import gemm_fp8 as module
from tokenspeed_kernel.torch.gemm_fp8 import torch_scaled_mm as launcher_of_torch_scaled_mm
from tokenspeed_kernel_base.cases import Case
from tokenspeed_kernel_base.explanation import Explanation
from tokenspeed_kernel_base.launchers import unchecked
from tokenspeed_kernel_base.ops.gemm._inputs import fp8
from tokenspeed_kernel_base.platform import ArchVersion, CapabilityRequirement, current_platform, named_platform, use_platform

torch_scaled_mm = unchecked(tk.mm, launcher_of_torch_scaled_mm)

BF16, F16, SINGLE = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = {
    "tensors": {"a_scale": "tensor", "b_scale": "tensor"},
    "rows": {"a_scale": "token", "b_scale": "channel"},
    "rows and a tensor": {"a_scale": "token", "b_scale": "tensor"},
    "a tensor and columns": {"a_scale": "tensor", "b_scale": "channel"},
    "blocks": {"a_scale": "block", "b_scale": "block"},
}
# Limits of the norm of the error, relative to the norm of the result. Rounding to bfloat16 causes a relative error of at most
# 3.9e-3. The tensor core accumulates with 14 bits.
TOLERANCE = {BF16: 4.5e-3, F16: 2e-3, SINGLE: 2e-3}


def arguments_of(pair: str, m: int, k: int, n: int, device: str = "cpu", **options: Any) -> dict[str, Any]:
    return tk.mm.operator.complete(Case(pair, fp8(m, k, n, **{**PAIRS[pair], **options})).build(torch.device(device), 0))


def explained(arch: str, arguments: dict[str, Any]) -> Explanation:
    with use_platform(named_platform(arch)):
        return tk.mm.explain(**arguments)


def chosen(arch: str, arguments: dict[str, Any]) -> str:
    served = explained(arch, arguments).chosen
    assert served is not None
    return served.name


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [BF16, F16, SINGLE], ids=str)
def test_many_rows_are_supported(pair: str, dtype: torch.dtype) -> None:
    kind = "blocks" if pair == "blocks" else "tensors" if pair == "tensors" else "rows"
    result = "float32" if dtype == SINGLE else "halves"
    m = module._SUPPORTED[kind].fewest_rows
    assert chosen("sm_90", arguments_of(pair, m, 512, 128, out_dtype=dtype)) == f"torch_mm_fp8_{kind}_to_{result}"
    few = arguments_of(pair, m // 2, 512, 128, out_dtype=dtype)
    assert not chosen("sm_90", few).startswith("torch")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": SINGLE}, "wide_bias=True"),
        ({"out_dtype": SINGLE, "bias": SINGLE}, "bias=True is not False"),
        ({"n": 136}, "n=136 is not at least 16 and a multiple of 16"),
        ({"k": 520}, "k=520"),
        ({"a_dtype": E5M2, "b_dtype": E5M2}, "float8_e5m2"),
        ({"a_dtype": torch.float8_e4m3fnuz}, "float8_e4m3fnuz"),
    ],
    ids=str,
)
def test_unsupported_combinations_are_ineligible(change: dict[str, Any], reason: str) -> None:
    sizes = {"m": 2048, "k": 512, "n": 128, **{name: change[name] for name in ("k", "n") if name in change}}
    options = {name: value for name, value in change.items() if name not in sizes}
    told = explained("sm_90", arguments_of("rows", *sizes.values(), **options))
    assert told.chosen is not None
    assert not told.chosen.name.startswith("torch")
    assert reason in str(told)


def test_unsupported_block_scaled_gemms() -> None:
    assert chosen("sm_90", arguments_of("blocks", 2048, 640, 128)) != "torch_mm_fp8_blocks_to_halves"
    assert chosen("sm_90", arguments_of("blocks", 2048, 512, 192)) != "torch_mm_fp8_blocks_to_halves"
    e8m0 = arguments_of("blocks", 2048, 512, 128, scales="e8m0")
    assert chosen("sm_90", e8m0) != "torch_mm_fp8_blocks_to_halves"


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_e5m2_by_e4m3fn_is_supported(pair: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    arguments = arguments_of(pair, 2048, 512, 128, a_dtype=dtypes[0], b_dtype=dtypes[1])
    assert chosen("sm_90", arguments).startswith("torch_mm_fp8")


@pytest.mark.parametrize(
    ("arch", "served"),
    [
        ("sm_89", {"tensors"}),
        ("sm_90", {"tensors", "rows", "blocks"}),
        ("sm_100", {"tensors"}),
        ("sm_80", set()),
        ("gfx950", set()),
    ],
)
def test_architectures(arch: str, served: set[str]) -> None:
    for pair in ("tensors", "rows", "blocks"):
        assert chosen(arch, arguments_of(pair, 2048, 512, 128)).startswith("torch") == (pair in served)


def test_a_pytorch_for_an_older_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = CapabilityRequirement(ArchVersion(9, 0), vendors=frozenset({"nvidia"}), probe=module._gap.__wrapped__)
    for cuda, version, wanted in (
        ("12.8", "2.11.0", "CUDA 12.9"),
        ("13.0", "2.8.1+cu130", "PyTorch 2.9"),
        ("13.0", "2.11.0", None),
    ):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch, "__version__", version)
        gap = needs.gap(named_platform("sm_90"))
        assert gap is None if wanted is None else wanted in str(gap)


def _as_checked(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """A stand-in for ``torch._scaled_mm`` with PyTorch's checks: block scales are column-major, for a multiple of 4 rows."""
    (m, k), n, out = a.shape, b.shape[1], options["out"]
    assert not options["use_fast_accum"]
    assert a.stride(1) == b.stride(0) == 1
    assert a.stride(0) % 16 == b.stride(1) % 16 == 0
    assert all(x.data_ptr() % 16 == 0 for x in (a, b, a_scale, b_scale, out))
    product: Tensor
    if a_scale.numel() == b_scale.numel() == 1:
        product = a.float() @ b.float() * a_scale * b_scale
    elif a_scale.shape == (m, 1):
        assert b_scale.shape == (1, n)
        assert a_scale.is_contiguous()
        assert b_scale.t().is_contiguous()
        product = a.float() @ b.float() * a_scale * b_scale
    else:
        assert a_scale.shape == (m, k // 128)
        assert a_scale.stride() == (1, m)
        assert m % 4 == 0
        assert b_scale.shape == (k // 128, -(-n // 128))
        assert b_scale.stride(0) == 1
        wide = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
        product = (a.float() * a_scale.repeat_interleave(128, 1)) @ (b.float() * wide)
    return out.copy_(product if bias is None else product + bias.float())


def check(arguments: dict[str, Any]) -> Tensor:
    wanted = tk.mm(**{**arguments, "out": None, "out_dtype": SINGLE, "bias": None}, solution="reference").double()
    if arguments["bias"] is not None:
        wanted = wanted + arguments["bias"].double()
    got = torch_scaled_mm(**arguments)
    assert got.shape == wanted.shape
    assert got.dtype == (arguments["out_dtype"] or BF16)
    assert float((got.double() - wanted).norm()) <= TOLERANCE[got.dtype] * float(wanted.norm())
    return got


@pytest.fixture(params=["checked", pytest.param("gpu", marks=pytest.mark.nvidia)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns ``"cuda"`` if the GPU supports scaled fp8 GEMMs; or ``"cpu"``, and replaces PyTorch's function by a stand-in with the
    same checks."""
    if request.param == "checked":
        monkeypatch.setattr(torch, "_scaled_mm", _as_checked)
        return "cpu"
    if not torch.cuda.is_available() or (gap := module._SUPPORTED["rows"].capability.gap(current_platform())) is not None:
        pytest.skip(f"needs a GPU with these products: {gap if torch.cuda.is_available() else 'there is none'}")
    return "cuda"


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("m", [1, 128, 130, 133])
def test_gemms(device: str, pair: str, m: int) -> None:
    check(arguments_of(pair, m, 512, 384, device))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtype", [BF16, F16, SINGLE], ids=str)
def test_results_and_biases(device: str, pair: str, dtype: torch.dtype) -> None:
    check(arguments_of(pair, 200, 1024, 256, device, out_dtype=dtype, **({} if dtype == SINGLE else {"bias": dtype})))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_e5m2(device: str, pair: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(arguments_of(pair, 133, 512, 384, device, a_dtype=dtypes[0], b_dtype=dtypes[1]))


@pytest.mark.parametrize("pair", ["rows", "blocks"])
def test_other_strides_and_alignments(device: str, pair: str) -> None:
    """Tests operands that are contiguous along the other axis, or whose rows have gaps or unaligned addresses; strided scales; and
    results with gaps between rows."""
    arguments = arguments_of(pair, 133, 512, 384, device)
    a, b, scales = arguments["a"], arguments["b"], {name: arguments[name] for name in ("a_scale", "b_scale")}
    out = torch.full((133, 400), torch.nan, dtype=BF16, device=device)
    gaps = torch.zeros(133, 560, dtype=torch.uint8, device=device).view(a.dtype)
    gaps[:, 3:515] = a
    check({**arguments, "a": gaps[:, 3:515], "out": out[:, 3:387]})
    assert out[:, 387:].isnan().all()
    assert out[:, :3].isnan().all()
    check({**arguments, "a": a.mT.contiguous().mT, "b": b.contiguous(), "out": out[:, :384]})
    check({**arguments, **{name: scale.repeat_interleave(2, 1)[:, ::2] for name, scale in scales.items()}})
