"""Baselines of other projects for ``measure_families.py``: PyTorch, cuBLAS and cuDNN through PyTorch, and flash-linear-attention.

Each baseline is declared with `tokenspeed_kernel.workbench.benchmark.baseline`. The declared function is the baseline's setup for a
call, and is not timed. The setup prepares what an inference engine prepares once instead of at every call: contiguous operands,
int64 offsets, plans. The setup returns the function to time. The function is an `InForm` if its result has another form than the
operator's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import Unsupported, baseline
from tokenspeed_kernel_base.ops.gemm.operands import decode_operands
from tokenspeed_kernel_base.ops.sampling.philox import uniform

Call = Callable[[], Any]


@dataclass(frozen=True)
class InForm:
    """A call to time, and an untimed function that converts the call's result into the form that the operator returns."""

    call: Call
    form: Callable[[Any], Any]

    def __call__(self) -> Any:
        return self.call()


def refuse_unless(holds: bool, what: str) -> None:
    """Raises `Unsupported` unless the baseline supports the arguments. If a baseline ignored an argument, it would be timed with
    less work.

    Args:
        holds: whether the baseline supports the arguments.
        what: what the baseline is limited to, for the message.
    """
    if not holds:
        raise Unsupported(what)


# -- flash-linear-attention --------------------------------------------------------------------------------------------------------

_FLA = "flash-linear-attention"


def _delta_rule(g: Tensor, q: Tensor, of_head: str, of_channel: str) -> Callable[..., Any]:
    """Returns flash-linear-attention's function for the gates ``g``. ``of_head`` and ``of_channel`` are the functions' names for
    gates per head and per channel."""
    module, name = ("fla.ops.kda", of_channel) if g.dim() == q.dim() else ("fla.ops.gated_delta_rule", of_head)
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _gates(A_log: Tensor | None, dt_bias: Tensor | None, qk_l2norm: bool, scale: float | None) -> dict[str, Any]:
    refuse_unless(A_log is not None, "measured on gates that are computed within")
    bias = None if dt_bias is None else dt_bias.flatten()
    inside = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": qk_l2norm}
    return {**inside, "A_log": A_log, "dt_bias": bias, "scale": scale, "output_final_state": True}


@baseline("linear_attention.gated_delta_rule_prefill", name="fla", setup=True, package=_FLA)
def fla_prefill(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, cu_seqlens: Tensor, state_slots: Tensor,
    has_initial_state: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, qk_l2norm: bool, scale: float | None,
) -> Call:  # fmt: skip
    """fla has no state slots: it takes the initial states as an argument and returns the final ones."""
    refuse_unless(states.dtype == torch.float32, "it keeps states in float32")
    function = _delta_rule(g, q, "chunk_gated_delta_rule", "chunk_kda")
    operands = [x.contiguous().unsqueeze(0) for x in (q, k, v, g, beta)]
    first = states[state_slots.long()].clone()
    if has_initial_state is None:
        first.zero_()
    else:
        first[~has_initial_state] = 0
    options = {"initial_state": first, "cu_seqlens": cu_seqlens.long(), **_gates(A_log, dt_bias, qk_l2norm, scale)}
    return InForm(functools.partial(function, *operands, **options), lambda found: found[0].view(v.shape))


@baseline("linear_attention.gated_delta_rule_decode", name="fla", setup=True, package=_FLA)
def fla_decode(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, state_slots: Tensor,
    A_log: Tensor | None, dt_bias: Tensor | None, qk_l2norm: bool, scale: float | None,
) -> Call:  # fmt: skip
    """fla has no state slots: it takes the initial states as an argument and returns the final ones."""
    refuse_unless(states.dtype == torch.float32, "it keeps states in float32")
    function = _delta_rule(g, q, "fused_recurrent_gated_delta_rule", "fused_recurrent_kda")
    q, k, values, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    first, options = states[state_slots.long()].clone(), _gates(A_log, dt_bias, qk_l2norm, scale)
    call = functools.partial(function, q, k, values, g=g, beta=beta, initial_state=first, **options)
    return InForm(call, lambda found: found[0].view(v.shape))


@baseline("norm.rmsnorm_gated", name="fla", setup=True, package=_FLA)
def fla_rmsnorm_gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str, norm_before_gate: bool) -> Call:
    refuse_unless(norm_before_gate, "it gates what is normed already")
    function = importlib.import_module("fla.modules.norm.fused_norm_gate").rms_norm_gated
    named = {"silu": "swish"}.get(activation, activation)
    return functools.partial(function, x, gate.contiguous(), weight, None, activation=named, eps=eps)


# -- selection and sampling --------------------------------------------------------------------------------------------------------


def chosen_as_defined(scores: Tensor, lengths: Tensor, chosen: Tensor) -> Tensor:
    """Converts the positions that a baseline chose, in any order, into the result of `top_k_indices`.

    If several positions have the smallest chosen score, a baseline may choose other positions than the operator. If the scores at
    the baseline's positions are the largest scores, the result has the positions that the operator would choose. Negative
    positions, and positions whose score is -inf, become -1.
    """
    keys, top_k = scores.shape[1], chosen.shape[1]
    shown = scores.masked_fill(torch.arange(keys, device=scores.device) >= lengths.unsqueeze(1), -torch.inf)
    best = shown.sort(dim=1, descending=True, stable=True)
    values, at = best.values[:, :top_k], best.indices[:, :top_k]
    given = chosen.long()
    outside = (given < 0) | (given >= keys)
    found = shown.gather(1, given.masked_fill(outside, 0)).masked_fill(outside, -torch.inf)
    in_order = given.masked_fill(found == -torch.inf, keys).sort(dim=1).values
    twice = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < keys)
    if torch.equal(found.sort(1, descending=True).values, values) and not bool(twice.any()):
        in_order = torch.where(values == -torch.inf, keys, at).sort(dim=1).values
    return torch.where(in_order == keys, -1, in_order).int()


@baseline("attention.top_k_indices", name="torch.topk", setup=True)
def torch_topk(scores: Tensor, top_k: int, lengths: Tensor | None) -> Call:
    """torch.topk has no argument for lengths, so the setup overwrites the scores beyond each row's length with -inf."""
    ends = torch.full((len(scores),), scores.shape[1], device=scores.device) if lengths is None else lengths
    shown = scores.masked_fill(torch.arange(scores.shape[1], device=scores.device) >= ends.unsqueeze(1), -torch.inf)
    return InForm(lambda: shown.topk(top_k, dim=1, sorted=False), lambda found: chosen_as_defined(scores, ends, found.indices))


@baseline("sampling.sample_top_k_top_p", name="torch", setup=True)
def torch_sampling(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, offset: Tensor, out_dtype: torch.dtype
) -> Call:
    """Samples with several PyTorch functions from each row's top-k tokens. The random numbers are those that the operator
    specifies.
    """
    most, limited = int(top_k.max()), int(top_k.min()) > 0
    refuse_unless(limited and most <= 1024 and bool((temperature > 0).all()), "measured where all rows have a top-k")
    at, warmth, limit = uniform(seed, offset).unsqueeze(1), temperature.unsqueeze(1), top_p.unsqueeze(1)
    outside = torch.arange(most, device=logits.device) >= top_k.unsqueeze(1)

    def call() -> Tensor:
        best = logits.topk(most, dim=1)
        probs = (best.values.float() / warmth).masked_fill(outside, -torch.inf).softmax(1)
        before = probs.cumsum(1) - probs
        kept = torch.where(before < limit, probs, 0.0)
        # The operator accumulates probabilities in the order of token ids.
        tokens, order = best.indices.sort(dim=1)
        sums = kept.gather(1, order).cumsum(1)
        place = torch.searchsorted(sums, at * sums[:, -1:], right=True)
        return tokens.gather(1, place).squeeze(1).to(out_dtype)

    return call


@baseline("sampling.token_logprobs", name="torch", setup=True)
def torch_logprobs(logits: Tensor, tokens: Tensor, top_k: int) -> Call:
    refuse_unless(logits.dtype == torch.float32, "its order of equal logits, of which 16-bit formats have many, is not defined")
    given = tokens.long().unsqueeze(1)

    def call() -> tuple[Tensor, ...]:
        lse = logits.logsumexp(1, keepdim=True)
        top = logits.topk(top_k, dim=1)
        return (logits.gather(1, given) - lse).squeeze(1), top.values - lse, top.indices.int(), lse.squeeze(1)

    return call


@baseline("sampling.argmax_with_value", name="torch.max", setup=True)
def torch_max(logits: Tensor, first_token: int) -> Call:
    call = functools.partial(torch.max, logits, 1)
    return InForm(call, lambda found: (found.values.float(), (found.indices + first_token).int()))


# -- GEMMs -------------------------------------------------------------------------------------------------------------------------


@baseline("gemm.mm", name="cuBLAS, bfloat16", setup=True)
def bfloat16_gemm(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, alpha: Tensor | None) -> Call:
    """Multiplies the dequantised matrices in bfloat16. The setup dequantises them, so the timed call reads more bytes, but does not
    dequantise."""
    refuse_unless(a_scale is not None or b_scale is not None, "these are dense")
    wide_a, wide_b = decode_operands("mm", a, b, a_scale, b_scale)
    factor = 1.0 if alpha is None else float(alpha)
    left, right = wide_a.bfloat16(), (wide_b * factor).mT.contiguous().bfloat16().mT
    return functools.partial(torch.mm, left, right)


@baseline("gemm.mm", name="cuBLAS, fp8", setup=True)
def scaled_gemm(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out_dtype: torch.dtype | None) -> Call:
    """PyTorch's scaled fp8 GEMM, for the scales that it supports."""
    refuse_unless(
        a.dtype == b.dtype == torch.float8_e4m3fn and a_scale is not None and b_scale is not None, "for fp8 with scales only"
    )
    assert a_scale is not None
    assert b_scale is not None
    call = functools.partial(
        torch._scaled_mm, a, b, a_scale.mT.contiguous().mT, b_scale, out_dtype=out_dtype or torch.bfloat16, use_fast_accum=False
    )
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        raise Unsupported(f"PyTorch does not multiply these: {str(error).splitlines()[0][:120]}") from error
    return call


# -- scales, attention, caches -----------------------------------------------------------------------------------------------------


@baseline("quantization.swizzle_scales", name="torch", setup=True)
def torch_swizzle(scale: Tensor) -> Call:
    refuse_unless(scale.dim() == 2 and scale.shape[0] % 128 == 0 and scale.shape[1] % 4 == 0, "it pads nothing")
    bits = scale.view(torch.uint8)
    tiles = bits.view(scale.shape[0] // 128, 4, 32, scale.shape[1] // 4, 4)
    return InForm(tiles.permute(0, 3, 2, 1, 4).contiguous, lambda found: found.view(scale.dtype))


@baseline("quantization.unswizzle_scales", name="torch", setup=True)
def torch_unswizzle(scale: Tensor, rows: int, columns: int) -> Call:
    refuse_unless(scale.dim() == 5 and rows % 128 == 0 and columns % 4 == 0, "it drops no padding")
    bits = scale.view(torch.uint8)
    return InForm(bits.permute(0, 3, 2, 1, 4).contiguous, lambda found: found.view(rows, columns).view(scale.dtype))


@baseline("attention.mla_prefill", name="cuDNN", setup=True, package="nvidia-cudnn-cu13")
def cudnn_prefill(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, is_causal: bool, softmax_scale: float | None) -> Call:
    """Runs cuDNN's attention through PyTorch, as one batch: all sequences must have the same length."""
    lengths = cu_seqlens.diff().tolist()
    refuse_unless(len({*lengths}) == 1 and q.dtype == torch.bfloat16, "sequences of one length, in bfloat16")
    attention = importlib.import_module("torch.nn.attention")
    q, k, v = (x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2) for x in (q, k, v))

    def call() -> Tensor:
        with attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=softmax_scale)

    try:
        call()
    except RuntimeError as error:
        raise Unsupported(f"PyTorch does not give it these: {str(error).splitlines()[0][:120]}") from error
    return InForm(call, lambda found: found.transpose(1, 2).flatten(0, 1))


@baseline("kvcache.copy_kv_pages", name="torch", setup=True)
def torch_copy_pages(cache: Tensor, source_pages: Tensor, target_pages: Tensor, source: Tensor | None) -> Call:
    refuse_unless(cache.element_size() > 1, "PyTorch does not index fp8")
    there = (source_pages >= 0) & (target_pages >= 0)
    origin, at, to = cache if source is None else source, source_pages[there].long(), target_pages[there].long()
    return InForm(lambda: cache.index_copy_(0, to, origin.index_select(0, at)), lambda found: None)


@baseline("kvcache.zero_kv_pages", name="torch", setup=True)
def torch_zero_pages(cache: Tensor, pages: Tensor) -> Call:
    refuse_unless(cache.element_size() > 1, "PyTorch does not index fp8")
    at = pages[pages >= 0].long()
    return InForm(lambda: cache.index_fill_(0, at, 0), lambda found: None)
