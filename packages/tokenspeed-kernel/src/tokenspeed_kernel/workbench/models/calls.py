"""The operator calls of one step of a model: a decode step or the prefill of one prompt.

Large tensors are fake, because only their shapes count. Lengths and positions are real, because costs depend on their values. A
runtime can use operators that fuse several operations. The calls here use the operators that fuse most operations, as
`tools/gpt_oss` in this repository does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tokenspeed_kernel.workbench.models.config import Experts, Latent, Model
from tokenspeed_kernel_base.operator import get_operator
from tokenspeed_kernel_base.platform import cpu_platform

# Default sizes: the numbers of sequences of decode steps, and of prompt tokens of prefills.
DECODE_SIZES = (1, 4, 16, 64, 256)
PREFILL_SIZES = (128, 1024, 4096, 8192)
_FP8, _BLOCK = torch.float8_e4m3fn, 128
_MX = 32


@dataclass(frozen=True)
class Step:
    """One forward pass of a model: a decode step or a prefill.

    Attributes:
        phase: ``"decode"``: one new token for each of ``size`` sequences; ``"prefill"``: a prompt of ``size`` tokens.
        size: number of sequences or of prompt tokens, see ``phase``.
        context: number of tokens per sequence in the cache, for decode.
        page_size: number of tokens per page.
        dtype: dtype of activations.
        cache_dtype: dtype of keys and values in the cache; None for ``dtype``.
        activation_dtype: the format to which experts quantise their inputs, see `MoEPlan`.
    """

    phase: str
    size: int
    context: int = 4096
    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    activation_dtype: str = "none"

    @property
    def decodes(self) -> bool:
        return self.phase == "decode"

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence that are in the cache after this step."""
        return [self.context] * self.size if self.decodes else [self.size]


def steps_of(
    decode_sizes: Iterable[int] = DECODE_SIZES, prefill_sizes: Iterable[int] = PREFILL_SIZES, **options: Any
) -> list[Step]:
    """Returns a decode step for each number of sequences, then a prefill for each number of prompt tokens.

    Args:
        decode_sizes, prefill_sizes: the numbers of sequences and of prompt tokens, in any order.
        options: further fields of every `Step`.
    """
    sizes = (("decode", decode_sizes), ("prefill", prefill_sizes))
    return [Step(phase, size, **options) for phase, some in sizes for size in sorted(set(some))]


@dataclass(frozen=True)
class Call:
    """An operator call that a model makes in a step.

    Attributes:
        operator: the operator's name, ``"mode"``.
        role: where the model makes the call: ``"router"``, ``"lm head"``...
        times: how many times a step makes the call.
        arguments: the call's arguments by name. Large tensors are fake.
    """

    operator: str
    role: str
    times: int
    arguments: dict[str, Any] = field(repr=False)


def calls_of(model: Model, step: Step) -> list[Call]:
    """Returns the operator calls of a model's step, in the order in which a layer makes them."""
    return list(_Calls(model, step))


def whole_layers_of(model: Model, step: Step) -> Call | None:
    """Returns the call of `decoder_layers` that a runtime may make instead of all calls of the layers in a decode step; None if the
    operator does not cover the model's layers. Its weights are of one layer of each kind, because programs do not depend on the
    number of layers."""
    experts = model.experts
    if experts is None or experts.shared or experts.dense_layers or experts.correction_bias or experts.routing:
        return None
    dense = model.weight_format == "dense" and not (model.latent or model.qk_norm)
    if not step.decodes or not dense or step.cache_dtype not in (None, step.dtype):
        return None
    return _Calls(model, step).whole_layers(experts)


class _Calls:
    def __init__(self, model: Model, step: Step) -> None:
        self.model, self.step = model, step
        self._fakes = FakeTensorMode()

    def __iter__(self) -> Iterator[Call]:
        model = self.model
        yield from self._latent_attention(model.latent) if model.latent else self._attention()
        experts = model.experts
        dense = experts.dense_layers if experts else model.layers
        if dense:
            yield self._norm("mlp norm", dense)
            yield from self._mlp("mlp", model.intermediate, dense)
        if experts:
            yield from self._experts(experts, model.layers - experts.dense_layers)
        yield from self._sampling()

    # -- tensors ---------------------------------------------------------------------------------------------------------------

    def _fake(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        with self._fakes:
            return torch.empty(shape, dtype=dtype or self.step.dtype)

    def _weight(self, inputs: int, outputs: int, dtype: torch.dtype | None = None) -> Tensor:
        with self._fakes:
            return torch.empty((outputs, inputs), dtype=dtype or self.step.dtype).t()

    @property
    def _tokens(self) -> int:
        return self.step.size

    @property
    def _positions(self) -> Tensor:
        return torch.tensor([n - 1 for n in self.step.lengths]) if self.step.decodes else torch.arange(self.step.size)

    @property
    def _pages(self) -> int:
        return -(-max(self.step.lengths) // self.step.page_size)

    @property
    def _slots(self) -> Tensor:
        if not self.step.decodes:
            return torch.arange(self.step.size)
        of_sequence = torch.arange(self.step.size) * self._pages * self.step.page_size
        return of_sequence + self.step.context - 1

    def _cache(self, *row: int) -> Tensor:
        pages = self._pages * len(self.step.lengths)
        return self._fake(pages, self.step.page_size, *row, dtype=self.step.cache_dtype)

    def _paged(self) -> dict[str, Any]:
        batch, pages = len(self.step.lengths), self._pages
        return {
            "page_table": torch.arange(batch * pages, dtype=torch.int32).view(batch, pages),
            "cache_seqlens": torch.tensor(self.step.lengths, dtype=torch.int32),
            "max_seqlen_k": max(self.step.lengths),
        }

    def _packed(self) -> dict[str, Any]:
        return {"cu_seqlens": torch.tensor([0, self.step.size], dtype=torch.int32), "max_seqlen": self.step.size}

    def _angles(self, width: int) -> Tensor:
        return self._fake(max(self.model.max_positions, *self.step.lengths, 1), width, dtype=torch.float32)

    # -- layers ----------------------------------------------------------------------------------------------------------------

    def _norm(self, role: str, times: int, width: int | None = None, residual: bool = True, rows: int | None = None) -> Call:
        rows, width = rows or self._tokens, width or self.model.hidden
        arguments = {"x": self._fake(rows, width), "weight": self._fake(width), "eps": self.model.eps}
        return Call("rmsnorm", role, times, {**arguments, "residual": self._fake(rows, width) if residual else None})

    def _linear(self, role: str, times: int, inputs: int, outputs: int, bias: bool = False) -> Iterator[Call]:
        tokens = self._tokens
        if self.model.weight_format != "fp8_block":
            a, b = self._fake(tokens, inputs), self._weight(inputs, outputs)
            yield Call("mm", role, times, {"a": a, "b": b, "bias": self._fake(outputs) if bias else None})
            return
        quantization = _class_of("quantize", "quantization").fp8("block", _BLOCK)
        yield Call("quantize", role, times, {"x": self._fake(tokens, inputs), "quantization": quantization})
        blocks = math.ceil(inputs / _BLOCK)
        arguments: dict[str, Any] = {
            "a": self._fake(tokens, inputs, dtype=_FP8),
            "a_scale": self._fake(tokens, blocks, dtype=torch.float32),
            "b": self._weight(inputs, outputs, _FP8),
            "b_scale": self._weight(blocks, math.ceil(outputs / _BLOCK), torch.float32),
            "out_dtype": self.step.dtype,
        }
        yield Call("mm", role, times, {**arguments, "bias": self._fake(outputs) if bias else None})

    def _attention(self) -> Iterator[Call]:
        model, step = self.model, self.step
        heads, kv_heads, width = model.heads, model.kv_heads, model.head_dim
        columns = (heads + 2 * kv_heads) * width
        kv: dict[str, Any] = {"k_cache": self._cache(kv_heads, width), "v_cache": self._cache(kv_heads, width)}
        scaled = step.cache_dtype not in (None, step.dtype)
        rope: dict[str, Any] = {"positions": self._positions, "cos_sin_cache": self._angles(width), "slot_mapping": self._slots}
        if model.qk_norm or model.weight_format != "dense" or scaled:
            yield self._norm("attention norm", model.layers)
            yield from self._linear("qkv projection", model.layers, model.hidden, columns, model.bias)
            norms = {"q_weight": self._fake(width), "k_weight": self._fake(width)} if model.qk_norm else {}
            arguments = {"qkv": self._fake(self._tokens, columns), **rope, **kv, **norms, "eps": model.eps}
            scales = {n: torch.ones(()) for n in ("k_scale", "v_scale")} if scaled else {}
            yield Call("qk_rmsnorm_rope_store_kv_cache", "attention", model.layers, {**arguments, **scales})
        else:
            arguments = {
                "x": self._fake(self._tokens, model.hidden),
                "norm_weight": self._fake(model.hidden),
                "qkv_weight": self._weight(model.hidden, columns),
                "kv_heads": kv_heads,
                "head_dim": width,
                "eps": model.eps,
                "residual": self._fake(self._tokens, model.hidden),
                "bias": self._fake(columns) if model.bias else None,
            }
            yield Call("rmsnorm_qkv_rope", "attention", model.layers, {**arguments, **rope, **kv})
        for window, layers in sorted(model.windows.items()):
            role = f"window of {window + 1}" if window >= 0 else "full attention"
            sinks = self._fake(heads, dtype=torch.float32) if model.sinks else None
            options: dict[str, Any] = {"window_left": window, "sinks": sinks}
            q = self._fake(self._tokens, heads, width)
            if step.decodes:
                scales = {n: torch.ones(()) for n in ("k_scale", "v_scale")} if scaled else {}
                yield Call("mha_decode_with_kvcache", role, layers, {"q": q, **kv, **self._paged(), **scales, **options})
            else:
                k, v = (self._fake(self._tokens, kv_heads, width) for _ in "kv")
                yield Call("mha_prefill", role, layers, {"q": q, "k": k, "v": v, **self._packed(), **options})
        yield from self._linear("output projection", model.layers, heads * width, model.hidden, model.bias)

    def _latent_attention(self, latent: Latent) -> Iterator[Call]:
        model, tokens, layers, heads = self.model, self._tokens, self.model.layers, self.model.heads
        rank, rope = latent.kv_rank, latent.rope_dim
        yield self._norm("attention norm", layers)
        yield from self._linear("latents", layers, model.hidden, latent.q_rank + rank + rope)
        if latent.q_rank:
            yield self._norm("query latent norm", layers, latent.q_rank, residual=False)
            yield from self._linear("queries", layers, latent.q_rank, heads * model.head_dim)
        else:
            yield from self._linear("queries", layers, model.hidden, heads * model.head_dim)
        yield self._norm("kv latent norm", layers, rank, residual=False)
        cache, slots, angles = self._cache(rank + rope), self._slots, self._angles(rope)
        shared = {"positions": self._positions, "cos_sin_cache": angles, "interleaved": True}
        scale = model.head_dim**-0.5
        if self.step.decodes:
            absorbed = {"a": self._fake(heads, tokens, latent.nope_dim), "b": self._fake(heads, latent.nope_dim, rank)}
            yield Call("bmm", "absorbed keys", layers, absorbed)
            arguments = {
                "q_latent": self._fake(tokens, heads, rank),
                "q_rope": self._fake(tokens, heads, rope),
                "latent": self._fake(tokens, rank),
                "k_rope": self._fake(tokens, rope),
                "kv_cache": cache,
                "slot_mapping": slots,
            }
            yield Call("apply_rope_mla", "attention", layers, {**arguments, **shared})
            q = self._fake(tokens, heads, rank + rope)
            options = {"kv_lora_rank": rank, "softmax_scale": scale}
            yield Call("mla_decode_with_kvcache", "full attention", layers, {"q": q, "kv_cache": cache, **self._paged(), **options})
            expanded = {"a": self._fake(heads, tokens, rank), "b": self._fake(heads, rank, latent.v_dim)}
            yield Call("bmm", "expanded values", layers, expanded)
        else:
            yield from self._linear("keys and values", layers, rank, heads * (latent.nope_dim + latent.v_dim))
            q, k = self._fake(tokens, heads, rope), self._fake(tokens, 1, rope)
            yield Call("apply_rope", "attention", layers, {"q": q, "k": k, **shared})
            stored = {"latent": self._fake(tokens, rank), "k_rope": self._fake(tokens, rope)}
            yield Call("store_mla_kv_cache", "attention", layers, {**stored, "kv_cache": cache, "slot_mapping": slots})
            q, k = (self._fake(tokens, heads, model.head_dim) for _ in "qk")
            v = self._fake(tokens, heads, latent.v_dim)
            arguments = {"q": q, "k": k, "v": v, **self._packed(), "softmax_scale": scale}
            yield Call("mla_prefill", "full attention", layers, arguments)
        yield from self._linear("output projection", layers, heads * latent.v_dim, model.hidden)

    def _mlp(self, role: str, intermediate: int, times: int) -> Iterator[Call]:
        yield from self._linear(f"{role} gate and up", times, self.model.hidden, 2 * intermediate)
        yield Call("silu_and_mul", role, times, {"x": self._fake(self._tokens, 2 * intermediate)})
        yield from self._linear(f"{role} down", times, intermediate, self.model.hidden)

    def _experts(self, experts: Experts, times: int) -> Iterator[Call]:
        model, tokens = self.model, self._tokens
        arguments: dict[str, Any] = {
            "x": self._fake(tokens, model.hidden),
            "norm_weight": self._fake(model.hidden),
            "router_weight": self._weight(model.hidden, experts.count),
            "top_k": experts.top_k,
            "eps": model.eps,
            "residual": self._fake(tokens, model.hidden),
            "router_bias": self._fake(experts.count) if experts.router_bias else None,
            "correction_bias": self._fake(experts.count, dtype=torch.float32) if experts.correction_bias else None,
        }
        yield Call("rmsnorm_moe_topk", "router", times, {**arguments, **experts.routing})
        if experts.shared:
            yield from self._mlp("shared experts", experts.shared, times)
        yield Call("moe_apply", "experts", times, self._moe_apply(experts))

    def whole_layers(self, experts: Experts) -> Call:
        model, width = self.model, self.model.head_dim
        applied, weights_class = self._moe_apply(experts), _class_of("decoder_layers", "weights")
        columns = (model.heads + 2 * model.kv_heads) * width
        layers = [
            weights_class.layer_class(
                input_norm=self._fake(model.hidden),
                qkv=self._fake(columns, model.hidden),
                projection=self._fake(model.hidden, model.heads * width),
                norm=self._fake(model.hidden),
                router=self._fake(experts.count, model.hidden),
                experts=applied["weights"],
                window_left=window,
                qkv_bias=self._fake(columns) if model.bias else None,
                projection_bias=self._fake(model.hidden) if model.bias else None,
                sinks=self._fake(model.heads, dtype=torch.float32) if model.sinks else None,
                router_bias=self._fake(experts.count) if experts.router_bias else None,
            )
            for window in sorted(model.windows)
        ]
        pages = self._pages * len(self.step.lengths)
        cache = len(layers), pages, self.step.page_size, model.kv_heads, width
        paged = {name: value for name, value in self._paged().items() if name != "max_seqlen_k"}
        arguments = {
            "x": self._fake(self._tokens, model.hidden),
            "weights": weights_class(layers),
            "k_cache": self._fake(*cache),
            "v_cache": self._fake(*cache),
            **paged,
            "slot_mapping": self._slots,
            "cos_sin_cache": self._angles(width),
            "plan": applied["plan"],
            "eps": model.eps,
        }
        return Call("decoder_layers", "all layers", 1, arguments)

    def _moe_apply(self, experts: Experts) -> dict[str, Any]:
        tokens, hidden, inner, count = self._tokens, self.model.hidden, experts.intermediate, experts.count
        operator = get_operator("moe_apply")
        # The plan is made for the reference, which reads the canonical layout. Selection derives each kernel's own layout from
        # the plan.
        plan = operator.function.plan(
            count,
            experts.top_k,
            hidden,
            inner,
            dtype=self.step.dtype,
            weight_format=experts.weight_format,
            activation_dtype=self.step.activation_dtype,
            platform=cpu_platform(),
            override="reference_moe_apply",
            **experts.options,
        )
        weights: dict[str, Any] = {}
        for name, outputs, inputs in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
            weight, scale = _STORED[experts.weight_format](outputs, inputs)
            weights[f"{name}_weight"] = self._fake(count, *weight[0], dtype=weight[1])
            weights[f"{name}_weight_scale"] = None if scale is None else self._fake(count, *scale[0], dtype=scale[1])
            weights[f"{name}_weight_bias"] = self._fake(count, outputs) if experts.options.get("bias") else None
        spread = torch.arange(tokens * experts.top_k, dtype=torch.int32).view(tokens, experts.top_k) % count
        x, topk_weights = self._fake(tokens, hidden), self._fake(tokens, experts.top_k, dtype=torch.float32)
        stored = _class_of("moe_apply", "weights")(**weights)
        return {"x": x, "weights": stored, "topk_weights": topk_weights, "topk_ids": spread, "plan": plan}

    def _sampling(self) -> Iterator[Call]:
        rows, model = len(self.step.lengths), self.model
        yield self._norm("final norm", 1, rows=rows)
        weight = self._weight(model.hidden, model.vocab)
        yield Call("mm", "lm head", 1, {"a": self._fake(rows, model.hidden), "b": weight})
        logits = self._fake(rows, model.vocab)
        yield Call("argmax", "greedy sampling", 1, {"logits": logits})
        of_row: dict[str, Any] = {
            "temperature": torch.ones(rows),
            "top_k": torch.full((rows,), 40, dtype=torch.int32),
            "top_p": torch.full((rows,), 0.95),
            "seed": torch.arange(rows),
            "offset": torch.zeros(rows, dtype=torch.int64),
        }
        yield Call("sample_top_k_top_p", "sampling", 1, {"logits": logits, **of_row})


def _class_of(operator: str, parameter: str) -> Any:
    """Returns the class of the objects that an operator takes as the named parameter."""
    return next(each.cls or each.types[0] for each in get_operator(operator).parameters if each.name == parameter)


_Stored = tuple[tuple[int, ...], torch.dtype | None]


def _dense(outputs: int, inputs: int) -> tuple[_Stored, _Stored | None]:
    return ((outputs, inputs), None), None


def _fp8_block(outputs: int, inputs: int) -> tuple[_Stored, _Stored | None]:
    blocks = (math.ceil(outputs / _BLOCK), math.ceil(inputs / _BLOCK))
    return ((outputs, inputs), _FP8), (blocks, torch.float32)


def _mxfp4(outputs: int, inputs: int) -> tuple[_Stored, _Stored | None]:
    return ((outputs, inputs // 2), torch.uint8), ((outputs, inputs // _MX), torch.uint8)


_STORED: dict[str, Callable[[int, int], tuple[_Stored, _Stored | None]]] = {
    "dense": _dense,
    "fp8_block": _fp8_block,
    "mxfp4": _mxfp4,
}
"""For each weight format, a function that returns shape and dtype of an expert's weight and of its scales.

The dtype None means the model's dtype. Formats without scales return None for the scales.
"""
