"""Tests each vLLM hook. If a release changes a hook, the message names the hook, the expected interface, and the new interface."""

from __future__ import annotations

import dataclasses
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")

from hooks import HOOKS, Hook
from packaging.version import Version

README = Path(__file__).parents[1] / "README.md"


def found(path: str) -> Any:
    """Returns the object that a path names: the longest module prefix, then attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            value: Any = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(value, part):
                pytest.fail(f"vLLM {vllm.__version__} has no {path}: {value} has no attribute {part}")
            value = getattr(value, part)
        return value
    return pytest.fail(f"vLLM {vllm.__version__} has no module for {path}")


def _has_to_be_given(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.path.removeprefix("vllm."))
def test_a_hook(hook: Hook) -> None:
    if hook.until and Version(vllm.__version__) >= Version(hook.until):
        pytest.skip(f"vLLM {hook.until} has no {hook.path}, and does not ask for it")
    value = found(hook.path)
    if hook.parameters:
        signature = inspect.signature(value)
        there = list(signature.parameters)
        missing = [name for name in hook.parameters if name not in there]
        assert not missing, f"vLLM {vllm.__version__}: {hook.path}{signature} has no parameter {', '.join(missing)}"
        needed = [name for name, parameter in signature.parameters.items() if _has_to_be_given(parameter)]
        more = [name for name in needed if name not in hook.parameters and not hook.partial]
        assert not more, f"vLLM {vllm.__version__}: {hook.path}{signature} also has {', '.join(more)}"
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    lost = [name for name in hook.attributes if name not in fields and not hasattr(value, name)]
    assert not lost, f"vLLM {vllm.__version__}: {hook.path} has no {', '.join(lost)}"


def test_vllms_own_backend_lays_the_cache_out_as_ours(vllm_config: Any) -> None:
    from vllm.v1.attention.backends import utils
    from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

    if not hasattr(TritonAttentionBackend, "get_kv_cache_shape"):
        pytest.skip(f"vLLM {vllm.__version__} asks no backend for the layout of the cache")

    from tokenspeed_kernel_vllm.attention.backend import TokenspeedBackend

    theirs, ours = (
        backend.get_kv_cache_shape(5, 16, 2, 64, cache_dtype_str="auto") for backend in (TritonAttentionBackend, TokenspeedBackend)
    )
    assert theirs == ours, f"vLLM {vllm.__version__} lays caches out as {theirs}, tokenspeed_kernel_vllm as {ours}"
    for layout in ("NHD", "HND"):
        utils.set_kv_cache_layout(layout)
        try:
            for layers in (False, True):
                orders = [backend.get_kv_cache_stride_order(layers) for backend in (TritonAttentionBackend, TokenspeedBackend)]
                assert orders[0] == orders[1], f"vLLM {vllm.__version__}, {layout}: {orders[0]}, ours {orders[1]}"
        finally:
            utils.set_kv_cache_layout(None)


def test_no_method_of_the_backend_is_left_abstract() -> None:
    from tokenspeed_kernel_vllm.attention.backend import TokenspeedBackend
    from tokenspeed_kernel_vllm.experts.method import GptOssExperts
    from tokenspeed_kernel_vllm.experts.packed import Fp4Experts
    from tokenspeed_kernel_vllm.experts.routed import BlockFp8Experts, DenseExperts
    from tokenspeed_kernel_vllm.linear_fp4 import Fp4Linear
    from tokenspeed_kernel_vllm.linear_fp8 import Fp8Linear
    from tokenspeed_kernel_vllm.mla.backend import LatentBackend
    from tokenspeed_kernel_vllm.mla.prefill import LatentPrefill

    backends = (TokenspeedBackend, LatentBackend)
    attention = [part for each in backends for part in (each, each.get_impl_cls(), each.get_builder_cls())]
    for ours in (*attention, LatentPrefill, GptOssExperts, DenseExperts, BlockFp8Experts, Fp4Experts, Fp8Linear, Fp4Linear):
        left = sorted(ours.__abstractmethods__)
        assert not left, f"vLLM {vllm.__version__} wants {', '.join(left)} of {ours.__name__}"


def test_the_loader_of_gpt_oss_looks_for_our_parameters() -> None:
    source = inspect.getsource(import_module("vllm.model_executor.models.gpt_oss"))
    for name in ("w13_weight", "w13_weight_scale", "w13_bias", "w2_weight", "w2_weight_scale", "w2_bias"):
        assert f".{name}" in source, f"vLLM {vllm.__version__}: the loader of GPT-OSS knows no {name}"


def test_what_the_activation_of_gpt_oss_means() -> None:
    """vLLM passes alpha, beta and the limit as literals to its own kernels. These literals must equal our values."""
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    from tokenspeed_kernel_vllm.experts import config

    source = inspect.getsource(GptOssMxfp4MoEMethod.get_fused_moe_quant_config)
    for name, ours in (("gemm1_alpha", config.ALPHA), ("gemm1_beta", config.BETA), ("swiglu_limit", config.LIMIT)):
        theirs = re.search(rf"{name}=([\d.]+)", source)
        assert theirs, f"vLLM {vllm.__version__}: {name} is no longer written in get_fused_moe_quant_config"
        assert float(theirs[1]) == ours, f"vLLM {vllm.__version__}: {name} is {theirs[1]}, ours {ours}"


def test_the_readme_has_every_hook() -> None:
    text = README.read_text()
    missing = [hook.path for hook in HOOKS if f"`{hook.path.removeprefix('vllm.')}`" not in text]
    assert not missing, f"README.md does not name {', '.join(missing)}"
