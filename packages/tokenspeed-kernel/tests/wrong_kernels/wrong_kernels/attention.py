"""Attention kernels in plain PyTorch, each with one fault, which a `Fault` selects. Like GPU kernels, they read no values on the
host."""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Fault:
    window_edge: int = 0  # number of extra tokens that the window admits
    narrow_window: bool = False  # the window's size is computed in bytes in int32, which overflows
    lse_scale: float = 1.0
    sink_scaled: bool = False  # the sink is multiplied by the softmax scale, like scores
    widest_head: int = 1 << 20  # elements of a head beyond this number are ignored
    nan_where_nothing_is_seen: bool = False
    looks_up_every_page: bool = False


NONE = Fault()


def _softmax(scores, visible, values, sinks, dtype, fault, scale):
    """``scores`` and ``visible`` are [heads, queries, keys], ``values`` [heads, keys, v_head_dim]. Returns the output and the
    LSE."""
    scores = scores.masked_fill(~visible, -math.inf)
    if sinks is not None:
        sink = sinks.to(scores.dtype).view(-1, 1, 1) * (scale if fault.sink_scaled else 1.0)
        lse = torch.logsumexp(torch.cat((scores, sink.expand(-1, scores.shape[1], 1)), -1), -1, keepdim=True)
    else:
        lse = torch.logsumexp(scores, -1, keepdim=True)
    if not fault.nan_where_nothing_is_seen:
        weights = torch.where(visible, torch.exp(scores - lse), 0.0)
    else:
        weights = torch.exp(scores - lse)
    return (weights @ values).transpose(0, 1).to(dtype), lse.squeeze(-1).transpose(0, 1).float() * fault.lse_scale


def _finish(output, lse, return_lse, out):
    output = output.contiguous() if out is None else out.copy_(output)
    return (output, lse.contiguous()) if return_lse else output


def _wide(q):
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _prefill(fault, q, k, v, cu_seqlens, window_left, logit_cap, sinks, return_lse, softmax_scale, out):
    tokens, heads, head_dim = q.shape
    scale = softmax_scale or head_dim**-0.5
    q_wide, k_wide, v_wide = (x.to(_wide(q)).transpose(0, 1) for x in (q, k, v))
    groups = heads // k.shape[1]
    k_wide, v_wide = (x.repeat_interleave(groups, 0, output_size=heads) for x in (k_wide, v_wide))
    width = min(head_dim, fault.widest_head)
    scores = q_wide[..., :width] @ k_wide[..., :width].mT * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    index = torch.arange(tokens, device=q.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), index.int(), right=True)
    behind = index.view(-1, 1) - index
    visible = (sequence.view(-1, 1) == sequence) & (behind >= 0)
    if window_left >= 0:
        window = torch.tensor(window_left, dtype=torch.int32) * 4 // 4 if fault.narrow_window else window_left + fault.window_edge
        visible &= behind <= window
    output, lse = _softmax(scores, visible.expand(heads, -1, -1), v_wide, sinks, q.dtype, fault, scale)
    return _finish(output, lse, return_lse, out)


def _make_prefill(fault=NONE):
    def prefill(
        q, k, v, cu_seqlens, cu_seqlens_cpu, max_seqlen, window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale,
        k_scale, v_scale, out,
    ):  # fmt: skip
        return _prefill(fault, q, k, v, cu_seqlens, window_left, logit_cap, sinks, return_lse, softmax_scale, out)

    return prefill


right_prefill = _make_prefill()
wrong_mask_edge = _make_prefill(Fault(window_edge=1))
window_wraps = _make_prefill(Fault(narrow_window=True))
wrong_lse_base = _make_prefill(Fault(lse_scale=math.log2(math.e)))
wrong_sink = _make_prefill(Fault(sink_scaled=True))
lies_about_head_dim = _make_prefill(Fault(widest_head=256))


def hidden_sync(
    q, k, v, cu_seqlens, cu_seqlens_cpu, max_seqlen, window_left, logit_cap, sinks, return_lse, softmax_scale, q_scale, k_scale,
    v_scale, out,
):  # fmt: skip
    """Reads the longest sequence's length on the host, and ignores a window that is longer."""
    longest = int(cu_seqlens.diff().max()) if len(cu_seqlens) > 1 else 0
    window = -1 if window_left >= longest else window_left
    return _prefill(NONE, q, k, v, cu_seqlens, window, logit_cap, sinks, return_lse, softmax_scale, out)


def _make_decode(fault=NONE):
    def decode(
        q, k_cache, v_cache, page_table, cache_seqlens, max_seqlen_k, max_seqlen_q, window_left, logit_cap, sinks, return_lse,
        softmax_scale, q_scale, k_scale, v_scale, out,
    ):  # fmt: skip
        heads, head_dim = q.shape[1:]
        scale = softmax_scale or head_dim**-0.5
        page_size, kv_heads = k_cache.shape[1:3]
        positions = torch.arange(page_table.shape[1] * page_size, device=q.device)
        outputs, lses = [], []
        for b in range(len(cache_seqlens)):
            length = cache_seqlens[b]
            entries = page_table[b]
            # Pages with a negative entry are outside of the window.
            kept = (entries >= 0).repeat_interleave(page_size, output_size=len(positions))
            if not fault.looks_up_every_page:
                reached = torch.arange(0, len(positions), page_size, device=q.device) < length
                entries = torch.where(reached & (entries >= 0), entries, 0)
            held = ((positions < length) & kept).view(-1, 1, 1)
            keys, values = (
                torch.where(held, cache[entries.long()].flatten(0, 1).to(_wide(q)), 0).transpose(0, 1)
                for cache in (k_cache, v_cache)
            )
            groups = heads // kv_heads
            keys, values = (x.repeat_interleave(groups, 0, output_size=heads) for x in (keys, values))
            queries = q[b * max_seqlen_q : (b + 1) * max_seqlen_q].to(_wide(q)).transpose(0, 1)
            scores = queries @ keys.mT * scale
            if logit_cap > 0:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            behind = (length - max_seqlen_q + torch.arange(max_seqlen_q, device=q.device)).view(-1, 1) - positions
            visible = (behind >= 0) & held.view(-1)
            if window_left >= 0:
                visible &= behind <= window_left
            output, lse = _softmax(scores, visible.expand(heads, -1, -1), values, sinks, q.dtype, fault, scale)
            outputs.append(output)
            lses.append(lse)
        if not outputs:
            outputs, lses = [q.new_empty(0, heads, v_cache.shape[3])], [q.new_empty(0, heads, dtype=torch.float32)]
        return _finish(torch.cat(outputs), torch.cat(lses), return_lse, out)

    return decode


right_decode = _make_decode()
nan_on_empty = _make_decode(Fault(nan_where_nothing_is_seen=True))
reads_past_page_table = _make_decode(Fault(looks_up_every_page=True))
