"""Tests our backends with vLLM's layer of latent attention, its metadata and its prefill. Results are compared with plain PyTorch.

On a CPU, PyTorch replaces vLLM's operators that need a GPU: the gather of cached latents, and the merge of chunks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
core = pytest.importorskip("tokenspeed_kernel", reason="on a CPU the reference of the core attends")

from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import tokenspeed_kernel_vllm
from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_vllm import parts
from tokenspeed_kernel_vllm.attention.serving import Answer
from tokenspeed_kernel_vllm.mla import serving
from tokenspeed_kernel_vllm.mla.backend import LatentBackend
from tokenspeed_kernel_vllm.mla.builder import SHORT
from tokenspeed_kernel_vllm.mla.prefill import LatentPrefill
from tokenspeed_kernel_vllm.mla.serving import find_latent, find_prefill

HEADS, NOPE, ROPE, V_DIM, RANK, BLOCK = 4, 24, 64, 32, 256, 16
SCALE, K_SCALE = 0.1, 0.02
WORKSPACE = 96  # cached tokens per chunk of a prompt's context: 6 pages


@pytest.fixture
def latent(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Registers our backends, and gives vLLM a model with latent attention. Chunks of the context are small."""
    monkeypatch.setenv("TOKENSPEED_VLLM_MLA", "1")
    find_latent.cache_clear()
    find_prefill.cache_clear()
    model = SimpleNamespace(
        dtype=torch.bfloat16, max_model_len=1024, get_head_size=lambda: RANK + ROPE, get_num_attention_heads=lambda _: HEADS
    )
    sizes = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_DIM, "kv_lora_rank": RANK, "q_lora_rank": None}
    model.hf_text_config = SimpleNamespace(**sizes)
    one_process.cache_config.block_size = BLOCK
    one_process.attention_config.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM
    builder = mla_attention.MLACommonMetadataBuilder
    monkeypatch.setattr(builder, "determine_chunked_prefill_workspace_size", staticmethod(lambda _: WORKSPACE))
    monkeypatch.setattr(mla_attention.ops, "gather_and_maybe_dequant_cache", gather)
    monkeypatch.setattr(mla_attention, "merge_attn_states", merge)
    monkeypatch.setattr(mla_attention, "mask_empty_context", nothing_to_mask, raising=False)
    monkeypatch.setattr(mla_attention, "torch", Unpinned())
    monkeypatch.setattr("vllm.utils.torch_utils.PIN_MEMORY", False, raising=False)
    for registry in (AttentionBackendEnum, MLAPrefillBackendEnum):
        registry.CUSTOM.clear_override()
    tokenspeed_kernel_vllm.register()
    # vLLM's selectors read the model's configuration, which needs a checkpoint's files.
    monkeypatch.setattr(mla_attention, "get_mla_prefill_backend", lambda _: MLAPrefillBackendEnum.CUSTOM.get_class())
    with monkeypatch.context() as patch:
        patch.setattr(one_process, "model_config", model)
        yield one_process
    for registry in (AttentionBackendEnum, MLAPrefillBackendEnum):
        registry.CUSTOM.clear_override()


class Unpinned:
    """PyTorch without pinned memory, which needs a GPU."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in ("empty", "tensor", "zeros"):
            return value
        return lambda *args, pin_memory=False, **options: value(*args, **options)


def gather(
    src_cache: Tensor, dst: Tensor, block_table: Tensor, cu_seq_lens: Tensor, scale: Tensor, seq_starts: Tensor, **_: Any
) -> None:
    """Copies tokens of each request, from its start on, to a contiguous buffer, like vLLM's operator."""
    factor = float(scale) if src_cache.dtype == torch.float8_e4m3fn else 1.0
    for row, (begin, end) in enumerate(itertools.pairwise(cu_seq_lens.tolist())):
        at = torch.arange(end - begin) + int(seq_starts[row])
        pages = block_table[row][at // BLOCK].long()
        dst[begin:end] = (src_cache[pages, at % BLOCK].float() * factor).to(dst.dtype)


def nothing_to_mask(lse: Tensor, output: Tensor, query_start_loc: Tensor, cu_seq_lens: Tensor) -> None:
    """Replaces vLLM 0.26's mask of requests without tokens in a chunk, whose outputs other kernels leave undefined. Checks that our
    kernels have already set these outputs.
    """
    spans = zip(itertools.pairwise(query_start_loc.tolist()), itertools.pairwise(cu_seq_lens.tolist()), strict=True)
    for (begin, end), (first, last) in spans:
        if first == last:
            assert (lse[:, begin:end] == -torch.inf).all()
            assert (output[begin:end] == 0).all()


def merge(
    output: Tensor,
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    output_lse: Any = None,
    **_: Any,
) -> None:
    """Merges attention over two sets of keys by their log-sum-exps ``[heads, tokens]``, like vLLM's operator."""
    assert prefix_lse.shape == suffix_lse.shape == prefix_output.shape[1::-1]
    total = torch.logaddexp(prefix_lse, suffix_lse)
    shares = ((lse - total).exp().t().unsqueeze(-1) for lse in (prefix_lse, suffix_lse))
    merged = sum(share * part.float() for share, part in zip(shares, (prefix_output, suffix_output), strict=True))
    output.copy_(merged)
    if output_lse is not None:
        output_lse.copy_(total)


def make_layer(name: str = "model.layers.0.self_attn.attn", **options: Any) -> Any:
    """Returns vLLM's layer of latent attention with random expansions of keys and values."""
    from vllm.config import get_current_vllm_config

    expand = ColumnParallelLinear(RANK, HEADS * (NOPE + V_DIM), bias=False, prefix=f"{name}.kv_b_proj")
    draw = torch.Generator().manual_seed(2)
    expand.weight.data.copy_(torch.randn(expand.weight.shape, generator=draw) * RANK**-0.5)
    layer = mla_attention.MLAAttention(
        HEADS,
        SCALE,
        NOPE,
        ROPE,
        V_DIM,
        None,
        RANK,
        expand,
        cache_config=get_current_vllm_config().cache_config,
        prefix=name,
        attn_backend=AttentionBackendEnum.CUSTOM.get_class(),
        **options,
    )
    layer.process_weights_after_loading(torch.bfloat16)
    layer._k_scale.fill_(K_SCALE if layer.impl.fp8 else 1.0)
    return layer


def make_builder(config: Any, layer: Any) -> Any:
    spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=RANK + ROPE, dtype=torch.bfloat16)
    return LatentBackend.get_builder_cls()(spec, [layer.layer_name], config, torch.device("cpu"))


@dataclasses.dataclass
class Batch:
    """One step: the runner's metadata, the queries, and each request's latents and rotary parts, new ones last."""

    common: CommonAttentionMetadata
    query: Tensor
    new: tuple[Tensor, Tensor]
    latents: list[Tensor]
    query_lens: Sequence[int]


def make_batch(layer: Any, seq_lens: Sequence[int], query_lens: Sequence[int], padding: int = 0) -> Batch:
    """Returns a batch of requests whose earlier tokens are in the layer's cache. The rest of the cache is NaN.

    Args:
        layer: the layer.
        seq_lens, query_lens: number of all tokens and of new tokens of each request.
        padding: number of padding requests of a captured decode batch, which have a row each.
    """
    draw = torch.Generator().manual_seed(len(seq_lens))
    counts = [-(-length // BLOCK) for length in seq_lens]
    cache = torch.full(
        (sum(counts) + 2, BLOCK, RANK + ROPE), torch.nan, dtype=layer.impl.fp8_dtype if layer.impl.fp8 else torch.bfloat16
    )
    free = iter((torch.randperm(sum(counts), generator=draw) + 1).tolist())  # vLLM keeps block 0 for padding
    table = torch.zeros(len(seq_lens) + padding, max(counts) + 1, dtype=torch.int32)
    latents, slots, fresh = [], [], []
    for request, (length, new) in enumerate(zip(seq_lens, query_lens, strict=True)):
        table[request, : counts[request]] = torch.tensor([next(free) for _ in range(counts[request])])
        tokens = torch.randn(length, RANK + ROPE, generator=draw).bfloat16()
        at = torch.arange(length)
        slot = table[request][at // BLOCK].long() * BLOCK + at % BLOCK
        old = slot[: length - new]
        wide = tokens[: length - new].float() / (K_SCALE if layer.impl.fp8 else 1.0)
        cache.view(-1, RANK + ROPE)[old] = wide.clamp(-448, 448).to(cache.dtype)
        latents.append(tokens)
        slots.append(slot[length - new :])
        fresh.append(tokens[length - new :])
    layer.kv_cache = cache.view(torch.uint8) if layer.impl.fp8 else cache
    tokens, rows = sum(query_lens), sum(query_lens) + padding
    offsets = torch.tensor([0, *itertools.accumulate(query_lens), *[tokens] * padding], dtype=torch.int32)
    lengths = torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets.clone(),
        seq_lens=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=rows,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]),
        seq_lens_cpu_upper_bound=lengths.clone(),
    )
    both = torch.cat([*fresh, torch.zeros(padding, RANK + ROPE, dtype=torch.bfloat16)])
    query = torch.randn(rows, HEADS, NOPE + ROPE, generator=draw).bfloat16()
    return Batch(common, query, both.split([RANK, ROPE], -1), latents, query_lens)


def run(config: Any, layer: Any, metadata: Any, batch: Batch) -> Tensor:
    """Runs vLLM's layer, which writes the cache and computes attention."""
    name, rows = layer.layer_name, len(batch.query)
    kv_c, k_pe = batch.new
    slots = {name: batch.common.slot_mapping}
    layer.use_direct_call = True  # vLLM's custom operators would need a GPU's dispatch key
    with set_forward_context({name: metadata}, config, num_tokens=rows, slot_mapping=slots):
        out: Tensor = layer(batch.query, kv_c.contiguous(), k_pe.unsqueeze(1).contiguous(), output_shape=(rows, HEADS * V_DIM))
    return out.view(rows, HEADS, V_DIM)


def expected(layer: Any, batch: Batch) -> Tensor:
    """Returns attention with expanded keys and values in float32. With an fp8 cache, all tokens are rounded to fp8, except the new
    tokens of a request with more than `SHORT` new tokens.
    """
    weight = layer.kv_b_proj.weight.float().view(HEADS, NOPE + V_DIM, RANK)
    wanted = []
    rows = sum(batch.query_lens)
    for query, tokens, new in zip(batch.query[:rows].split(list(batch.query_lens)), batch.latents, batch.query_lens, strict=True):
        known = tokens.float()
        if layer.impl.fp8:
            rounded = (known / K_SCALE).clamp(-448, 448).to(layer.impl.fp8_dtype).float() * K_SCALE
            known = rounded if new <= SHORT else torch.cat([rounded[:-new], known[-new:]])
        expanded = torch.einsum("tr,hdr->thd", known[:, :RANK], weight)
        k = torch.cat([expanded[..., :NOPE], known[:, None, RANK:].expand(-1, HEADS, -1)], -1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), k) * SCALE
        age = torch.arange(len(known) - new, len(known))[:, None] - torch.arange(len(known))
        wanted.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(age < 0, -torch.inf).softmax(-1), expanded[..., NOPE:]))
    return torch.cat(wanted)


def check(got: Tensor, wanted: Tensor) -> None:
    got = got.float()
    assert got.isfinite().all()
    errors = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.max() <= 0.015


DECODE = ([37, 150, 16, 1], [1, 1, 1, 1])
DRAFTS = ([37, 150, 16], [3, 3, 3])
EXTEND = ([37, 150, 16, 40], [1, 20, 16, 7])
PREFILL = ([130, 200], [130, 200])
CHUNKED = ([160, 440], [140, 150])  # contexts of 20 and 290 tokens, in chunks
MIXED = ([37, 33, 300, 340], [1, 5, 140, 140])
ALL = {"decode": DECODE, "drafts": DRAFTS, "extend": EXTEND, "prefill": PREFILL, "chunked": CHUNKED, "mixed": MIXED}


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("kind", list(ALL))
def test_a_step(latent: Any, kind: str, cache_dtype: str) -> None:
    latent.cache_config.cache_dtype = cache_dtype
    layer = make_layer()
    assert type(layer.prefill_backend) is LatentPrefill
    step = make_batch(layer, *ALL[kind])
    metadata = make_builder(latent, layer).build(0, step.common)
    counts = {"prefill": (0, 2), "chunked": (0, 2), "mixed": (2, 2)}
    assert (metadata.num_decodes, metadata.num_prefills) == counts.get(kind, (len(step.query_lens), 0))
    if metadata.decode is not None:
        assert metadata.decode.uniform == (kind in ("decode", "drafts"))
    check(run(latent, layer, metadata, step), expected(layer, step))


def test_what_pads_a_captured_batch(latent: Any) -> None:
    """Padding requests decode together with the other requests. They write nothing, and block 0 stays as it was."""
    layer = make_layer()
    step = make_batch(layer, *DECODE, padding=4)
    builder = make_builder(latent, layer)
    assert builder.get_cudagraph_support(latent, builder.kv_cache_spec) is AttentionCGSupport.UNIFORM_BATCH
    metadata = builder.build_for_cudagraph_capture(step.common)
    assert metadata.decode.uniform
    assert metadata.decode.seq_lens.data_ptr() == step.common.seq_lens.data_ptr()  # a captured graph reads vLLM's buffers
    got = run(latent, layer, metadata, step)
    check(got[:4], expected(layer, step))
    assert layer.kv_cache[0].isnan().all()


def test_metadata_of_decoding_reads_no_device(latent: Any) -> None:
    """The metadata's tensors are on the meta device, so reading a value would fail."""
    layer = make_layer()
    common = make_batch(layer, *EXTEND).common
    on_a_device = {name: getattr(common, name).to("meta") for name in ("query_start_loc", "seq_lens", "block_table_tensor")}
    make_builder(latent, layer).build(0, dataclasses.replace(common, **on_a_device))


def test_the_longest_sequence_of_a_captured_batch_fits_its_blocks(latent: Any) -> None:
    layer = make_layer()
    step = make_batch(layer, *DECODE)
    metadata = make_builder(latent, layer).build(0, dataclasses.replace(step.common, max_seq_len=10**6))
    assert metadata.decode.max_seq_len == step.common.block_table_tensor.shape[1] * BLOCK
    check(run(latent, layer, metadata, step), expected(layer, step))


def test_vllm_writes_the_cache_where_a_wheel_cannot(latent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(
        "vllm._custom_ops.concat_and_cache_mla", lambda *args, kv_cache_dtype, **_: written.append(kv_cache_dtype), raising=False
    )
    layer = make_layer()
    layer.impl.serving = dataclasses.replace(layer.impl.serving, store=None)
    step = make_batch(layer, *DECODE)
    run(latent, layer, make_builder(latent, layer).build(0, step.common), step)
    assert written == ["auto"]


# -- rejected -------------------------------------------------------------------------------------------------------------------


def make_impl(**options: Any) -> Any:
    given = {
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
    }
    sizes = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE}
    sizes |= {"qk_head_dim": NOPE + ROPE, "v_head_dim": V_DIM, "kv_b_proj": None}
    return LatentBackend.get_impl_cls()(HEADS, RANK + ROPE, SCALE, 1, **given | sizes | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": [0.5] * 4}, "does not serve alibi_slopes"),
        ({"sliding_window": 64}, "does not serve sliding windows of latent attention"),
        ({"logits_soft_cap": 30.0}, "does not serve soft caps of latent attention"),
        ({"attn_type": "encoder_only"}, "latent attention of type encoder_only"),
        ({"indexer": object()}, r"sparse attention \(an indexer\)"),
        ({"kv_cache_dtype": "float16"}, r"caches of the model's torch\.bfloat16 or fp8, not of float16"),
    ],
)
def test_a_layer_that_is_refused(latent: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_impl(**options)


def test_decode_context_parallelism_is_refused(latent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent.parallel_config, "decode_context_parallel_size", 2)
    with pytest.raises(ValueError, match="sequences divided among ranks"):
        make_impl()


def test_a_package_without_kernels(latent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The AMD wheel has no kernels of latent attention of its own. On gfx950 the core's portable kernels run."""
    monkeypatch.setenv("TOKENSPEED_VLLM_PACKAGE", "math")
    with pytest.raises(NotServedError, match=r"no mla_decode_with_kvcache\n.*no mla_extend_with"):
        make_impl()
    with pytest.raises(NotServedError, match="math: has no mla_prefill"):
        LatentPrefill(HEADS, SCALE, RANK, NOPE, ROPE, V_DIM, latent)


@pytest.mark.parametrize(("pages", "best"), [({}, 16), ({64: 12}, 64), ({32: 12, 64: 12}, 32), ({16: 12, 64: 12}, 16)])
def test_pages_have_the_size_for_the_best_kernels(
    latent: Any, monkeypatch: pytest.MonkeyPatch, pages: dict[int, int], best: int
) -> None:
    """``pages`` maps page sizes to the priority of the kernel that needs this size. Portable kernels have a lower priority."""

    def answer(function: Any, arguments: dict[str, Any]) -> Answer:
        size = arguments["kv_cache"].shape[1] if "kv_cache" in arguments else 0  # prompts without a cache
        return Answer(function, f"pages of {size}" if size in pages else "portable", pages.get(size, 4))

    monkeypatch.setattr(serving, "answer", answer)
    layer = make_layer()
    assert (layer.impl.serving.page_size, layer.impl.serving.kernels[0]) == (best, f"pages of {best}" if pages else "portable")
    assert LatentBackend.get_preferred_block_size(16) == best


def test_what_is_valid() -> None:
    from vllm.platforms.interface import DeviceCapability

    def reasons(**options: Any) -> list[str]:
        asked: dict[str, Any] = {
            "head_size": 576,
            "dtype": torch.bfloat16,
            "kv_cache_dtype": "auto",
            "block_size": 64,
            "use_mla": True,
            "has_sink": False,
            "use_sparse": False,
            "use_mm_prefix": False,
            "use_per_head_quant_scales": False,
            "device_capability": DeviceCapability(9, 0),
            "attn_type": "decoder",
        }
        found: list[str] = LatentBackend.validate_configuration(**asked | options)
        return found

    assert not reasons()
    assert not reasons(kv_cache_dtype="fp8", block_size=16, dtype=torch.float16)
    assert reasons(use_mla=False) == ["non-MLA not supported"]
    assert reasons(use_sparse=True) == ["sparse not supported"]
    assert reasons(kv_cache_dtype="fp8_ds_mla") == ["kv_cache_dtype not supported"]
    assert reasons(use_non_causal=True) == ["non-causal attention not supported"]
    assert reasons(use_pcp=True) == ["PCP not supported"]


def test_output_is_not_quantised(latent: Any) -> None:
    prefill = LatentPrefill(HEADS, SCALE, RANK, NOPE, ROPE, V_DIM, latent)
    x = torch.zeros(1, HEADS, NOPE + ROPE)
    with pytest.raises(NotImplementedError, match="quantise"):
        prefill.run_prefill_new_tokens(x, x, x, False, output_scale=torch.ones(1))


# -- registration ---------------------------------------------------------------------------------------------------------------


def test_the_switch_selects_the_backend(latent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert AttentionBackendEnum.CUSTOM.get_class() is LatentBackend
    assert MLAPrefillBackendEnum.CUSTOM.get_class() is LatentPrefill
    said: list[str] = []
    monkeypatch.setattr(parts.logger, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setenv("TOKENSPEED_VLLM_MLA", "0")
    tokenspeed_kernel_vllm.register()
    assert said == [f"tokenspeed_kernel_vllm: no attention, because {parts.MLA_BACKEND} is the attention backend CUSTOM already"]
    for registry in (AttentionBackendEnum, MLAPrefillBackendEnum):
        registry.CUSTOM.clear_override()
    tokenspeed_kernel_vllm.register()
    assert AttentionBackendEnum.CUSTOM.get_path() == parts.BACKEND
    assert not MLAPrefillBackendEnum.CUSTOM.is_overridden()
