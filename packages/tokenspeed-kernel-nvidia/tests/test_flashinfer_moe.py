"""Tests the adapter to FlashInfer's MoE: FlashInfer's signatures, the weights, and the arguments that the adapter passes.

As in ``test_flashinfer``, a stand-in computes the documented results in PyTorch on a CPU, and rejects calls that the real functions
reject. The stand-in of the kernels receives weights from the stand-ins of the preprocessors, and inverts the same steps as the real
kernels.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenspeed_kernel
from tokenspeed_kernel.workbench.numerics import Status, verify_case
from tokenspeed_kernel.workbench.numerics.summary import assert_none_wrong
from tokenspeed_kernel_base.cases import DEFAULT, Case, Draw, Recipe
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.ops.quantization.encodings import decode_fp8, decode_mxfp4
from tokenspeed_kernel_base.platform import named_platform, platform_of
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_base.spec import KernelSpec, Priority

from .flashinfer_stand_in import declared, fixtures, forget_adapters, unparsed, with_signature

# FlashInfer's signatures by defining module, copied from the source of flashinfer-python 0.7.2 without annotations. The package
# exports all of these functions.
SIGNATURES = {
    "core.cutlass_fused_moe": (
        "(input, token_selected_experts, token_final_scales, fc1_expert_weights, fc2_expert_weights, output_dtype, quant_scales, "
        "fc1_expert_biases=None, fc2_expert_biases=None, input_sf=None, swiglu_alpha=None, swiglu_beta=None, swiglu_limit=None, "
        "tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, cluster_size=1, cluster_rank=0, output=None, enable_alltoall=False, "
        "use_deepseek_fp8_block_scale=False, use_w4_group_scaling=False, use_mxfp8_act_scaling=False, min_latency_mode=False, "
        "use_packed_weights=False, use_wfp4afp8_humming=False, tune_max_num_tokens=8192, enable_pdl=None, "
        "activation_type=ActivationType.Swiglu, swizzled_input_sf=True, use_fused_finalize=True, profile_ids=None, "
        "workspace_buffer=None, *, clamped_relu2_limit=None, situ_beta=None, situ_linear_beta=None, backend='cutlass')"
    ),
    "prepare.interleave_moe_weights_for_sm90_mixed_gemm": "(weight, quant_type='fp4')",
    "prepare.interleave_moe_scales_for_sm90_mixed_gemm": "(scales, group_size=32)",
}
_KERNELS = "flashinfer/data/csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh"
_BINDING = "flashinfer/data/csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu"
# Conventions and units that the adapter relies on: a source file of FlashInfer, and the text in this file that states the
# convention.
FACTS = {
    "ups come before gates": ("flashinfer/fused_moe/prepare.py", "in semantic ``[up, gate]`` order"),
    "the activation": (_KERNELS, "return gate_clamped * fn(gate_clamped * alpha) * (linear_clamped + beta);"),
    "gates are cut on one side": (_KERNELS, "T gate_clamped = cutlass::minimum<T>{}(gate, limit);"),
    "no limit": ("flashinfer/tllm_enums.py", "DEFAULT_SWIGLU_LIMIT = torch.finfo(torch.float32).max"),
    "experts outside of the rank's range are no rows": (
        _KERNELS,
        "bool is_valid_expert = expert >= start_expert && expert < end_expert;",
    ),
    "nor are they summed": (_KERNELS, "if (expert_id < 0 || expert_id >= num_experts_per_node) {\n        continue;"),
    "tokens without experts become zeros": (_KERNELS, "finalizeMoeRouting must fill invalid output tokens with\n    // zeros."),
    "atomic sums are not reproducible": (
        "flashinfer/fused_moe/core.py",
        "False to use the non-fused, deterministic finalize path.",
    ),
    "biases have the output's dtype": (_BINDING, "CHECK_INPUT_TYPE(fc1_expert_biases.value(), mOutputDtype);"),
    "sizes of halves": (_BINDING, "TMA requires at least 128 bit alignment"),
    "mxfp4 wants bfloat16": (_BINDING, "SM90 MXFP4 W4A16 supports BF16 activations only"),
    "mxfp4 wants multiples of 128": (
        "flashinfer/fused_moe/prepare.py",
        "Cutlass W4A16 requires hidden_size and intermediate_size divisible by 128.",
    ),
    "mxfp4's lower nibble comes first": ("flashinfer/fused_moe/prepare.py", "nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)"),
    "mxfp4's scales are read as numbers of four": (
        "flashinfer/fused_moe/runners.py",
        "return [inputs[6].view(torch.int32), inputs[7].view(torch.int32)]",
    ),
    "Hopper alone has mxfp4 under bfloat16": ("flashinfer/fused_moe/api.py", "_CUTLASS_W4A16_ARCHS = (90,)"),
    "Hopper alone has fp8 blocks": ("flashinfer/fused_moe/api.py", "_CUTLASS_FP8_BLOCK_ARCHS = (90,)"),
    "where dense weights are served": (
        "flashinfer/fused_moe/api.py",
        "_CUTLASS_BF16_ARCHS = (89, 90, 100, 103, 107, 110, 120, 121)",
    ),
}
KERNELS = [
    *(f"flashinfer_moe_apply_dense_{arch}" for arch in ("sm100", "sm120", "sm90")),
    "flashinfer_moe_apply_fp8_blocks_sm90",
    "flashinfer_moe_apply_mxfp4_sm90",
]
_CALLS: list[str] = []


# -- against the source --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_source(source: Callable[[str], str], name: str) -> None:
    module, _, function = name.partition(".")
    assert declared(source(f"flashinfer/fused_moe/{module}.py"), function) == unparsed(SIGNATURES[name])
    exported = source("flashinfer/fused_moe/__init__.py")
    assert f'    "{function}",' in exported


@pytest.mark.parametrize("fact", FACTS)
def test_conventions_are_those_of_the_source(source: Callable[[str], str], fact: str) -> None:
    file, text = FACTS[fact]
    assert text in source(file)


# -- the stand-in --------------------------------------------------------------------------------------------------------------


class _ActivationType(enum.Enum):
    Swiglu = 3


@with_signature(SIGNATURES["prepare.interleave_moe_weights_for_sm90_mixed_gemm"], "weight quant_type")
def _interleaved_codes(given: dict[str, Any]) -> Tensor:
    """Interleaves weights. The real preprocessor and the real kernel share an internal order of bytes. As a stand-in for this
    order, this function reverses the bytes."""
    weight = given["weight"]
    assert (weight.dtype, weight.dim(), given["quant_type"]) == (torch.uint8, 3, "fp4")
    return weight.contiguous().flip(-1)


@with_signature(SIGNATURES["prepare.interleave_moe_scales_for_sm90_mixed_gemm"], "scales")
def _interleaved_scales(given: dict[str, Any]) -> Tensor:
    """Reorders scales: the scales of a block of 64 x 128 weights become ``[16, 16]``."""
    scales = given["scales"]
    experts, rows, groups = scales.shape
    assert (scales.dtype, rows % 64, groups % 4) == (torch.uint8, 0, 0)
    return scales.reshape(experts, rows // 64, 4, 16, groups // 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(
        experts, rows // 64, groups // 4, 16, 16
    )  # fmt: skip


def _folded_back(scales: Tensor) -> Tensor:
    experts, rows, groups, _, _ = scales.shape
    return scales.reshape(experts, rows, groups, 16, 4, 4).permute(0, 1, 4, 3, 2, 5).reshape(experts, rows * 64, groups * 4)


def _decoded(given: dict[str, Any], index: int) -> Tensor:
    """Dequantises the weights of one GEMM to float32."""
    weight, scales = given[f"fc{index + 1}_expert_weights"], given["quant_scales"]
    assert weight.is_contiguous()
    assert not (given["use_w4_group_scaling"] and given["use_deepseek_fp8_block_scale"])
    if given["use_w4_group_scaling"]:
        assert given["input"].dtype == torch.bfloat16
        assert scales[index].dtype == torch.int32
        rows, columns = weight.shape[1], weight.shape[2] * 2
        assert (rows % 128, columns % 128) == (0, 0)
        return decode_mxfp4(weight.flip(-1), _folded_back(scales[index].view(torch.uint8)), torch.float32)
    if given["use_deepseek_fp8_block_scale"]:
        assert (weight.dtype, scales[index].dtype) == (torch.float8_e4m3fn, torch.float32)
        assert (weight.shape[1] % 128, weight.shape[2] % 128) == (0, 0)
        return torch.stack([decode_fp8(w, s, (128, 128), torch.float32) for w, s in zip(weight, scales[index], strict=True)])
    assert scales == []
    assert weight.dtype == given["input"].dtype
    assert (weight.shape[1] % 8, weight.shape[2] % 8) == (0, 0)
    return weight.float()


def _rounded(values: Tensor, given: dict[str, Any]) -> Tensor:
    """Rounds activations as the kernels for fp8 blocks do, with one scale for every 128 features."""
    if not given["use_deepseek_fp8_block_scale"]:
        return values
    blocks = values.unflatten(-1, (-1, 128))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@with_signature(
    SIGNATURES["core.cutlass_fused_moe"],
    "input token_selected_experts token_final_scales fc1_expert_weights fc2_expert_weights output_dtype quant_scales "
    "fc1_expert_biases fc2_expert_biases swiglu_alpha swiglu_beta swiglu_limit output use_deepseek_fp8_block_scale "
    "use_w4_group_scaling use_fused_finalize",
    {"ActivationType": _ActivationType},
)
def _experts(given: dict[str, Any]) -> Tensor:
    x, ids, scales, out = (given[name] for name in ("input", "token_selected_experts", "token_final_scales", "output"))
    w1, w2 = (_decoded(given, index) for index in range(2))
    assert all(tensor.is_contiguous() for tensor in (x, ids, scales, out))
    assert (ids.dtype, scales.dtype, out.dtype) == (torch.int32, torch.float32, given["output_dtype"])
    assert len(x), "it takes no empty batch"
    assert not given["use_fused_finalize"], "its sums are not reproducible"
    assert (out.shape, x.shape[1], w1.shape[1]) == (x.shape, w1.shape[2], 2 * w2.shape[2])
    options = [given[f"swiglu_{name}"] for name in ("alpha", "beta", "limit")]
    assert len({option is None for option in options}) == 1
    biases = [given[f"fc{index}_expert_biases"] for index in (1, 2)]
    for bias in biases:
        assert bias is None or (bias.dtype == given["output_dtype"] and bias.is_contiguous())
    tokens = _rounded(x.float(), given)
    for token in range(len(x)):
        row = torch.zeros(x.shape[1])
        for slot, expert in enumerate(ids[token].tolist()):
            if not 0 <= expert < len(w1):
                continue
            both = w1[expert] @ tokens[token] + (0 if biases[0] is None else biases[0][expert].float())
            up, gate = both.to(x.dtype).float().chunk(2)
            alpha, beta, limit = (1.0, 0.0, torch.inf) if options[0] is None else (float(option[expert]) for option in options)
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            hidden = _rounded((gate * torch.sigmoid(alpha * gate) * (up + beta)).to(x.dtype).float(), given)
            down = (w2[expert] @ hidden).to(x.dtype).float() + (0 if biases[1] is None else biases[1][expert].float())
            row += scales[token, slot] * down
        out[token] = row
    return out


_FUNCTIONS = {
    "flashinfer.fused_moe.cutlass_fused_moe": _experts,
    "flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm": _interleaved_codes,
    "flashinfer.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm": _interleaved_scales,
}


flashinfer, specs = fixtures(_FUNCTIONS, "sm_90", _CALLS, "moe")


# -- declarations --------------------------------------------------------------------------------------------------------------


def test_these_are_declared_below_the_portable_ones(specs: dict[str, KernelSpec]) -> None:
    assert sorted(specs) == KERNELS
    assert all(Priority.REFERENCE < spec.priority < Priority.PORTABLE for spec in specs.values())


def _recipe(**changes: Any) -> Recipe:
    """Returns the recipe of a layer whose options have default values, except for the given options."""
    (case,) = (case for case in moe_apply.operator.all_cases() if case.name == "mxfp4, gpt-oss options")
    assert isinstance(case.make, Recipe)
    plain = dict.fromkeys(("w13_interleaved", "bias", "alpha", "limit", "beta", "weight_format"), DEFAULT)
    return case.make.vary(**{**plain, **changes})


_GPT_OSS: dict[str, Any] = {"w13_interleaved": True, "bias": True, "alpha": 1.702, "limit": 7.0, "beta": 1.0}


@pytest.mark.usefixtures("flashinfer", "specs")
@pytest.mark.parametrize(
    ("changes", "served"),
    [
        ({}, "flashinfer_moe_apply_dense_sm90"),
        ({"dtype": torch.float16, **_GPT_OSS}, "flashinfer_moe_apply_dense_sm90"),
        ({"weight_format": "mxfp4", **_GPT_OSS}, "flashinfer_moe_apply_mxfp4_sm90"),
        ({"dtype": torch.float32}, None),
        ({"hidden": 100}, None),
        ({"intermediate": 60}, None),
        ({"activation_dtype": "fp8"}, None),
        ({"weight_format": "mxfp4", "dtype": torch.float16}, None),
        ({"dtype": torch.float16}, None),
        ({"weight_format": "mxfp4", "activation_dtype": "fp8"}, None),
        ({"weight_format": "fp8_block", "hidden": 128, "intermediate": 128, "activation_dtype": "fp8"}, None),
        ({"weight_format": "fp8_block", "hidden": 128, "intermediate": 128}, None),
    ],
)
def test_eligible_calls(changes: dict[str, Any], served: str | None) -> None:
    facts = {name: value for name, value in _recipe(**changes).values.items() if name not in ("tokens", "rows", "of")}
    sizes = [facts.pop(name) for name in ("experts", "top_k", "hidden", "intermediate")]
    if served is None:
        with pytest.raises(NoKernelFoundError):
            moe_apply.plan(*sizes, **facts, solution="flashinfer")
        return
    assert moe_apply.plan(*sizes, **facts, solution="flashinfer").kernel == served


def test_other_machines_are_refused_first(specs: dict[str, KernelSpec]) -> None:
    for name, spec in specs.items():
        for platform in ("sm_80", "sm_110", "cpu", "gfx950", *(["sm_100"] if name.endswith("_sm90") else ["sm_89"])):
            assert spec.capability.gap(named_platform(platform)).startswith(("needs an ", "needs architecture"))


# -- the adapter with the stand-in ---------------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    """Returns the operator's cases and further cases: sizes with and without padding, with and without biases, experts of other
    ranks."""
    return [
        Case("mxfp4 of whole blocks", _recipe(tokens=3, hidden=256, intermediate=128, weight_format="mxfp4")),
        Case("mxfp4, padded", _recipe(tokens=5, hidden=96, intermediate=160, weight_format="mxfp4", **_GPT_OSS)),
        Case("mxfp4, concatenated, with a bias", _recipe(hidden=64, intermediate=32, weight_format="mxfp4", bias=True)),
        Case("mxfp4, 8 of 32 experts", _recipe(hidden=64, intermediate=64, weight_format="mxfp4", of=32, **_GPT_OSS)),
        Case("dense, limit alone", _recipe(hidden=64, intermediate=48, limit=0.5)),
        Case(
            "dense float16, 3 of 12 experts",
            _recipe(experts=3, of=12, hidden=64, intermediate=40, dtype=torch.float16, bias=True, limit=7.0),
        ),
    ]


@pytest.mark.usefixtures("flashinfer")
def test_results(specs: dict[str, KernelSpec]) -> None:
    named = [specs[f"flashinfer_moe_apply_{what}_sm90"] for what in ("dense", "mxfp4")]
    for case in (*_cases(), *(case for case in moe_apply.operator.all_cases() if not case.large)):
        results = [verify_case(spec, case, "cpu") for spec in named]
        assert_none_wrong(results)
        if case in _cases():
            assert sum(result.status is Status.PASSED for result in results) == 1, case.name
    assert {name.rpartition(".")[2] for name in _CALLS} == {name.rpartition(".")[2] for name in _FUNCTIONS}


@pytest.mark.usefixtures("flashinfer", "specs")
def test_fp8_blocks_run_if_requested_by_name() -> None:
    """Asserts that the results are near the operator's results. They are not equal, because the kernel's activation scales
    differ."""
    recipe = _recipe(tokens=6, hidden=256, intermediate=128, weight_format="fp8_block", activation_dtype="fp8")
    arguments = recipe(Draw(torch.device("cpu"), 0))
    name = "flashinfer_moe_apply_fp8_blocks_sm90"
    facts = {name: value for name, value in recipe.values.items() if name not in ("tokens", "rows", "of")}
    sizes = [facts.pop(name) for name in ("experts", "top_k", "hidden", "intermediate")]
    plan = moe_apply.plan(*sizes, **facts, override=name)
    weights = moe_apply.prepare(arguments["weights"], plan)
    out = tokenspeed_kernel.moe_apply(**{**arguments, "weights": weights, "plan": plan}, override=name)
    wanted = tokenspeed_kernel.moe_apply(**arguments, solution="reference").float()
    assert 1e-4 < float((out.float() - wanted).norm() / wanted.norm()) < 5e-2


@pytest.mark.usefixtures("flashinfer", "specs")
@pytest.mark.parametrize(("weight_format", "given"), [("dense", DEFAULT), ("mxfp4", "mxfp4")])
def test_outputs_of_other_strides_and_no_tokens(weight_format: str, given: Any) -> None:
    recipe = _recipe(tokens=4, hidden=96, intermediate=64, weight_format=given)
    arguments = recipe(Draw(torch.device("cpu"), 0))
    wanted = tokenspeed_kernel.moe_apply(**arguments, solution="reference")
    plan = moe_apply.plan(8, 4, 96, 64, weight_format=weight_format, solution="flashinfer")
    arguments = {**arguments, "weights": moe_apply.prepare(arguments["weights"], plan), "plan": plan}
    wide = torch.full((4, 192), 7.0, dtype=torch.bfloat16)
    out = wide[:, 96:]
    assert tokenspeed_kernel.moe_apply(**arguments, out=out, solution="flashinfer") is out
    torch.testing.assert_close(out, wanted, atol=2e-2, rtol=2e-2)
    assert (wide[:, :96] == 7).all()
    none = {name: arguments[name][:0] for name in ("x", "topk_weights", "topk_ids")}
    assert tokenspeed_kernel.moe_apply(**{**arguments, **none}, solution="flashinfer").shape == (0, 96)


@pytest.mark.usefixtures("flashinfer", "specs")
def test_weights_are_left_as_they_were() -> None:
    for weight_format in ("dense", "mxfp4"):
        recipe = _recipe(
            hidden=128, intermediate=128, weight_format=weight_format if weight_format == "mxfp4" else DEFAULT, **_GPT_OSS
        )
        weights, again = (recipe(Draw(torch.device("cpu"), 0))["weights"] for _ in range(2))
        made = moe_apply.prepare(
            weights, moe_apply.plan(8, 4, 128, 128, weight_format=weight_format, **_GPT_OSS, solution="flashinfer")
        )
        assert torch.equal(weights.w13_weight, again.w13_weight)
        assert torch.equal(weights.w2_weight, again.w2_weight)
        assert (made.layout, made.device) == (f"flashinfer_{weight_format}", weights.w13_weight.device)
        assert [float(option[3]) for option in (made.alpha, made.beta, made.limit)] == pytest.approx([1.702, 1.0, 7.0])


# -- the real FlashInfer -------------------------------------------------------------------------------------------------------


@pytest.mark.nvidia
@pytest.mark.parametrize("name", KERNELS)
def test_on_the_device(specs: dict[str, KernelSpec], name: str) -> None:
    device = torch.device("cuda")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    spec = specs[name]
    gap = spec.capability.gap(platform_of(device))
    if gap is not None:
        pytest.skip(gap)
    forget_adapters()
    cases = [case for case in (*_cases(), *get_operator(spec.operator).all_cases()) if not case.large]
    results = [verify_case(spec, case, device) for case in cases]
    assert_none_wrong(results)
