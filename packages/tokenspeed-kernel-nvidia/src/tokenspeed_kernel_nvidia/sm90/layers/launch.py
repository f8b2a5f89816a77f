"""`decoder_layers` on Hopper: the layers of a decode step of few tokens in one persistent launch.

For each layer the kernel normalises, computes queries, keys and values, rotates queries and keys, writes the cache, computes
attention, adds the output projection to the layer's input, normalises, routes, runs the mxfp4 experts, and adds their weighted sum.
Weights of all these steps pass through one ring buffer per SM, so the producer need not stop between steps.

The kernel reads the experts' weights in the layout of `mxfp4.layout`, which `moe_apply` reads too. The first call copies the
weights of qkv and of the projection to the layout of `layout`. The copies take 1.9 GB for the 36 layers of GPT-OSS-120B, or 0.95 GB
if these weights are fp8. Each pair of weights and caches has a table of addresses, which takes 4 KB for 36 layers. Each stream,
each captured launch and each number of tokens has its own scratch memory, of about 2 MB for GPT-OSS-120B.

Forward progress. CTAs wait for one another, so all CTAs of a launch must run at once, see `kernel_device`. The launch is
cooperative: the driver starts either all CTAs or none. So a launch waits while kernels of other streams occupy SMs, for example
another launch of this kernel. It never occupies some SMs while it waits for others.

If the weights have a group of two ranks, each rank launches the kernel for its shard. The kernel computes a layer's two sums over
ranks, see `exchange_device`: the ranks' GPUs write to one another's memory over NVLink. A rank waits for the other rank at most
`ProcessGroup.peer_time_limit_s`; after that the results are NaN. Launches of a group share scratch memory, so they must be ordered,
as for every operator between ranks. A sum over ranks is rounded once, after the residual stream has been added.

Rounding is otherwise as in `rmsnorm`, `mm`, `apply_rope`, `rmsnorm_moe_topk` and `moe_apply`. Results have the same bits in every
run.

With up to four tokens the kernel is faster than separate kernels, and the selector prefers it. With eight tokens it is slower. So
with five to eight tokens it is selected only if a caller names it. `benchmarks/h200_persistent.json` has the times on an H200.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed_kernel_base.alignment import aligned_cache
from tokenspeed_kernel_base.ops.comm.group import ProcessGroup
from tokenspeed_kernel_base.ops.decoder.weights import DecoderLayer, DecoderWeights
from tokenspeed_kernel_base.ops.moe.plan import MoEPlan
from tokenspeed_kernel_base.ops.quantization.formats import fp8_format, mxfp4_format
from tokenspeed_kernel_base.registry import register_kernel
from tokenspeed_kernel_base.signature import dense_tensor_format, format_signature
from tokenspeed_kernel_base.spec import Priority
from tokenspeed_kernel_base.traits import at_most, between, multiple_of
from tokenspeed_kernel_base.workspace import Keeper
from tokenspeed_kernel_nvidia._machine import sm_count_of
from tokenspeed_kernel_nvidia._programs import program
from tokenspeed_kernel_nvidia.capability import CUTEDSL_HOPPER, with_sms
from tokenspeed_kernel_nvidia.cutedsl.launch import LOG2_E
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.layout import LAYOUT, panels_of
from tokenspeed_kernel_nvidia.cutedsl.mxfp4.weights import prepare_weights
from tokenspeed_kernel_nvidia.sm90.layers.config import (
    CHUNK_BYTES,
    EVENTS,
    EXPERTS,
    GROUP_HEADS,
    HEAD_DIM,
    HEAD_WORDS,
    HIDDEN,
    KEYS,
    KV_HEADS,
    LAYER_COUNTERS,
    LEAST_CTAS,
    MOST_LAYERS,
    PAIRS,
    PARTIAL_WORDS,
    PREFERRED,
    RANKS,
    ROUTER_BYTES,
    SPLITS,
    TOKENS,
    WIDTH,
    Config,
    Dense,
    every_config,
    served_config,
    usual_configs,
)
from tokenspeed_kernel_nvidia.sm90.layers.layout import arranged
from tokenspeed_kernel_nvidia.sm90.moe.moe_apply import ACCURACY
from tokenspeed_kernel_nvidia.sm90.moe.stream.config import MMA_WARPS
from tokenspeed_kernel_nvidia.sm90.target import ARCH

_EVERY_KEY = 1 << 30  # the window of layers without a window: more keys than any sequence has
_POLLS_PER_S = 2_000_000  # a poll takes about 0.5 us
POLLS = 2 * _POLLS_PER_S  # polls until a wait gives up, after about two seconds
_MOST_POLLS = (1 << 31) - 1  # the kernel counts polls in int32
_ALIGNMENT = 128  # alignment of the parts of the scratch memory, in bytes
_CAPTURES = 4  # captured launches whose scratch memory is zeroed in advance
_E4M3 = torch.float8_e4m3fn
_ROWS = 16  # the least rows of dense weights per CTA: with fewer, the launch has fewer CTAs than SMs


@program(arch=ARCH, configs=every_config, usual=usual_configs)
def persistent_program(config: Config) -> tuple[Any, tuple[Any, ...]]:
    from tokenspeed_kernel_nvidia.sm90.layers import kernel_device, trace_device

    host = trace_device.host if config.trace else kernel_device.host
    return host(config), kernel_device.fake_arguments(config)


class Step(NamedTuple):
    """The tensors of one decode step.

    Attributes:
        lengths: int32 ``[tokens]``: the length of each token's sequence. The token itself is the last of the sequence.
        pages: int32 ``[tokens, most pages]``: the page table, with the pages of each sequence.
        slots: int32 or int64 ``[tokens]``: the slot mapping, ``page * page_size + offset`` of each token's key and value; a token
            with a negative slot is not stored.
        angles: cosines and sines of the rotary embedding, float32 ``[positions, 64]``.
    """

    lengths: Tensor
    pages: Tensor
    slots: Tensor
    angles: Tensor


class Launch(NamedTuple):
    """A compiled kernel and the arguments that all launches for the same sizes share.

    Attributes:
        program: the compiled kernel.
        ctas: the number of CTAs.
        offsets: the offsets of the parts of the scratch memory, in bytes. The first part has the counters.
        nbytes: the bytes of the scratch memory. It must be zero before its first launch. Launches leave tags in it, so only
            launches for the same sizes may use it, one after another.
        numbers, attention: sizes and options for the kernel.
    """

    program: Callable[..., Any]
    ctas: int
    offsets: tuple[int, ...]
    nbytes: int
    numbers: tuple[Any, ...]
    attention: tuple[Any, ...]

    def __call__(
        self, x: Tensor, out: Tensor, table: Tensor, memory_at: int, cache: Tensor, step: Step, rank: int = 0, others_at: int = 0
    ) -> None:
        """Launches the kernel on the current stream.

        Args:
            x: bfloat16 ``[tokens, hidden]``, contiguous and 16-byte aligned: the first layer's input.
            out: bfloat16 ``[layers, tokens, hidden]``, likewise; receives each layer's output, which is the next layer's input. If
                several ranks share the layers, receives only the last layer's output.
            table: the table of layers, see `table_of`.
            memory_at: the address of the scratch memory.
            cache: a layer's key cache. All caches have its strides.
            step: the tensors of the step.
            rank: this GPU's rank among those that share the layers.
            others_at: the address of int64 ``[ranks - 1]``, from `distances`.
        """
        head, outputs, totals, logits, activated, slots, sent, qkv, partials, attended = (memory_at + each for each in self.offsets)
        lengths, pages, slots_of_keys, angles = step
        self.program(
            x, out, table.data_ptr(), head, outputs, totals, logits, activated, slots, sent, *self.numbers, qkv, partials, attended,
            lengths.data_ptr(), pages.data_ptr(), slots_of_keys.data_ptr(), angles.data_ptr(), *cache.stride()[:3],
            pages.stride(0), slots_of_keys.element_size() // 4, angles.stride(0), cache.shape[1], *self.attention, rank, others_at,
        )  # fmt: skip


@functools.cache
def launch_of(
    plan: MoEPlan,
    layers: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    ctas: int,
    config: Config,
    eps: float,
    scale: float = HEAD_DIM**-0.5,
    polls: int = POLLS,
) -> Launch:
    """Returns the launch for some sizes. Raises ValueError for sizes that the kernel does not support."""
    _check(plan, layers, tokens, heads, kv_heads, ctas, config)
    hidden, pairs, width = plan.hidden_size, tokens * plan.top_k, heads * HEAD_DIM
    summed = 4 * config.ranks * tokens * hidden  # bytes of a sum over ranks
    split_bits = split_bits_of(tokens, kv_heads, ctas)
    # The trace follows the counters.
    head = 4 * (HEAD_WORDS + (MOST_LAYERS + 1) * LAYER_COUNTERS) + 8 * config.trace * ctas * (layers + 1) * len(EVENTS)
    sizes = (
        head, summed, summed, 4 * tokens * plan.num_experts, 4 * pairs * plan.intermediate_size,
        8 * pairs * hidden, 2 * ctas * config.sent_bytes, 4 * tokens * (heads + 2 * kv_heads) * HEAD_DIM,
        8 * (tokens * heads << split_bits) * PARTIAL_WORDS, 4 * tokens * width,
    )  # fmt: skip
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    limit = math.inf if plan.limit is None else plan.limit
    sized = width, plan.num_experts, plan.intermediate_size, plan.top_k, ctas
    return Launch(
        persistent_program(config), ctas, tuple(offsets[:-1]), offsets[-1], (*sized, polls, eps, plan.alpha, limit, plan.beta),
        (kv_heads, heads // kv_heads, split_bits, scale * LOG2_E),
    )  # fmt: skip


def distances(memory_at: int, others: Sequence[int], device: torch.device) -> Tensor:
    """Returns for each other rank the distance from an address in this rank's scratch memory to the same place in the other rank's:
    int64 ``[ranks - 1]``, on the device.

    Args:
        memory_at: the address of this rank's scratch memory.
        others: the addresses of the other ranks' scratch memory.
    """
    return torch.tensor([other - memory_at for other in others], dtype=torch.int64, device=device)


def copies_of(layers: Sequence[DecoderLayer], ctas: int) -> list[tuple[Tensor, Tensor]]:
    """Returns copies of each layer's weights of qkv and of the projection, in the layout of `layout`."""
    return [
        (arranged(layer.qkv, ctas, layer.qkv_scale), arranged(layer.projection, ctas, layer.projection_scale)) for layer in layers
    ]


def dense_of(layer: DecoderLayer) -> Dense:
    """Returns the format of a layer's weights of qkv and of the projection."""
    return "float8_e4m3fn" if layer.qkv.dtype == _E4M3 else "bfloat16"


def table_of(
    layers: Sequence[DecoderLayer], copies: Sequence[tuple[Tensor, Tensor]], caches: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Returns the table of layers: for each layer the addresses of its weights and caches, and its window. int64, on the device.

    Args:
        copies: from `copies_of`.
        caches: each layer's keys and values.
    """
    rows = []
    for layer, (qkv, projection), cache in zip(layers, copies, caches, strict=True):
        before = (layer.input_norm, qkv, layer.qkv_bias, layer.sinks, *cache)
        dense = (projection, layer.projection_bias, layer.norm, layer.router, layer.router_bias)
        after = (*dense, layer.experts.w13_weight, layer.experts.w2_weight)
        window = _EVERY_KEY if layer.window_left < 0 else layer.window_left + 1
        rows.append([*map(_address, before), window, *map(_address, after)])
    return torch.tensor(rows, dtype=torch.int64, device=layers[0].qkv.device)


def _address(tensor: Tensor | None) -> int:
    assert tensor is not None  # `check_layer` has checked this
    address: int = tensor.data_ptr()
    return address


# -- the operator --------------------------------------------------------------------------------------------------------------

# The tables of layers of each object of weights, by the caches' addresses, the caches' pitch between layers, and the number of
# CTAs. A graph may use a table as long as the weights live, so a table is dropped only with its weights.
_tables: weakref.WeakKeyDictionary[DecoderWeights, dict[tuple[int, ...], Tensor]] = weakref.WeakKeyDictionary()
# The copies of `copies_of`, by the number of CTAs.
_copies: weakref.WeakKeyDictionary[DecoderWeights, dict[int, list[tuple[Tensor, Tensor]]]] = weakref.WeakKeyDictionary()


# The tensors of `distances`, by the address of a rank's memory.
_distances: weakref.WeakKeyDictionary[ProcessGroup, dict[int, Tensor]] = weakref.WeakKeyDictionary()


@functools.cache
def _keeper_of(offsets: tuple[int, ...], nbytes: int) -> Keeper:
    """Returns the keeper of the scratch memory for launches with these sizes. Launches leave tags in this memory, which the next
    launch needs, so the memory is not shared with other sizes. A capture takes memory that was zeroed before; only if `_CAPTURES`
    captures have used it up does each replay zero its memory."""
    return Keeper(arena=_CAPTURES * nbytes // 4)  # in 32-bit words


def _kept_table(weights: DecoderWeights, k_cache: Tensor, v_cache: Tensor, ctas: int) -> Tensor:
    key = k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), ctas
    tables = _tables.setdefault(weights, {})
    found = tables.get(key)
    if found is None:
        if k_cache.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "decoder_layers: call the kernel once with these weights and caches before a graph is captured: it needs copies of "
                "weights, and a table of addresses on the device"
            )
        for index, layer in enumerate(weights.layers):
            check_layer(index, layer)
        copies = _copies.setdefault(weights, {})
        if ctas not in copies:
            copies[ctas] = copies_of(weights.layers, ctas)
        found = tables[key] = table_of(weights.layers, copies[ctas], list(zip(k_cache, v_cache, strict=True)))
    return found


def _shared_memory(group: ProcessGroup, launch: Launch, x: Tensor) -> tuple[int, int, int]:
    """Returns the address of a rank's scratch memory for launches with these sizes, the rank, and the address of the `distances` to
    the other ranks' memory. All launches of the group with these sizes use the same memory, one after another, in graphs too."""
    group.check_agreement("decoder_layers", x=x, nbytes=launch.nbytes, ctas=launch.ctas)
    shared = group.shared_words(f"decoder_layers, {len(x)} tokens", launch.nbytes // 4)
    own = shared.addresses[group.rank]
    known = _distances.setdefault(group, {})
    if own not in known:
        others = [each for rank, each in enumerate(shared.addresses) if rank != group.rank]
        known[own] = distances(own, others, x.device)
    return own, group.rank, known[own].data_ptr()


def ctas_of(plan: MoEPlan, tokens: int, heads: int, kv_heads: int, sms: int) -> int:
    """Returns the number of CTAs: one per SM, or fewer for small sizes. There are enough CTAs if one has `_ROWS` rows of dense
    weights, one panel of w13, one expert of the router, and one token and key head."""
    rows = max(plan.hidden_size, (heads + 2 * kv_heads) * HEAD_DIM)
    panels = tokens * plan.top_k * panels_of(2 * plan.intermediate_size)
    return min(sms, max(-(-rows // _ROWS), panels, plan.num_experts, tokens * kv_heads))


def decoder_layers(
    x: Tensor,
    weights: DecoderWeights,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    plan: MoEPlan,
    eps: float,
    out: Tensor | None,
) -> Tensor:
    """Launches the kernel on arguments that the operator has checked; see `tokenspeed_kernel.decoder_layers`.

    The outputs of all layers are allocated at once, and the result is the last one.
    """
    tokens, hidden = x.shape
    if not tokens:
        return x.new_empty(x.shape) if out is None else out
    layers, device, kv_heads = len(weights.layers), x.get_device(), k_cache.shape[3]
    page_size, head_dim = k_cache.shape[2], k_cache.shape[4]
    heads = weights.layers[0].projection.shape[1] // head_dim
    check_pages(page_size, head_dim)
    group = weights.group
    config = served_config(min(tokens, max(TOKENS)), dense_of(weights.layers[0]), weights.world_size)
    ctas = ctas_of(plan, tokens, heads, kv_heads, sm_count_of(device))
    polls = POLLS if group is None else min(int(group.peer_time_limit_s * _POLLS_PER_S), _MOST_POLLS)
    launch = launch_of(plan, layers, tokens, heads, kv_heads, ctas, config, eps, polls=polls)
    keys, values = aligned_cache(k_cache, "k_cache"), aligned_cache(v_cache, "v_cache")
    if keys.stride() != values.stride():
        keys, values = (each.clone(memory_format=torch.contiguous_format) for each in (k_cache, v_cache))
    table = _kept_table(weights, keys, values, ctas)
    stream = 0 if device < 0 else torch._C._cuda_getCurrentRawStream(device)
    if group is None:
        memory = _keeper_of(launch.offsets, launch.nbytes).get(device, stream, 0, launch.nbytes // 4)
        memory_at, rank, others_at = memory.counters_at, 0, 0
    else:
        memory_at, rank, others_at = _shared_memory(group, launch, x)
    # Copies must live until the launch.
    rows = x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    pages = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    angles = cos_sin_cache if cos_sin_cache.stride(1) == 1 else cos_sin_cache.contiguous()
    step = Step(cache_seqlens.contiguous(), pages, slot_mapping.contiguous(), angles)
    outputs = x.new_empty(layers, tokens, hidden)
    launch(rows, outputs, table, memory_at, keys[0], step, rank, others_at)
    for given, used in ((k_cache, keys), (v_cache, values)):
        if used is not given:
            given.copy_(used)
    return outputs[-1] if out is None else out.copy_(outputs[-1])


def check_pages(page_size: int, head_dim: int) -> None:
    if page_size % KEYS or head_dim != HEAD_DIM:
        raise ValueError(f"persistent layers: pages must be a multiple of {KEYS} by 64, got {page_size} by {head_dim}")


def check_layer(index: int, layer: DecoderLayer) -> None:
    """Raises ValueError for weights that the kernel does not support. A caller may call the launcher directly, and then the
    selector has not checked the declared traits."""
    if layer.experts.layout != LAYOUT:
        raise ValueError(f"persistent layers: experts must have the layout {LAYOUT!r}, got {layer.experts.layout!r}")
    for name in ("qkv_bias", "projection_bias", "sinks", "router_bias"):
        if getattr(layer, name) is None:
            raise ValueError(f"persistent layers: layers[{index}].{name} must be given, got None")
    for name in ("qkv", "projection"):
        weight, scale = getattr(layer, name), getattr(layer, f"{name}_scale")
        wanted = _E4M3 if dense_of(layer) == "float8_e4m3fn" else torch.bfloat16
        if weight.dtype != wanted:
            raise ValueError(f"persistent layers: layers[{index}].{name} must be {wanted}, got {weight.dtype}")
        shape = (len(weight), 1) if wanted == _E4M3 else None
        if (None if scale is None else scale.shape) != shape:
            raise ValueError(f"persistent layers: layers[{index}].{name}_scale must have the shape {shape}, got {scale}")


_BF16, _MXFP4 = dense_tensor_format(torch.bfloat16), mxfp4_format()
# Each format of dense weights has two kernels with this launcher. The first, for few tokens, is faster than separate kernels. The
# second is slower, so the composed kernel has a higher priority. A row of fp8 weights is divided into chunks, so its length must be
# a multiple of a chunk's.
for (_name, _dense, _hidden), (_suffix, _tokens, _priority) in itertools.product(
    (
        ("cutedsl_decoder_layers", _BF16, at_most(HIDDEN)),
        ("cutedsl_decoder_layers_fp8_weights", fp8_format(_E4M3, "channel"), at_most(HIDDEN) & multiple_of(CHUNK_BYTES)),
    ),
    (("", between(1, PREFERRED), Priority.SPECIALIZED), ("_few", between(PREFERRED + 1, max(TOKENS)), Priority.COMPOSED - 1)),
):
    register_kernel(
        "decoder",
        "decoder_layers",
        name=_name + _suffix,
        solution="cutedsl",
        capability=with_sms(CUTEDSL_HOPPER, LEAST_CTAS),
        signatures={format_signature(x=_BF16, w13=_MXFP4, w2=_MXFP4, k_cache=_BF16, qkv=_dense, projection=_dense)},
        traits={
            "tokens": _tokens,
            "layers": at_most(MOST_LAYERS),
            "kv_heads": at_most(KV_HEADS),
            "gqa_ratio": at_most(GROUP_HEADS),
            "head_dim": HEAD_DIM,
            "rotary_dim": HEAD_DIM,
            "page_size": multiple_of(KEYS),
            "sliding_window": any,
            "sinks": {True},
            "attention_bias": {True},
            "router_bias": {True},
            "over_ranks": any,
            "world_size": set(RANKS),
            "link": {"one rank", "nvlink, no multicast", "nvlink, multicast not used", "host memory"},
            "weight_layout": LAYOUT,
            "processed_weights": True,
            "activation": "swiglu",
            "num_experts": at_most(EXPERTS) & multiple_of(4),
            "top_k": at_most(PAIRS // max(TOKENS)),
            "hidden_size": _hidden,
            "intermediate_size": at_most(HIDDEN),
            "bias": any,
            "w13_interleaved": any,
            "swiglu_limit": any,
            "swiglu_alpha_beta": any,
        },
        priority=_priority,
        tags={"determinism"},
        accuracy=ACCURACY,
        weight_preprocessor=prepare_weights,
    )(decoder_layers)


def split_bits_of(tokens: int, kv_heads: int, ctas: int) -> int:
    """Returns the base-2 logarithm of the number of splits, that is, of CTAs that share the keys of a token and a key head: the
    largest for which there are enough CTAs, and at most that of `SPLITS`."""
    return min(ctas // (tokens * kv_heads), SPLITS).bit_length() - 1


def _check(plan: MoEPlan, layers: int, tokens: int, heads: int, kv_heads: int, ctas: int, config: Config) -> None:
    """Raises ValueError for sizes that the kernel does not support."""
    hidden, experts = plan.hidden_size, plan.num_experts
    qkv_rows = (heads + 2 * kv_heads) * HEAD_DIM
    most = {
        "layers": (layers, MOST_LAYERS),
        "tokens": (tokens, config.tokens),
        "heads * 64": (heads * HEAD_DIM, WIDTH),
        "heads of a key head": (heads // kv_heads, GROUP_HEADS),
        "tokens * kv_heads": (tokens * kv_heads, ctas),
        "hidden_size": (hidden, HIDDEN),
        "intermediate_size": (plan.intermediate_size, HIDDEN),
        "num_experts": (experts, EXPERTS),
        "tokens * top_k": (tokens * plan.top_k, PAIRS),
        "rows of qkv on a CTA": (-(-qkv_rows // ctas), config.rows_of_cta),
        "tokens * rows of qkv on a CTA": (tokens * -(-qkv_rows // ctas), 32 * MMA_WARPS),
        "rows of the projection on a CTA": (-(-hidden // ctas), config.rows_of_cta),
        "tokens * rows of the projection on a CTA": (tokens * -(-hidden // ctas), 32 * MMA_WARPS),
        "experts of a CTA": (-(-experts // ctas), config.rows_of_cta),
        "bytes of the router on a CTA": (-(-experts // ctas) * hidden * 2, ROUTER_BYTES),
    }
    for name, (size, limit) in most.items():
        if size > limit:
            raise ValueError(f"persistent layers: {name} must be at most {limit}, got {size}")
    chunk = CHUNK_BYTES // config.dense_bytes  # elements of a chunk
    for name, size, factor in (("heads", heads, kv_heads), ("num_experts", experts, 4), ("hidden_size", hidden, chunk)):
        if size % factor:
            raise ValueError(f"persistent layers: {name} must be a multiple of {factor}, got {size}")
