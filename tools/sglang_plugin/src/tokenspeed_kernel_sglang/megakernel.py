"""Fills SGLang's slot for kernels that run a model's whole decode step: all layers of GPT-OSS in one call of `decoder_layers`.

SGLang 0.5.23 has the slot, and the option ``--enable-nvidia-megakernel`` selects it. SGLang compares `SPEC` with the options before
it loads the weights, calls `build` after that, and asks `DecoderStep.plan` in each step. All other steps run SGLang's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from sglang.kernels.plugin_kernels.nvidia.spec import BuildContext, MegakernelSpec, Numerics, NumericsKind, Requirements, Step
from sglang.srt.kernel_plugins.nvidia.binding import megakernel_enabled
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from tokenspeed_kernel_base.served import NotServedError, kernel_for
from tokenspeed_kernel_sglang import names
from tokenspeed_kernel_sglang.experts import GptOssExperts
from tokenspeed_kernel_sglang.paged import Metadata
from tokenspeed_kernel_sglang.record import record

# The type is Any, because calls with options in a dict match no overload of the operators for type checkers.
OPS: Any = import_module("tokenspeed_kernel")

# With more tokens, separate kernels are faster.
MOST_ROWS = 4
# `decoder_layers` rounds where SGLang's layers round, but sums in another order. Two such computations of one layer with random
# weights have logits whose differences are at most 0.005 (tools/vllm_plugin/benchmarks/rounding_by_depth.py). A rounding that
# decides the choice of an expert makes larger differences, and all layers together multiply them.
NUMERICS = Numerics(NumericsKind.TOLERANCE, {"logits of one layer with the same experts, rms in standard deviations": 0.01})


def stacked_caches(original: Callable[[Any], None], pool: Any) -> None:
    """Makes the buffers of SGLang's pool, all in one allocation, so that `decoder_layers` reads the layers' caches as one tensor.
    Each layer's buffers are laid out as SGLang does it: the keys of all slots, then the values.

    Args:
        original: SGLang's method, which makes an allocation for each layer.
        pool: the pool. SGLang's method makes the buffers of pools of other classes or layouts, and if the slot is not selected.
    """
    plain = type(pool) is MHATokenToKVPool and pool.kv_cache_layout == "nhd" and pool.head_dim == pool.v_head_dim
    if not plain or pool.enable_custom_mem_pool or not megakernel_enabled():
        original(pool)
        return
    slots = pool.size + pool.page_size
    padded = -(-slots // pool.page_size) * pool.page_size
    shape = (pool.layer_num, 2, padded, pool.head_num, pool.head_dim)
    every = torch.zeros(shape, dtype=pool.store_dtype, device=pool.device)
    pool.k_buffer = [layer[0, :slots] for layer in every]
    pool.v_buffer = [layer[1, :slots] for layer in every]


def stacked(buffers: Sequence[Tensor]) -> Tensor | None:
    """Returns the buffers of all layers as one view ``[layers, ...]``. None if they are not equally spaced in one allocation."""
    first = buffers[0]
    base, size = first.untyped_storage().data_ptr(), first.element_size()
    step = (buffers[1].data_ptr() - first.data_ptr()) // size if len(buffers) > 1 else first.numel()
    for index, each in enumerate(buffers):
        alike = each.shape == first.shape and each.stride() == first.stride() and each.dtype == first.dtype
        if not alike or each.untyped_storage().data_ptr() != base or each.data_ptr() != first.data_ptr() + index * step * size:
            return None
    return first.as_strided((len(buffers), *first.shape), (step, *first.stride()))


@dataclass
class DecoderStep:
    """The object that SGLang's slot asks for: plans and runs decode steps.

    Attributes:
        model: SGLang's `GptOssForCausalLM`.
        weights: the weights of all layers. They are the model's own tensors, except for the sinks, which are copied to float32.
        plan_of_experts: the plan of every layer's experts.
        angles: float32 ``[positions, head_dim]``, the cosines and sines of the rotary embedding.
        eps: of all norms.
        binding: SGLang's `MegakernelBinding`.
        widths: the numbers of rows for which a kernel runs all layers.
        kernels: the kernels' names.
        draft_sampler: None, because GPT-OSS has no such draft model.
    """

    model: Any
    weights: Any
    plan_of_experts: Any
    angles: Tensor
    eps: float
    binding: Any
    widths: tuple[int, ...]
    kernels: tuple[str, ...]
    draft_sampler: None = None

    def summary(self) -> str:
        """Returns what was built, for SGLang's log."""
        return f"{len(self.weights.layers)} layers by {', '.join(self.kernels)}"

    def plan(
        self, input_ids: Any, forward_batch: Any, input_embeds: Any = None, pp_proxy_tensors: Any = None, **options: Any
    ) -> Step | None:
        """Returns the step to run; None for SGLang's own forward: prefills, larger batches, other arguments than ids of tokens,
        another attention backend than ours, and caches that are not in one allocation. Does not wait for the device.
        """
        rows = int(forward_batch.batch_size)
        others = input_embeds is not None or pp_proxy_tensors is not None or bool(options)
        if not forward_batch.forward_mode.is_decode() or rows not in self.widths or others or self.model.capture_aux_hidden_states:
            return None
        view = self.binding.forward_view()
        if not isinstance(view.metadata, Metadata) or self.caches(view) is None:
            return None
        return Step("decode", rows)

    def caches(self, view: Any) -> tuple[Tensor, Tensor] | None:
        """Returns the key and value caches of all layers, ``[layers, pages, page_size, kv_heads, head_dim]``; None if they are not
        in one allocation.

        Args:
            view: SGLang's `ForwardView`.
        """
        pool = view.kv_pool.pool
        if type(pool) is not MHATokenToKVPool:
            return None
        both = [stacked(buffers) for buffers in (pool.k_buffer, pool.v_buffer)]
        if any(each is None or each.shape[1] % pool.page_size or each.dtype != self.plan_of_experts.dtype for each in both):
            return None
        keys, values = (each.unflatten(1, (-1, pool.page_size)) for each in both if each is not None)
        return keys, values

    def forward(
        self, step: Step, original: Callable[..., Any], input_ids: Tensor, positions: Tensor, forward_batch: Any, *_: Any
    ) -> Any:
        """Runs a decode step, and returns SGLang's `LogitsProcessorOutput`. Writes the new keys and values to the cache.

        Args:
            step: the planned step, with SGLang's view of this forward.
            original: the model's own forward, which is not called.
            input_ids: ``[rows]``.
            positions: not read, because the position of a sequence's new token follows from its length.
            forward_batch: the batch.
        """
        caches, batch, model = self.caches(step.view), step.view.metadata, self.model
        if caches is None:
            raise RuntimeError("tokenspeed_kernel_sglang: the pool's buffers were replaced after the step was planned")
        slots = forward_batch.out_cache_loc if batch.slots is None else batch.slots
        hidden = OPS.decoder_layers(
            model.model.embed_tokens(input_ids),
            self.weights,
            *caches,
            batch.page_table,
            batch.seq_lens,
            slots,
            self.angles,
            self.plan_of_experts,
            self.eps,
        )
        return model.logits_processor(input_ids, model.model.norm(hidden), model.lm_head, forward_batch, None)


def build(model: Any, hf_config: Any, context: BuildContext) -> DecoderStep:
    """Builds the step for a loaded model. Its ``widths`` are empty if no kernel runs all layers; SGLang then refuses to start.

    Args:
        model: SGLang's `GptOssForCausalLM`, whose experts are `GptOssExperts`.
        hf_config: the model's configuration.
        context: SGLang's, with the wanted numbers of rows.
    """
    layers = model.model.layers
    angles = layers[0].self_attn.rotary_emb.cos_sin_cache.float()
    weights = OPS.DecoderWeights([_weights_of(layer) for layer in layers])
    plan, eps = layers[0].mlp.experts.quant_method.plan, float(hf_config.rms_norm_eps)
    kernels: dict[int, str] = {}
    for rows in context.widths:
        try:
            chosen = kernel_for(OPS.decoder_layers, _example(rows, weights, angles, plan, eps))
        except NotServedError as error:
            record("decode step", f"{rows} tokens", reason=str(error))
            continue
        if chosen.solution in ("composed", "reference"):
            record("decode step", f"{rows} tokens", reason=f"no kernel runs all layers in one launch: {chosen.name} calls several")
        else:
            kernels[rows] = chosen.name
            record("decode step", f"{rows} tokens", (chosen.name,), layers=len(layers))
    names = tuple(dict.fromkeys(kernels.values()))
    return DecoderStep(model, weights, plan, angles, eps, context.binding, tuple(kernels), names)


def _weights_of(layer: Any) -> Any:
    """Returns a layer's weights for `decoder_layers`."""
    attention, mlp = layer.self_attn, layer.mlp
    return OPS.DecoderLayer(
        input_norm=layer.input_layernorm.weight.data,
        qkv=attention.qkv_proj.weight.data,
        projection=attention.o_proj.weight.data,
        norm=layer.post_attention_layernorm.weight.data,
        router=mlp.router.weight.data,
        experts=mlp.experts.quant_method.weights,
        window_left=int(attention.attn.sliding_window_size),
        qkv_bias=attention.qkv_proj.bias.data,
        projection_bias=attention.o_proj.bias.data,
        sinks=attention.sinks.data.float(),
        router_bias=mlp.router.bias.data,
    )


def _example(rows: int, weights: Any, angles: Tensor, plan: Any, eps: float) -> dict[str, Any]:
    """Returns the arguments of a call, with a cache of one page of 64 tokens for each row. Their values are not read."""
    first = weights.layers[0]
    hidden, head_dim = first.projection.shape[0], angles.shape[1]
    kv_heads = (first.qkv.shape[0] - first.projection.shape[1]) // (2 * head_dim)
    device, dtype = first.qkv.device, first.qkv.dtype
    cache = torch.empty(len(weights.layers), rows, 64, kv_heads, head_dim, dtype=dtype, device=device)
    return {
        "x": torch.empty(rows, hidden, dtype=dtype, device=device),
        "weights": weights,
        "k_cache": cache,
        "v_cache": torch.empty_like(cache),
        "page_table": torch.arange(rows, dtype=torch.int32, device=device).unsqueeze(1),
        "cache_seqlens": torch.ones(rows, dtype=torch.int32, device=device),
        "slot_mapping": 64 * torch.arange(rows, device=device),
        "cos_sin_cache": angles,
        "plan": plan,
        "eps": eps,
    }


def reasons_of_model(model: Any, hf_config: Any) -> list[str]:
    """Returns the reasons why a loaded model cannot run in one call; SGLang asks before it calls `build`."""
    methods = {type(layer.mlp.experts.quant_method) for layer in model.model.layers}
    if methods != {GptOssExperts}:
        names = ", ".join(sorted(each.__name__ for each in methods))
        return [f"the experts run on {names}, not on this plugin's method (the log of tokenspeed_kernel says why)"]
    return []


def reasons_of_options(cfg: Any, hf_config: Any) -> list[str]:
    """Returns the reasons why SGLang's resolved options exclude the step; SGLang asks before it loads weights."""
    decode = cfg.decode_attention_backend or cfg.attention_backend
    prefill = cfg.prefill_attention_backend or cfg.attention_backend
    found = []
    if decode not in (names.BACKEND, *names.replaced):
        setting = f"TOKENSPEED_SGLANG_ATTENTION_REPLACES={decode}"
        found.append(f"attention backend {decode!r} is not this plugin's; {setting} makes it so")
    if prefill != decode:
        found.append(f"prefill and decode have different attention backends, {prefill!r} and {decode!r}")
    return found


SPEC = MegakernelSpec(
    name="tokenspeed_kernel, layers of GPT-OSS",
    requires=Requirements(
        isas=frozenset({"sm_90"}),
        tp_sizes=frozenset({1}),
        dtypes=frozenset({"bfloat16"}),
        server_args={
            # A page must be the same page in all layers.
            "disable_hybrid_swa_memory": frozenset({True}),
            "kv_cache_dtype": frozenset({"auto", "bf16", "bfloat16"}),
            "page_size": frozenset({16, 32, 64, 128, 256}),
        },
    ),
    features=frozenset(),
    numerics=NUMERICS,
    max_rows=MOST_ROWS,
    build=build,
    api_version=1,
    model_disable_reasons=reasons_of_model,
    config_disable_reasons=reasons_of_options,
)
