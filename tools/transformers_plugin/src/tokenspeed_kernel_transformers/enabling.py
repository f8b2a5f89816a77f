"""Switches the parts of a model to our kernels: attention, experts, norms, gated MLPs.

* Attention and experts: transformers' registries of attention and experts functions. They apply to a whole model, so a part is
  switched only if each of its layers has an eligible kernel.
* Norms and gated MLPs: modules are replaced one by one.

transformers keeps everything else: the cache, routing, projections, rotary embedding, and generation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed_kernel_base.served import Receipt, Row
from tokenspeed_kernel_transformers.experts import arrange, forget, is_experts
from tokenspeed_kernel_transformers.kernels import NotServedError, kernel_of
from tokenspeed_kernel_transformers.layers import GatedMLP, RMSNorm, is_gated_mlp, is_norm
from tokenspeed_kernel_transformers.masks import PAGE_SIZES

logger = logging.getLogger(__name__)

NAME = "tokenspeed"
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


def enable_parts(model: Any, *, attention: bool, experts: bool, norms: bool, gated_mlps: bool) -> Receipt:
    """Implements `tokenspeed_kernel_transformers.enable`."""
    off = "it is switched off"
    rows: list[Row] = []
    rows += _attention(model) if attention else [Row("attention", "all", len(_attention_layers(model)), reason=off)]
    rows += _mixers(model)
    rows += _experts(model) if experts else [Row("experts", "all", len(_experts_layers(model)), reason=off)]
    for part, wanted, recognised, replacement in (
        ("norms", norms, is_norm, RMSNorm),
        ("gated MLPs", gated_mlps, is_gated_mlp, GatedMLP),
    ):
        found = [(name, module) for name, module in model.named_modules() if recognised(module)]
        rows += _replaced(model, part, found, replacement) if wanted else [Row(part, "all", len(found), reason=off)]
    receipt = Receipt(tuple(row for row in rows if row.layers), "transformers")
    logger.info("tokenspeed_kernel_transformers: %s\n%s", type(model).__name__, receipt)
    return receipt


@dataclass(frozen=True)
class _Shape:
    """The properties of a layer's attention that decide which kernels are eligible."""

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window_left: int
    logit_cap: float
    sinks: bool

    def __str__(self) -> str:
        more = (
            f", window {self.window_left + 1}" if self.window_left >= 0 else "",
            f", cap {self.logit_cap:g}" if self.logit_cap else "",
            ", sinks" if self.sinks else "",
        )
        return f"{self.kind}{''.join(more)}"


def _attention_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if all(hasattr(module, name) for name in ("layer_idx", "scaling", "config"))]


def _attention(model: Any) -> list[Row]:
    """Switches the attention of the whole model to our kernels, if each of its layers has eligible kernels. Returns the rows of the
    receipt."""
    counts = Counter(_shape_of(layer) for layer in _attention_layers(model))
    outcomes: dict[_Shape, tuple[tuple[str, ...], str]] = {}
    for shape in counts:
        try:
            outcomes[shape] = (tuple(_attention_kernels(shape, model.dtype, model.device)), "")
        except NotServedError as error:
            outcomes[shape] = ((), str(error))
    reason = ""
    if not (getattr(model, "_supports_attention_backend", False) or getattr(model, "_supports_flash_attn", False)):
        reason = f"{type(model).__name__} does not pass masks of other attention functions to its layers"
    elif not all(kernels for kernels, _ in outcomes.values()):
        reason = "no kernel is eligible for other layers of the model"
    elif counts:
        model.set_attn_implementation(NAME)
    return [
        Row("attention", str(shape), counts[shape], () if reason else kernels, own or reason)
        for shape, (kernels, own) in outcomes.items()
    ]


def _shape_of(layer: Any) -> _Shape:
    """Returns the properties of a layer's attention, from the attributes by which transformers' models name them."""
    config = layer.config
    heads = config.num_attention_heads
    head_dim = getattr(layer, "qk_head_dim", None) or layer.head_dim
    # If the model's configuration does not list the types of layers, all layers have the same window.
    default = None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
    window = getattr(layer, "sliding_window", default)
    return _Shape(
        kind=type(layer).__name__,
        heads=heads,
        kv_heads=heads // getattr(layer, "num_key_value_groups", 1),
        head_dim=head_dim,
        v_head_dim=getattr(layer, "v_head_dim", None) or head_dim,
        window_left=window - 1 if window else -1,
        logit_cap=getattr(layer, "attn_logit_softcapping", None) or 0.0,
        sinks=isinstance(getattr(layer, "sinks", None), torch.Tensor),
    )


def _attention_kernels(shape: _Shape, dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yields the kernels of calls with one sequence: a prefill, a decode step with large pages and with pages of one token, and
    several new tokens after cached tokens.
    """

    def made(*sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device=device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    options = {
        "window_left": shape.window_left,
        "logit_cap": shape.logit_cap,
        "sinks": made(shape.heads) if shape.sinks else None,
    }
    q, k, v = (
        made(2, shape.heads, shape.head_dim),
        made(2, shape.kv_heads, shape.head_dim),
        made(2, shape.kv_heads, shape.v_head_dim),
    )
    cache = {
        "k_cache": k.unsqueeze(1),
        "v_cache": v.unsqueeze(1),
        "page_table": ints(0, 1).view(1, 2),
        "cache_seqlens": ints(2),
        "max_seqlen_k": 2,
    }
    large = {
        **cache,
        "k_cache": made(1, PAGE_SIZES[0], shape.kv_heads, shape.head_dim),
        "v_cache": made(1, PAGE_SIZES[0], shape.kv_heads, shape.v_head_dim),
    }
    calls: list[tuple[str, dict[str, Any]]] = [
        ("mha_prefill", {"q": q, "k": k, "v": v, "cu_seqlens": ints(0, 2), "max_seqlen": 2}),
        ("mha_decode_with_kvcache", {"q": q[:1], **large}),
        ("mha_decode_with_kvcache", {"q": q[:1], **cache}),
        ("mha_with_kvcache", {"q": q, "cu_seqlens_q": ints(0, 2), "max_seqlen_q": 2, **cache}),
    ]
    yield from dict.fromkeys(kernel_of(operator, **arguments, **options) for operator, arguments in calls)


def _mixers(model: Any) -> list[Row]:
    """Returns receipt rows for the layers that have a recurrent state instead of attention. These layers run transformers' own
    code."""
    attention = set(map(id, _attention_layers(model)))
    counts = Counter(
        type(module).__name__
        for module in model.modules()
        if hasattr(module, "layer_idx") and hasattr(module, "conv1d") and id(module) not in attention
    )
    reason = "transformers has no hook for them that works without its kernels package"
    return [Row("mixers", kind, count, reason=reason) for kind, count in counts.items()]


def _experts_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_experts(module)]


def _experts(model: Any) -> list[Row]:
    """Arranges the weights of all experts for their kernels. If every layer has an eligible kernel, switches all experts of the
    model to these kernels. If not, drops the arranged weights. Returns the rows of the receipt.
    """
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[tuple[str, str]] = Counter()
    for layer in _experts_layers(model):
        kind = type(layer).__name__
        try:
            plan = arrange(layer, _top_k_of(layer.config)).plan
            counts[kind, f"moe_apply ({plan.weight_format}): {plan.kernel}"] += 1
        except NotServedError as error:
            reasons[kind, str(error)] += 1
    if counts and not reasons:
        model.set_experts_implementation(NAME)
        return [Row("experts", kind, count, (kernel,)) for (kind, kernel), count in counts.items()]
    for layer in _experts_layers(model):
        forget(layer)
    other = "no kernel is eligible for other layers of the model"
    return [
        *(Row("experts", kind, count, reason=reason) for (kind, reason), count in reasons.items()),
        *(Row("experts", kind, count, reason=other) for (kind, _), count in counts.items()),
    ]


def _top_k_of(config: Any) -> int:
    """Returns the number of experts per token. Raises NotServedError if the configuration has none of the names `_TOP_K`."""
    for name in _TOP_K:
        if isinstance(value := getattr(config, name, None), int):
            return value
    raise NotServedError(f"the configuration has none of {', '.join(_TOP_K)}")


def _replaced(model: Any, part: str, found: Iterable[tuple[str, Any]], replacement: Callable[[Any], Any]) -> list[Row]:
    """Replaces the modules ``found`` one by one, except those for which no kernel is eligible. Returns the rows of the receipt."""
    kernels: dict[tuple[str, str], str] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, own in found:
        kind = type(own).__name__
        try:
            module = replacement(own).train(own.training)
        except NotServedError as error:
            counts[kind, str(error)] += 1
            continue
        model.set_submodule(name, module)
        counts[kind, ""] += 1
        kernels[kind, ""] = module.kernel
    return [
        Row(part, kind, count, (kernels[kind, reason],) if not reason else (), reason) for (kind, reason), count in counts.items()
    ]
