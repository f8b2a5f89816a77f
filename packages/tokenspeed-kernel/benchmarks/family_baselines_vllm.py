"""vLLM's kernels for ``measure_families.py``: its Triton kernels for Mamba layers, its operators, and the FlashMLA, DeepGEMM
and FlashAttention-3 that it ships.

The kernels come from an installed vLLM 0.26, or from a vLLM in a folder that ``--site`` names. Importing the package ``vllm`` takes
many seconds and sets options of PyTorch. The modules with kernels do not need this import, so `_installed` skips it. The Triton
kernels import a few other modules of vLLM. `stand_in` replaces these modules, so copies of the kernels' files in a folder are
enough.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from family_baselines import Call, InForm, chosen_as_defined, refuse_unless
from torch import Tensor

from tokenspeed_kernel.workbench.benchmark import baseline
from tokenspeed_kernel_base.ops.quantization.value import Quantization
from tokenspeed_kernel_base.ops.state_space._recurrence import step_sizes

_MAMBA = "vllm.model_executor.layers.mamba.ops"


class _Nothing:
    """A stand-in for vLLM's platform, custom operators or logger: every method returns False."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self


@contextmanager
def stand_in(folder: Path) -> Iterator[None]:
    """Inside the ``with`` block, replaces the modules of vLLM that vLLM's Triton kernels for Mamba import.

    So the kernels can be imported from copies of their files in ``folder``, without vLLM. At the end of the block all replacements
    are removed, so an installed vLLM can still be imported.
    """
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("vllm", "einops")}
    triton = importlib.import_module("triton")
    nothing = _Nothing()
    names: Mapping[str, Mapping[str, Any]] = {
        "vllm": {"_custom_ops": nothing},
        "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
        "vllm._custom_ops": {},
        "vllm.logger": {"init_logger": lambda name: nothing},
        "vllm.platforms": {"current_platform": nothing},
        "vllm.utils": {},
        "vllm.utils.platform_utils": {"get_device_name_as_file_name": lambda *args: "none"},
        "vllm.triton_utils": {"tl": importlib.import_module("triton.language"), "triton": triton, "HAS_TRITON": True},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.mamba": {},
        _MAMBA: {"__path__": [str(folder)]},
    }
    for name, contents in names.items():
        made = ModuleType(name)
        made.__dict__.update({"__path__": [], **contents})
        sys.modules[name] = made
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, made)
    if importlib.util.find_spec("einops") is None:
        made = ModuleType("einops")
        made.__dict__["rearrange"] = _rearranged
        sys.modules["einops"] = made
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "einops")]:
            del sys.modules[name]
        sys.modules.update(before)


def _rearranged(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """Replaces einops.rearrange for the two patterns that vLLM's Mamba kernels use: one merges the last two axes, the other splits
    the last axis."""
    return x.flatten(-2) if "(p n)" in pattern.partition("->")[2] else x.view(*x.shape[:-1], -1, sizes["n"])


@functools.cache
def _mamba() -> Mapping[str, ModuleType]:
    """Returns the modules with vLLM's Triton kernels for Mamba, by name. All are imported at the first call, because the stand-ins
    for vLLM's other modules are removed afterwards."""
    names = ("causal_conv1d", "mamba_ssm", "ssd_combined")
    within = "/".join(_MAMBA.split("."))
    places = [place for folder in sys.path for place in (Path(folder), Path(folder) / within)]
    folder = next((place for place in places if all((place / f"{name}.py").is_file() for name in names)), None)
    if folder is None:
        raise ImportError("vLLM's Triton kernels of Mamba are not here")
    with stand_in(folder):
        return {name: importlib.import_module(f"{_MAMBA}.{name}") for name in names}


_FAILED: dict[str, str] = {}


def _installed(name: str) -> Any:
    """Imports a module of vLLM that needs only PyTorch, without vLLM's own ``__init__``. If an import fails, later calls raise the
    recorded error without another attempt."""
    if name in _FAILED:
        raise ImportError(_FAILED[name])
    if "vllm" not in sys.modules:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("vLLM is not installed")
        bare = ModuleType("vllm")
        bare.__path__ = list(spec.submodule_search_locations)
        sys.modules["vllm"] = bare
    try:
        return importlib.import_module(name)
    except Exception as error:  # any error may occur, because the release may not match this PyTorch
        _FAILED[name] = f"{type(error).__name__}: {error}"
        raise


def _operators(module: str = "_C_stable_libtorch", namespace: str = "_C") -> Any:
    """Imports a compiled module of vLLM. Returns the namespace of the operators that it registers with PyTorch."""
    _installed(f"vllm.{module}")
    return getattr(torch.ops, namespace)


# -- Mamba -------------------------------------------------------------------------------------------------------------------------


_CONV_ROWS = 8  # tokens that one CTA of vLLM's convolution computes


def _programs(lengths: Sequence[int], rows: int, device: torch.device) -> dict[str, Any]:
    """Returns the metadata of vLLM's convolution, which vLLM makes once per decode step or prefill: the sequence and the chunk of
    each CTA.

    Args:
        lengths: number of tokens of each sequence.
        rows: tokens of a chunk.
        device: device of the metadata.
    """
    parts = [(sequence, part) for sequence, length in enumerate(lengths) for part in range(-(-length // rows))]
    sequences, offsets = (torch.tensor(column, dtype=torch.int32) for column in zip(*parts, strict=True))
    on_device = {"batch_ptr": sequences.to(device), "token_chunk_offset_ptr": offsets.to(device)}
    return {"tot": len(parts), "mlist": sequences, "mlist_len": len(parts), "offsetlist": offsets, **on_device}


@baseline("state_space.causal_conv1d_prefill", name="vLLM", setup=True, package="vllm")
def conv_prefill(
    x: Tensor, weight: Tensor, cu_seqlens: Tensor, states: Tensor, state_slots: Tensor, bias: Tensor | None,
    has_initial_state: Tensor | None, activation: str | None,
) -> Call:  # fmt: skip
    function, programs = _mamba()["causal_conv1d"].causal_conv1d_fn, _programs(cu_seqlens.diff().tolist(), _CONV_ROWS, x.device)
    metadata = SimpleNamespace(
        nums_dict={_CONV_ROWS: programs}, batch_ptr=programs["batch_ptr"], token_chunk_offset_ptr=programs["token_chunk_offset_ptr"]
    )
    call = functools.partial(
        function, x.t(), weight, bias, states.transpose(1, 2), cu_seqlens, state_slots, has_initial_state, activation,
        null_block_id=-1, metadata=metadata,
    )  # fmt: skip
    return InForm(call, lambda found: found.t().contiguous())


@baseline("state_space.causal_conv1d_decode", name="vLLM", setup=True, package="vllm")
def conv_decode(
    x: Tensor, weight: Tensor, states: Tensor, state_slots: Tensor, bias: Tensor | None, activation: str | None
) -> Call:
    """vLLM's convolution overwrites its input, so the setup passes a copy of ``x``."""
    refuse_unless(x.shape[1] == 1, "measured on one token a sequence")
    function, first = _mamba()["causal_conv1d"].causal_conv1d_update, x[:, 0].clone()
    call = functools.partial(function, first, states.transpose(1, 2), weight, bias, activation, state_slots, null_block_id=-1)
    return InForm(call, lambda found: found.unsqueeze(1))


@baseline("state_space.ssd_decode", name="vLLM", setup=True, package="vllm")
def ssd_decode(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, states: Tensor, state_slots: Tensor, D: Tensor | None,
    z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float,
) -> Call:  # fmt: skip
    """vLLM's kernel cannot limit step sizes. So the setup applies bias, softplus and limits, and passes the resulting step
    sizes."""
    refuse_unless(x.shape[1] == 1 and D is not None, "measured on one token a sequence, with D")
    assert D is not None
    heads, dim, width = *x.shape[2:], B.shape[-1]
    steps, _ = step_sizes(dt[:, 0], A, dt_bias, dt_softplus, dt_min, dt_max, torch.float32)
    decay, bias = A.float()[:, None, None].expand(heads, dim, width), torch.zeros(heads, 1, device=x.device).expand(heads, dim)
    skip = D.float()[:, None].expand(heads, dim)
    out = torch.empty_like(x[:, 0])
    call = functools.partial(
        _mamba()["mamba_ssm"].selective_state_update, states, x[:, 0], steps[..., None].expand(-1, heads, dim),
        decay, B[:, 0], C[:, 0], skip, bias, None if z is None else z[:, 0], False, state_slots, null_block_id=-1, out=out,
    )  # fmt: skip
    return InForm(call, lambda found: out.unsqueeze(1))


@baseline("state_space.ssd_prefill", name="vLLM", setup=True, package="vllm")
def ssd_prefill(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor, states: Tensor, state_slots: Tensor,
    D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float,
    has_initial_state: Tensor | None,
) -> Call:  # fmt: skip
    """Runs vLLM's scan with chunks of 256 tokens, as Granite and Bamba do. The scan has no state slots: it takes the initial
    states as an argument and returns the final ones."""
    chunk, starts = 256, cu_seqlens.tolist()
    parts = [
        (min(first + chunk, end), sequence)
        for sequence, (begin, end) in enumerate(itertools.pairwise(starts))
        for first in range(begin, end, chunk)
    ]
    last = [index for index, (end, sequence) in enumerate(parts) if end == starts[sequence + 1]]
    ends, sequences, last_of = (
        torch.tensor(values, dtype=torch.int32, device=x.device)
        for values in ([0, *(end for end, _ in parts)], [sequence for _, sequence in parts], last)
    )
    initial = states[state_slots.long()].contiguous()
    if has_initial_state is not None:
        initial[~has_initial_state] = 0
    out = torch.empty_like(x)
    call = functools.partial(
        _mamba()["ssd_combined"].mamba_chunk_scan_combined_varlen, x, dt, A, B, C, chunk, cu_seqlens, ends, last_of, sequences,
        out, D=D, z=z, dt_bias=dt_bias, initial_states=None if has_initial_state is None else initial,
        dt_softplus=dt_softplus, dt_limit=(dt_min, dt_max), state_dtype=states.dtype,
    )  # fmt: skip
    return InForm(call, lambda found: out)


# -- sparse and latent attention ---------------------------------------------------------------------------------------------------


def _flash_mla() -> Any:
    """Imports FlashMLA's Python interface, which also loads FlashMLA's operators."""
    return _installed("vllm.third_party.flashmla.flash_mla_interface")


@baseline("attention.mla_decode_with_kvcache", name="FlashMLA", setup=True, package="vllm")
def flash_mla(
    q: Tensor, kv_cache: Tensor, page_table: Tensor, cache_seqlens: Tensor, max_seqlen_k: int, kv_lora_rank: int,
    softmax_scale: float, q_scale: Tensor | None, kv_scale: Tensor | None,
) -> Call:  # fmt: skip
    """FlashMLA needs a plan, which an engine makes once per decode step. Here an untimed first call makes the plan. For fp8, vLLM
    has a separate compiled module."""
    refuse_unless(q.dtype == kv_cache.dtype and kv_cache.shape[1] == 64, "q and cache of one dtype, in pages of 64")
    refuse_unless(kv_lora_rank == 512 and q.shape[2] == 576, "a latent of 512 and a rotary part of 64")
    queries, cache = q.unsqueeze(1), kv_cache.unsqueeze(2)
    if q.dtype == torch.float8_e4m3fn:
        operators = _operators("_flashmla_extension_C", "_flashmla_extension_C")
        plan = operators.get_mla_decoding_metadata_dense_fp8(cache_seqlens, q.shape[1], 1)
        one = torch.ones(1, device=q.device)
        scales = (one if scale is None else scale.reshape(1) for scale in (q_scale, kv_scale))
        given = (queries, cache, kv_lora_rank, cache_seqlens, page_table, softmax_scale, True, *plan, *scales)
        return InForm(functools.partial(operators.fwd_kvcache_mla_fp8, *given), lambda found: found[0].squeeze(1))
    refuse_unless(q.dtype == torch.bfloat16, "bfloat16 or e4m3")
    module = _flash_mla()
    plan, _ = module.get_mla_metadata()
    call = functools.partial(
        module.flash_mla_with_kvcache, queries, cache, page_table, cache_seqlens, kv_lora_rank, plan, softmax_scale=softmax_scale,
        causal=True,
    )  # fmt: skip
    call()
    return InForm(call, lambda found: found[0].squeeze(1))


@baseline("attention.mla_sparse_with_kvcache", name="FlashMLA", setup=True, package="vllm")
def flash_mla_sparse(
    q: Tensor, kv_cache: Tensor, indices: Tensor, kv_lora_rank: int, softmax_scale: float, topk_length: Tensor | None,
    kv_scale_cache: Tensor | None, rope_cache: Tensor | None,
) -> Call:  # fmt: skip
    """The number of heads must be a multiple of 64, so heads are padded, as in vLLM. For caches with 656 bytes per token, FlashMLA
    has a separate function. An untimed first call makes its plan."""
    refuse_unless(kv_lora_rank == 512 and q.shape[2] == 576, "a latent of 512 and a rotary part of 64")
    module, heads = _flash_mla(), q.shape[1]
    padded = torch.nn.functional.pad(q, (0, 0, 0, -heads % 64))
    if rope_cache is None:
        refuse_unless(q.dtype == kv_cache.dtype == torch.bfloat16, "bfloat16, or a scale for each 128 latents")
        given = (padded, kv_cache.reshape(-1, 1, kv_cache.shape[-1]), indices.unsqueeze(1), softmax_scale)
        call = functools.partial(module.flash_mla_sparse_fwd, *given, topk_length=topk_length)
        return InForm(call, lambda found: found[0][:, :heads].contiguous())
    pages, page_size, _ = kv_cache.shape
    refuse_unless(kv_cache.stride() == (page_size * 656, 656, 1), "656 bytes a token")
    packed = kv_cache.as_strided((pages, page_size, 1, 656), (page_size * 656, 656, 656, 1))
    plan, _ = module.get_mla_metadata()
    call = functools.partial(
        module.flash_mla_with_kvcache, padded.unsqueeze(1), packed, None, None, kv_lora_rank, plan, softmax_scale=softmax_scale,
        is_fp8_kvcache=True, indices=indices.unsqueeze(1), topk_length=topk_length,
    )  # fmt: skip
    call()
    return InForm(call, lambda found: found[0].squeeze(1)[:, :heads].contiguous())


def _deep_gemm() -> Any:
    """Imports DeepGEMM, which compiles each kernel with the CUDA toolkit at the kernel's first call."""
    return _installed("vllm.third_party.deep_gemm")


def _seen(lengths: Tensor) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """Returns a function that converts DeepGEMM's scores into the operator's result. DeepGEMM does not write scores at positions
    that a token does not see; these scores become -inf. ``lengths``: the number of positions that each token sees."""

    def form(found: Any) -> tuple[Tensor, Tensor]:
        hidden = torch.arange(found.shape[1], device=found.device) >= lengths.unsqueeze(1)
        return found.masked_fill(hidden, -torch.inf), lengths

    return form


@baseline("attention.dsa_indexer_scores_with_kvcache", name="DeepGEMM", setup=True, package="vllm")
def paged_scores(
    q: Tensor, k_cache: Tensor, weights: Tensor, page_table: Tensor, cache_seqlens: Tensor, k_scale_cache: Tensor | None
) -> Call:
    """In DeepGEMM's cache, each page has its keys followed by their scales. The caches of the operator's cases have this layout,
    too."""
    refuse_unless(k_scale_cache is not None, "fp8 only")
    module = _deep_gemm()
    pages, page_size, dim = k_cache.shape
    of_page = page_size * (dim + 4)
    refuse_unless(k_cache.stride(0) == of_page, "caches whose scales lie elsewhere")
    packed = k_cache.as_strided((pages, of_page), (of_page, 1)).view(torch.uint8).view(pages, page_size, 1, dim + 4)
    tokens = q.view(len(cache_seqlens), -1, *q.shape[1:])
    new = tokens.shape[1]
    refuse_unless(new <= 2, "at most two new tokens of each on Hopper")
    lengths = (cache_seqlens.unsqueeze(1) - torch.arange(new - 1, -1, -1, device=q.device)).int().contiguous()
    plan = module.get_paged_mqa_logits_metadata(lengths, page_size, module.get_num_sms())
    width = page_table.shape[1] * page_size
    given = ((tokens, None), packed, weights, lengths, page_table, plan, width)
    call = functools.partial(module.fp8_fp4_paged_mqa_logits, *given, clean_logits=False)
    return InForm(call, _seen(lengths.flatten()))


@baseline("attention.dsa_indexer_scores", name="DeepGEMM", setup=True, package="vllm")
def row_scores(
    q: Tensor, k: Tensor, weights: Tensor, cu_seqlens: Tensor, cu_seqlens_kv: Tensor | None, k_scale: Tensor | None
) -> Call:
    refuse_unless(k_scale is not None and len(cu_seqlens) == 2, "one sequence in fp8")
    ends = torch.arange(len(k) - len(q) + 1, len(k) + 1, dtype=torch.int32, device=q.device)
    given = ((q, None), (k, k_scale), weights, torch.zeros_like(ends), ends)
    return InForm(functools.partial(_deep_gemm().fp8_fp4_mqa_logits, *given, clean_logits=False), _seen(ends))


@baseline("attention.top_k_indices", name="vLLM", setup=True, package="vllm")
def vllm_top_k(scores: Tensor, top_k: int, lengths: Tensor | None) -> Call:
    """Runs vLLM's top-k kernel for prefill."""
    refuse_unless(scores.dtype == torch.float32, "float32 only")
    ends = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device) if lengths is None else lengths
    out = torch.empty(len(scores), top_k, dtype=torch.int32, device=scores.device)
    given = (scores, torch.zeros_like(ends), ends, out, len(scores), *scores.stride(), top_k)
    call = functools.partial(_operators().top_k_per_row_prefill, *given)
    return InForm(call, lambda found: chosen_as_defined(scores, ends, out))


@baseline("attention.top_k_indices", name="vLLM, decode", setup=True, package="vllm")
def vllm_top_k_of_decode(scores: Tensor, top_k: int, lengths: Tensor | None) -> Call:
    """Runs vLLM's top-k kernels for decode on Hopper. For at most 32 rows, the CTAs of a cluster share the work on a row."""
    refuse_unless(scores.dtype == torch.float32 and top_k in (512, 1024, 2048), "float32, and 512, 1024 or 2048 of them")
    refuse_unless(len(scores) <= 256, "the rows of a decode")
    ends = torch.full((len(scores),), scores.shape[1], dtype=torch.int32, device=scores.device) if lengths is None else lengths
    out = torch.empty(len(scores), top_k, dtype=torch.int32, device=scores.device)
    few = len(scores) <= 32 and scores.stride(0) % 4 == 0
    function = _operators().cooperative_topk if few else _operators().persistent_topk
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device=scores.device)
    call = functools.partial(function, scores, ends, out, workspace, top_k, scores.shape[1])
    return InForm(call, lambda found: chosen_as_defined(scores, ends, out))


# -- attention, GEMMs and prologues ------------------------------------------------------------------------------------------------


def _flash_attention_3(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scales: Mapping[str, Tensor | None], **options: Any
) -> Call:
    """Returns a call of FlashAttention-3 for prefill: each sequence attends to itself. For fp8 inputs the output is bfloat16, like
    the operator's output."""
    function = _installed("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func
    shape, longest = (len(cu_seqlens) - 1, k.shape[1]), int(cu_seqlens.diff().max())
    given = {name: scale.reshape(-1).expand(shape).contiguous() for name, scale in scales.items() if scale is not None}
    return functools.partial(
        function, q, k, v, longest, cu_seqlens, longest, cu_seqlens_k=cu_seqlens, fa_version=3, **given, **options
    )


@baseline("attention.mha_prefill", name="FlashAttention-3", setup=True, package="vllm")
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float | None, sinks: Tensor | None,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
) -> Call:  # fmt: skip
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    added = None if sinks is None else sinks.bfloat16()
    return _flash_attention_3(q, k, v, cu_seqlens, scales, causal=True, softmax_scale=softmax_scale, s_aux=added)


@baseline("attention.mla_prefill", name="FlashAttention-3", setup=True, package="vllm")
def flash_attention_expanded(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, is_causal: bool, softmax_scale: float | None, return_lse: bool,
    q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
) -> Call:  # fmt: skip
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    options = {"causal": is_causal, "softmax_scale": softmax_scale, "return_softmax_lse": return_lse}
    call = _flash_attention_3(q, k, v, cu_seqlens, scales, **options)
    return InForm(call, lambda found: (found[0], found[1].t().contiguous()) if return_lse else found)


@baseline("gemm.mm", name="DeepGEMM", setup=True, package="vllm")
def deep_gemm_mm(a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, out_dtype: torch.dtype | None) -> Call:
    """Runs DeepGEMM's fp8 GEMM with float32 scales of blocks of 128. The setup stores the scales of ``a`` column-major, as
    DeepGEMM's own quantisation writes them."""
    refuse_unless(a_scale is not None and b_scale is not None and a.dtype == b.dtype == torch.float8_e4m3fn, "fp8 with scales")
    assert a_scale is not None
    assert b_scale is not None
    blocks = (-(-a.shape[1] // 128), -(-b.shape[1] // 128))
    refuse_unless(
        a_scale.dtype == b_scale.dtype == torch.float32 and a_scale.shape == (len(a), blocks[0]) and b_scale.shape == blocks,
        "float32 scales of blocks of 128",
    )
    refuse_unless(out_dtype in (None, torch.bfloat16), "bfloat16")
    module = _deep_gemm()
    out = torch.empty(len(a), b.shape[1], dtype=torch.bfloat16, device=a.device)
    left = (a.contiguous(), module.get_mn_major_tma_aligned_tensor(a_scale.contiguous()))
    right = (b.t().contiguous(), b_scale.t().contiguous())
    return InForm(functools.partial(module.fp8_gemm_nt, left, right, out, disable_ue8m0_cast=True), lambda found: out)


def _quantised(x: Tensor, width: int, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Returns two uninitialised tensors, for the fp8 elements and for the scales of a quantised result.

    Args:
        x: the operator's input; the result has as many rows.
        width: elements of a row of the result.
        quantization: the format of the result.
    """
    granularity, block_size = quantization.granularity, quantization.block_size
    refuse_unless(quantization.format == "fp8" and quantization.scale_dtype == torch.float32, "fp8 with float32 scales")
    refuse_unless(granularity == "token" or (granularity == "block" and block_size in (64, 128)), "a scale a token, or a block")
    rows, scales = x.numel() // x.shape[-1], 1 if granularity == "token" else width // block_size
    return torch.empty(rows, width, dtype=torch.float8_e4m3fn, device=x.device), torch.empty(rows, scales, device=x.device)


@baseline("norm.rmsnorm_quantize", name="vLLM", setup=True, package="vllm")
def rmsnorm_quantised(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, quantization: Quantization) -> Call:
    """vLLM's kernel overwrites the residual with the sum, so the setup passes a copy of the residual."""
    out, scale = _quantised(x, x.shape[-1], quantization)
    total = None if residual is None else residual.clone()
    given, operators = (out, x, weight, scale, eps, None, total), _operators()
    if quantization.granularity == "token":
        call = functools.partial(operators.rms_norm_dynamic_per_token_quant, *given)
    else:
        call = functools.partial(operators.rms_norm_per_block_quant, *given, quantization.block_size, False)
    return InForm(call, lambda found: (out, scale) if total is None else (out, scale, total))


@baseline("activation.swiglu_quantize", name="vLLM", setup=True, package="vllm")
def silu_quantised(
    x: Tensor, quantization: Quantization, alpha: float, limit: float | None, beta: float, interleaved: bool
) -> Call:
    refuse_unless(alpha == 1.0 and beta == 0.0 and limit is None and not interleaved, "silu_and_mul")
    if quantization.format == "fp8" and quantization.scale is not None:
        refuse_unless(quantization.scale.numel() == 1, "one scale")
        given = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.float8_e4m3fn, device=x.device)
        return InForm(functools.partial(_operators().silu_and_mul_quant, given, x, quantization.scale), lambda found: given)
    refuse_unless(quantization.granularity == "block", "a scale a block")
    out, scale = _quantised(x, x.shape[-1] // 2, quantization)
    call = functools.partial(_operators().silu_and_mul_per_block_quant, out, x, scale, quantization.block_size)
    return InForm(call, lambda found: (out, scale))
