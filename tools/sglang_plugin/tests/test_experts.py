"""Compares the MXFP4 experts of GPT-OSS, run through SGLang's quantisation method, with plain PyTorch on dequantised weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: `nox -s sglang` installs it")
pytest.importorskip("tokenspeed_kernel_sglang", reason="needs the plugin: `nox -s sglang` installs it")

from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS

from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_sglang import experts, parts, receipt
from tokenspeed_kernel_sglang.experts import GptOssConfig, GptOssExperts
from tokenspeed_kernel_sglang.settings import Settings

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, ALPHA, LIMIT = 4, 2, 64, 96, 1.702, 7.0
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make_layer(**changes: Any) -> Any:
    facts = {
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "hidden_size": HIDDEN,
        "intermediate_size_per_partition": INTERMEDIATE,
        "top_k": TOP_K,
        "num_fused_shared_experts": 0,
        "params_dtype": torch.bfloat16,
        "activation": "silu",
        "gemm1_alpha": ALPHA,
        "gemm1_clamp_limit": LIMIT,
        **changes,
    }
    config = MoeRunnerConfig(**facts)
    layer = torch.nn.Module()
    layer.moe_runner_config = config
    for name in ("num_local_experts", "hidden_size", "intermediate_size_per_partition", "top_k"):
        setattr(layer, name, getattr(config, name))
    return layer


def load(layer: Any, method: GptOssExperts) -> dict[str, torch.Tensor]:
    """Fills the parameters as SGLang's loader does: padded features after the checkpoint's features stay zero. Returns the
    dequantised weights."""
    seen: list[str] = []
    attributes = {"weight_loader": seen.append}
    method.create_weights(layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16, with_bias=True, **attributes)
    generator = torch.Generator().manual_seed(0)
    dense = {}
    used = {"w13": (slice(2 * INTERMEDIATE), slice(HIDDEN)), "w2": (slice(HIDDEN), slice(INTERMEDIATE))}
    for part, (rows, columns) in used.items():
        weight, scale, bias = (getattr(layer, f"{part}_{name}") for name in ("weight", "weight_scale", "weight_bias"))
        assert weight.weight_loader == seen.append
        shape = (EXPERTS, rows.stop, columns.stop)
        codes = torch.randint(16, shape, generator=generator, dtype=torch.uint8)
        exponents = torch.randint(122, 125, (*shape[:2], shape[2] // 32), generator=generator, dtype=torch.uint8)
        weight.data[:, rows, : columns.stop // 2] = codes[..., ::2] | (codes[..., 1::2] << 4)
        scale.data[:, rows, : columns.stop // 32] = exponents
        bias.data[:, rows] = torch.randn(EXPERTS, rows.stop, generator=generator).to(torch.bfloat16)
        scales = torch.exp2(exponents.float() - 127).repeat_interleave(32, 2)
        dense[part] = VALUES[codes.long()] * scales
        dense[f"{part}_bias"] = bias.data[:, rows].float()
    return dense


def plain(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dense: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.zeros(len(x), HIDDEN)
    for token, (chosen, given) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, weight in zip(chosen, given, strict=True):
            if expert >= 0:
                both = dense["w13"][expert] @ x[token].float() + dense["w13_bias"][expert]
                gate, up = both[::2].clamp(max=LIMIT), both[1::2].clamp(-LIMIT, LIMIT)
                hidden = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
                out[token] += weight * (dense["w2"][expert] @ hidden + dense["w2_bias"][expert])
    return out


@torch.inference_mode()
def test_experts() -> None:
    layer = make_layer()
    method = GptOssExperts(layer)
    assert method.plan.intermediate_size == 128  # whole multiples of 64, as SGLang's loader expects
    dense = load(layer, method)
    method.create_moe_runner(layer, layer.moe_runner_config)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [-1, 2], [-1, -1]], dtype=torch.int32)  # -1: experts of other ranks
    weights = torch.tensor([0.7, 0.3]).expand(5, 2).contiguous()
    out = method.apply(layer, SimpleNamespace(hidden_states=x, topk_output=StandardTopKOutput(weights, ids, None)))
    expected = plain(x, ids, weights, dense)
    assert out.hidden_states.dtype == torch.bfloat16
    torch.testing.assert_close(out.hidden_states.float(), expected, rtol=3e-2, atol=3e-2 * float(expected.abs().max()))


REFUSED = {
    "activation gelu": {"activation": "gelu"},
    "experts without a clamped SwiGLU": {"gemm1_clamp_limit": None},
    "gate and up in separate halves": {"gate_up_interleaved": False},
    "routing weights on the input": {"apply_router_weight_on_input": True},
    "results of single experts": {"no_combine": True},
    "a factor of the routed experts": {"routed_scaling_factor": 2.5},
    "shared experts in the same weights": {"num_fused_shared_experts": 1},
    "hidden_size": {"hidden_size": 48},
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_by_name_and_sglangs_own_serves(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = object.__new__(experts.Mxfp4MoEMethod)
    monkeypatch.setattr(experts.Mxfp4Config, "get_quant_method", lambda self, layer, prefix: own)
    config = object.__new__(GptOssConfig)
    layer = make_layer(**REFUSED[message])
    with pytest.raises(NotServedError, match=message):
        GptOssExperts(layer)
    assert config.get_quant_method(layer, "model.layers.0.mlp.experts") is own
    assert message in str(receipt())
    assert isinstance(config.get_quant_method(make_layer(), "model.layers.0.mlp.experts"), GptOssExperts)
    assert not receipt().served("experts")
    assert [bool(row.kernels) for row in receipt().rows] == [False, True]


def test_other_layers_keep_sglangs_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts.Mxfp4Config, "get_quant_method", lambda self, layer, prefix: "linear")
    assert object.__new__(GptOssConfig).get_quant_method(torch.nn.Linear(2, 2), "lm_head") == "linear"


def test_the_form_of_the_router() -> None:
    layer = make_layer()
    method = GptOssExperts(layer)
    with pytest.raises(ValueError, match="weights and ids of experts, got SimpleNamespace"):
        method.apply(layer, SimpleNamespace(hidden_states=torch.zeros(1, HIDDEN), topk_output=SimpleNamespace()))


def test_a_runner_backend_with_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "get_moe_runner_backend", lambda: SimpleNamespace(value="triton_kernel"))
    # In 0.5.23, the quantisation method determines the form of the router's result.
    if hasattr(experts.FusedMoEMethodBase, "get_moe_runner_backend"):
        assert GptOssExperts(make_layer()).get_moe_runner_backend(make_layer()) is None
    else:
        with pytest.raises(NotServedError, match="--moe-runner-backend triton_kernel"):
            GptOssExperts(make_layer())


def test_registered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    off = dict.fromkeys(("attention", "norms", "activations", "rope"), False)
    monkeypatch.setitem(QUANTIZATION_METHODS, "mxfp4", experts.Mxfp4Config)
    for _ in range(2):
        parts.register_parts(Settings(**off))
    assert QUANTIZATION_METHODS["mxfp4"] is GptOssConfig
    assert caplog.text == ""
    for other in (None, int):  # not offered on this platform, replaced by another plug-in
        monkeypatch.setitem(QUANTIZATION_METHODS, "mxfp4", other)
        parts.register_parts(Settings(**off))
        assert QUANTIZATION_METHODS["mxfp4"] is other
        assert f"SGLang's quantisation mxfp4 is {other} here" in caplog.text
