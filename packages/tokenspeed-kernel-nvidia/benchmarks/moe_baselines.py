"""The MoE implementations that are measured: this package's kernels, the core's portable kernels, and third-party baselines.

An implementation's ``setup`` takes a `Shape` and a `Layer`, arranges the layer's weights, and returns a function of a `Batch`. For
a batch, this function returns the timed call. The call has no parameters, and computes the combined output ``[tokens, hidden]``
from router logits. Third-party kernels are called as vLLM 0.26 calls them, with vLLM's routing, activation and sum. A third-party
package is imported only when its implementation is measured. A package that is not installed is reported as absent with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from moe_shapes import Batch, Layer, Model, Shape
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import Unsupported
from tokenspeed_kernel.workbench.benchmark.runner import Call, Implementation
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.ops.moe.moe_apply import moe_apply
from tokenspeed_kernel_base.selection import NoKernelFoundError
from tokenspeed_kernel_nvidia._programs import Program
from tokenspeed_kernel_nvidia.cutedsl.mxfp4 import layout as mxfp4_layout
from tokenspeed_kernel_nvidia.sm90.moe.grouped import launch as grouped
from tokenspeed_kernel_nvidia.sm90.moe.grouped.config import (
    CODES,
    FEW_ROUNDED_COLUMNS,
    PAIRED,
    PARTS,
    PLAIN,
    VALUES,
    Gemm,
    codes_for,
    columns_for,
    inputs_for,
    is_few_rounded,
    is_paired,
)
from tokenspeed_kernel_nvidia.sm90.moe.grouped.paired import moe_apply_paired
from tokenspeed_kernel_nvidia.sm90.moe.moe_apply import is_streamed
from tokenspeed_kernel_nvidia.sm90.moe.stream import launch as stream
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import config_of

Experts = Callable[[Batch], Call]


def local(ids: Tensor, model: Model) -> Tensor:
    """Returns the expert ids, with -1 in place of the ids of other ranks' experts."""
    return ids.masked_fill(ids >= model.experts, -1) if model.of else ids


# -- this project's ----------------------------------------------------------------------------------------------------------------


def of_solution(solution: str, routing: str | None = None) -> Callable[[Shape, Layer], Experts]:
    """Returns the setup of an implementation that runs ``moe_topk``, then ``moe_apply`` with kernels of the backend ``solution``.
    The kernel of ``moe_topk`` is of the backend ``routing``, by default the best kernel.
    """

    def setup(shape: Shape, layer: Layer) -> Experts:
        # Importing the core registers the kernels of its plugins.
        importlib.import_module("tokenspeed_kernel")
        facts = {field.name: getattr(layer.plan, field.name) for field in dataclasses.fields(layer.plan)}
        for chosen in ("kernel", "weight_layout"):
            del facts[chosen]
        try:
            plan = moe_apply.plan(**facts, device=layer.weights.w13_weight.device, solution=solution)
        except NoKernelFoundError as error:
            raise Unsupported(" ".join(str(error).split())[:500]) from None
        weights = moe_apply.prepare(layer.weights, plan)
        topk, apply = get_operator("moe.moe_topk"), get_operator("moe.moe_apply")

        def experts(batch: Batch) -> Call:
            logits = topk.complete({"logits": batch.logits, "top_k": shape.model.top_k})
            route = functools.partial(topk.function.bind(**logits, solution=routing), *logits.values())
            given = (batch.x, weights, batch.topk_weights, batch.topk_ids, plan)
            # The plan's weight layout is the same for every number of tokens. The kernel for this number of tokens is selected
            # here.
            run = apply.function.bind(*given, solution=solution)

            def call() -> Tensor:
                topk_weights, ids = route()
                out = run(batch.x, weights, topk_weights, local(ids, shape.model), plan, None)
                assert isinstance(out, Tensor)
                return out

            return call

        return experts

    return setup


def programs_of(shape: Shape, name: str = "ours") -> list[tuple[Program[Any], Any]]:
    """Returns the programs with long compile times that a call of this package's kernel uses, for bfloat16 tokens and mxfp4 weights
    that float8_e5m2 represents exactly.

    Args:
        shape: the call.
        name: ``"ours"``, or a name of `tiles`. Other implementations use none of this package's programs.
    """
    model, dtype, rounded = shape.model, "bfloat16", shape.activation_dtype == "fp8"
    pairs = shape.tokens * model.top_k
    if model.weight_format != "mxfp4" or (name != "ours" and (_TILES.fullmatch(name) is None or not _suits(name, shape))):
        return []
    if name.startswith("few") or (name == "ours" and is_streamed(dtype, pairs, model.experts, rounded)):
        k = max(model.hidden, model.intermediate)
        config = config_of(dtype, k, pairs / model.experts, rounded)
        return [(stream.stream_program, dataclasses.replace(config, **dict(_switched_off(name))))]
    if name != "ours":
        columns, inputs = _tile_of(name)
    else:
        inputs = inputs_for(dtype, pairs, model.experts)
        if rounded:
            inputs = (CODES if codes_for(pairs, model.experts) else VALUES,)
        few = rounded and is_few_rounded(pairs, model.experts)
        columns = FEW_ROUNDED_COLUMNS if few else columns_for(pairs, model.experts, inputs)
    paired = name.endswith("p")
    if name == "ours":
        paired = is_paired(dtype, pairs, model.experts, model.hidden, model.intermediate, rounded)
        columns = PAIRED[inputs[0]] if paired else columns
    both = itertools.product((True, False), inputs)
    return [(grouped.gemm_program, Gemm(dtype, gated, columns, kind, paired=paired)) for gated, kind in both]


_TILES = re.compile(r"(\d+([vs]|c?p?)|fewc?(-narrow)?)")  # the names of `tiles`


def _suits(name: str, shape: Shape) -> bool:
    """Whether a name of `tiles` is for the dtype of a shape's activations."""
    return (name.partition("-")[0].rstrip("p")[-1] in "vc") == (shape.activation_dtype == "fp8")


def _switched_off(name: str) -> tuple[tuple[str, bool], ...]:
    """Returns the attributes of the streaming kernel's configuration that a name of `tiles` switches off."""
    return tuple((attribute, False) for attribute in name.split("-")[1:])


def _tile_of(name: str) -> tuple[int, tuple[str, ...]]:
    """Returns the largest number of columns and the kinds of inputs of a name of `tiles`."""
    return int(name.rstrip("vcsp")), ({"v": VALUES, "c": CODES, "s": PARTS}.get(name.rstrip("p")[-1], PLAIN),)


def tiles(name: str, shape: Shape, layer: Layer) -> Experts:
    """Sets up `moe_apply` on mxfp4 weights with one tile width, without the router.

    Args:
        name: the largest number of columns of a tile, with a suffix. ``s``: 16-bit activations are split into two fp8 values.
            ``v``: activations are fp8, with 16-bit MMAs on the quantised values. ``c``: activations and MMAs are fp8. ``p``, after
            the others: two CTAs share columns (288p and 144cp). The names ``few`` and ``fewc`` stand for the streaming kernel;
            ``few-narrow`` for this kernel without the attribute ``narrow`` of its configuration.
        shape, layer: see the module's docstring.
    """
    if shape.model.weight_format != "mxfp4" or not _suits(name, shape):
        raise Unsupported("for mxfp4 weights, and activations of one dtype")
    prepared = mxfp4_layout.prepare_weights(layer.weights, layer.plan)
    apply: Callable[..., Any] = functools.partial(stream.moe_apply_few, out=None, changes=_switched_off(name))
    if name.endswith("p"):
        apply = moe_apply_paired
    elif not name.startswith("few"):
        columns, inputs = _tile_of(name)
        apply = functools.partial(grouped.moe_apply_many, columns=columns, inputs=inputs)
    return lambda batch: functools.partial(apply, batch.x, prepared, batch.topk_weights, batch.topk_ids, layer.plan)


# -- vLLM --------------------------------------------------------------------------------------------------------------------------

_LAYERS = "vllm.model_executor.layers"


@functools.cache
def _vllm() -> None:
    """Loads vLLM's operators. Raises ImportError if vLLM is not installed."""
    for name, value in {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    importlib.import_module("vllm")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()


def _from_vllm(module: str, name: str) -> Any:
    _vllm()
    return getattr(importlib.import_module(f"{_LAYERS}.{module}"), name)


def _only_gpt_oss(shape: Shape) -> None:
    if not shape.model.gpt_oss:
        raise Unsupported("measured on GPT-OSS only")


def _only_16_bit_activations(shape: Shape) -> None:
    if shape.activation_dtype != "none":
        raise Unsupported("activations stay bfloat16")


def _expert_map(model: Model, device: torch.device) -> Tensor | None:
    """Returns the index of each expert on this rank, int32 ``[all experts]``; -1 for experts of other ranks. Returns None if all
    experts are on this rank.
    """
    if not model.of:
        return None
    numbers = torch.arange(model.routed, dtype=torch.int32, device=device)
    return torch.where(numbers < model.experts, numbers, -1)


def _scales(layer: Layer) -> tuple[Tensor, Tensor]:
    w13, w2 = layer.weights.w13_weight_scale, layer.weights.w2_weight_scale
    assert w13 is not None
    assert w2 is not None
    return w13, w2


def _triton_kernels(shape: Shape, layer: Layer) -> Experts:
    """Sets up OpenAI's kernels, which vLLM selects for GPT-OSS on Hopper."""
    _only_gpt_oss(shape)
    _only_16_bit_activations(shape)
    forward = _from_vllm("fused_moe.experts.gpt_oss_triton_kernels_moe", "triton_kernel_moe_forward")
    swizzle = _from_vllm("quantization.utils.mxfp4_utils", "_swizzle_mxfp4")
    quant_config = _from_vllm("fused_moe.config", "mxfp4_w4a16_moe_quant_config")
    activation = _from_vllm("fused_moe.activation", "MoEActivation")
    ogs = importlib.import_module("triton_kernels.matmul_ogs")
    weights, scales = layer.weights, _scales(layer)
    matrices, precisions = [], []
    for codes, scale in zip((weights.w13_weight, weights.w2_weight), scales, strict=True):
        matrix, flex, swizzled = swizzle(codes, scale)
        matrices.append(matrix)
        precisions.append(ogs.PrecisionConfig(weight_scale=swizzled, flex_ctx=ogs.FlexCtx(rhs_data=flex)))
    config = quant_config(
        w1_scale=precisions[0], w2_scale=precisions[1], w1_bias=weights.w13_weight_bias, w2_bias=weights.w2_weight_bias
    )

    def experts(batch: Batch) -> Call:
        return functools.partial(
            forward, batch.x, *matrices, batch.logits, shape.model.top_k, True,
            activation=activation.SWIGLUOAI, quant_config=config, global_num_experts=shape.model.experts,
        )  # fmt: skip

    return experts


def _padded(tensor: Tensor, *sizes: int) -> Tensor:
    """Zero-pads the last axes of a tensor to these sizes."""
    pads = [pad for size, length in zip(reversed(sizes), reversed(tensor.shape), strict=False) for pad in (0, size - length)]
    return torch.nn.functional.pad(tensor, pads)


def _marlin(shape: Shape, layer: Layer) -> Experts:
    """Sets up vLLM's Marlin kernel, with sizes rounded up as in vLLM. The time to pad the tokens is not measured, which favours
    Marlin.
    """
    _only_gpt_oss(shape)
    _only_16_bit_activations(shape)
    backend = _from_vllm("fused_moe.oracle.mxfp4", "Mxfp4MoeBackend")
    rounded_up = _from_vllm("fused_moe.oracle.mxfp4", "mxfp4_round_up_hidden_size_and_intermediate_size")
    prepare = _from_vllm("quantization.utils.marlin_utils_fp4", "prepare_moe_mxfp4_layer_for_marlin")
    workspace_of = _from_vllm("quantization.utils.marlin_utils", "marlin_make_workspace_new")
    marlin_moe = _from_vllm("fused_moe.experts.marlin_moe", "fused_marlin_moe")
    fused_topk = _from_vllm("fused_moe.router.fused_topk_router", "fused_topk")
    activation = _from_vllm("fused_moe.activation", "MoEActivation")
    scalar_types, custom = importlib.import_module("vllm.scalar_type").scalar_types, importlib.import_module("vllm._custom_ops")
    model, weights = shape.model, layer.weights
    hidden, intermediate = rounded_up(backend.MARLIN, model.hidden, model.intermediate)
    w13_scale, w2_scale = _scales(layer)
    holder = torch.nn.Module()
    holder.params_dtype = torch.bfloat16  # type: ignore[assignment]
    w13, w2, w13_scale, w2_scale, b13, b2 = prepare(
        holder,
        _padded(weights.w13_weight, 2 * intermediate, hidden // 2),
        _padded(weights.w2_weight, hidden, intermediate // 2),
        _padded(w13_scale, 2 * intermediate, hidden // 32),
        _padded(w2_scale, hidden, intermediate // 32),
        None if weights.w13_weight_bias is None else _padded(weights.w13_weight_bias, 2 * intermediate),
        None if weights.w2_weight_bias is None else _padded(weights.w2_weight_bias, hidden),
    )
    workspace = workspace_of(w13.device, 4)

    def summed(slots: Tensor, out: Tensor, *_: Any) -> Tensor:
        custom.moe_sum(slots, out)
        return out

    def experts(batch: Batch) -> Call:
        x = _padded(batch.x, hidden)

        def call() -> Tensor:
            topk_weights, topk_ids, _ = fused_topk(x, batch.logits, model.top_k, True)
            out = marlin_moe(
                x, w13, w2, b13, b2, w13_scale, w2_scale, topk_weights, topk_ids,
                quant_type_id=scalar_types.float4_e2m1f.id, global_num_experts=model.experts,
                activation=activation.SWIGLUOAI, moe_sum=summed, workspace=workspace,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out[:, : model.hidden]

        return call

    return experts


def _vllm_triton(shape: Shape, layer: Layer) -> Experts:
    """Sets up vLLM's own Triton kernel, for bfloat16 weights and for fp8 weights with block scales."""
    if shape.model.weight_format == "mxfp4":
        raise Unsupported("measured on bfloat16 and fp8 weights")
    if (shape.model.weight_format == "fp8_block") != (shape.activation_dtype == "fp8"):
        raise Unsupported("activations have the dtype of weights")
    fused_experts = _from_vllm("fused_moe.fused_moe", "fused_experts")
    fused_topk = _from_vllm("fused_moe.router.fused_topk_router", "fused_topk")
    config = None
    if shape.activation_dtype == "fp8":
        quant_config = _from_vllm("fused_moe.config", "fp8_w8a8_moe_quant_config")
        w13_scale, w2_scale = _scales(layer)
        config = quant_config(w1_scale=w13_scale, w2_scale=w2_scale, block_shape=[128, 128])
    model, weights = shape.model, layer.weights
    expert_map = _expert_map(model, weights.w13_weight.device)

    def experts(batch: Batch) -> Call:
        def call() -> Tensor:
            topk_weights, topk_ids, _ = fused_topk(batch.x, batch.logits, model.top_k, True)
            out = fused_experts(
                batch.x, weights.w13_weight, weights.w2_weight, topk_weights, topk_ids,
                global_num_experts=model.routed, expert_map=expert_map, quant_config=config,
            )  # fmt: skip
            assert isinstance(out, Tensor)
            return out

        return call

    return experts


# -- Humming, between vLLM's routing, activation and sum ---------------------------------------------------------------------------

_HUMMING_FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def _humming_layer(shape: Shape, layer: Layer) -> torch.nn.Module:
    """Returns both projections of a layer in Humming's layout, with the padding that vLLM uses."""
    schemas, method = importlib.import_module("humming.schema"), importlib.import_module("humming.layer").HummingMethod
    dtypes = importlib.import_module("humming.dtypes")
    model, weights = shape.model, layer.weights
    holder = torch.nn.Module()
    holder.register_buffer("locks", torch.zeros(1024, dtype=torch.int32, device=weights.w13_weight.device))
    given = schemas.BaseWeightSchema.from_config(_HUMMING_FORMATS[model.weight_format])
    inputs = schemas.HummingInputSchema(a_dtype=dtypes.float8e4m3) if shape.activation_dtype == "fp8" else None
    sizes = {"w13": (2 * model.intermediate, model.hidden), "w2": (model.hidden, model.intermediate)}
    for name, (rows, columns) in sizes.items():
        # The weights are copied, because Humming multiplies scales into weights in place if activations are fp8.
        tensors = {part: getattr(weights, f"{name}_{part}").clone() for part in ("weight", "weight_scale")}
        if model.weight_format == "fp8_block":
            tensors["weight_scale_inv"] = tensors.pop("weight_scale")
        bias = getattr(weights, f"{name}_weight_bias")
        if bias is not None:
            tensors["bias"] = bias.bfloat16()
        schema, tensors = given.convert_humming(tensors, [rows], [columns], torch.bfloat16, model.experts)
        for part, tensor in tensors.items():
            holder.register_parameter(f"{name}_{part}", torch.nn.Parameter(tensor, requires_grad=False))
        method.prepare_layer_meta(
            holder, rows, columns, schema, inputs, num_experts=model.experts, pad_n_to_multiple=256, pad_k_to_multiple=128,
            has_bias=bias is not None, torch_dtype=torch.bfloat16, sublayer_name=name,
        )  # fmt: skip
        method.transform_humming_layer(holder, sublayer_name=name)
    return holder


def _humming(shape: Shape, layer: Layer) -> Experts:
    model, weights = shape.model, layer.weights
    if model.weight_format not in _HUMMING_FORMATS:
        raise Unsupported("measured on quantised weights only")
    humming, config = importlib.import_module("humming.layer"), importlib.import_module("humming.config")
    fused_topk = _from_vllm("fused_moe.router.fused_topk_router", "fused_topk")
    align = _from_vllm("fused_moe.moe_align_block_size", "moe_align_block_size")
    summed = _from_vllm("fused_moe.moe_fused_mul_sum", "moe_fused_mul_sum")
    activate = _from_vllm("fused_moe.activation", "apply_moe_activation")
    activation = _from_vllm("fused_moe.activation", "MoEActivation")
    kind = activation.SWIGLUOAI if model.gpt_oss else activation.SILU
    method, holder = humming.HummingMethod, _humming_layer(shape, layer)
    indexed = {"gemm_type": config.GemmType.INDEXED.value}
    tunings = {
        name: method.get_default_tuning_configs(holder, gemm_type=config.GemmType.INDEXED, sublayer_name=name)
        for name in ("w13", "w2")
    }
    expert_map = _expert_map(model, weights.w13_weight.device)

    def experts(batch: Batch) -> Call:
        pairs = len(batch.x) * model.top_k
        here = -(-pairs * model.experts // model.routed)
        block = next((tuning["block_shape"][0] for low, high, tuning in tunings["w13"] if low < here <= high), 64)

        def gemm(x: Tensor, name: str, top_k: int, columns: int, sorting: tuple[Tensor, ...]) -> Tensor:
            quantized, scale = method.may_quant_input(holder, x, sublayer_name=name)
            out = torch.empty(pairs, columns, dtype=batch.x.dtype, device=batch.x.device)
            sorted_ids, expert_ids, padded = sorting
            method.forward_layer(
                holder, quantized, outputs=out, input_scale=scale, sorted_ids=sorted_ids, expert_ids=expert_ids,
                num_tokens_padded=padded, top_k=top_k, valid_shape_m=here, compute_config=indexed, tuning_config=tunings[name],
                sublayer_name=name,
            )  # fmt: skip
            return out

        def call() -> Tensor:
            topk_weights, topk_ids, _ = fused_topk(batch.x, batch.logits, model.top_k, True)
            sorting = align(topk_ids, block, model.routed, expert_map, ignore_invalid_experts=True)
            gate_up = gemm(batch.x, "w13", model.top_k, 2 * model.intermediate, sorting)
            hidden = torch.empty(pairs, model.intermediate, dtype=gate_up.dtype, device=gate_up.device)
            activate(kind, hidden, gate_up)
            down = gemm(hidden, "w2", 1, model.hidden, sorting).view(len(batch.x), model.top_k, -1)
            out = torch.empty_like(batch.x)
            summed(inputs=down, topk_weights=topk_weights, outputs=out, topk_ids=topk_ids, expert_map=expert_map)
            return out

        return call

    return experts


def implementations(ours: str = "cutedsl") -> list[Implementation]:
    """Returns all implementations, this package's first. ``ours``: the backend of the implementation ``ours``."""
    return [
        Implementation("ours", of_solution(ours), "tokenspeed-kernel-nvidia", ours=True),
        Implementation("triton", of_solution("triton", "triton"), "tokenspeed-kernel", ours=True, portable=True),
        Implementation("triton_kernels", _triton_kernels, "vllm"),
        Implementation("marlin", _marlin, "vllm"),
        Implementation("humming", _humming, "humming-kernels"),
        Implementation("vllm_triton", _vllm_triton, "vllm"),
        # FlashInfer compiles its kernels for half an hour, unless they are compiled already.
        Implementation("flashinfer", of_solution("flashinfer", "triton"), "flashinfer-python", on_demand=True),
    ]
