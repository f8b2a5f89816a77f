"""The GPT-OSS model over a flat batch of tokens.

The model calls tokenspeed-kernel's operators wherever one exists, and prefers operators that combine several steps. Such an
operator runs as a fused kernel if one is eligible, otherwise as one kernel for each step. This module depends neither on the device
nor on the selected kernels. PyTorch does the rest: embedding lookup, views, and row selection.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from torch import Tensor

import tokenspeed_kernel
from gpt_oss.batch import Batch, Phase
from gpt_oss.cache import PagedKVCache
from gpt_oss.config import Config
from gpt_oss.fields import COUNT, FLOAT_DTYPE, instance, one_of, optional
from gpt_oss.loader import TensorSource, check_source, from_files, layer_prefix, reading_order
from gpt_oss.read_ahead import ReadAhead, bytes_of
from gpt_oss.rope import cos_sin_cache
from gpt_oss.transfer import Upload

Caches = tuple[Tensor, Tensor] | tuple[None, None]
"""The key cache and the value cache of a layer; ``(None, None)`` without a cache."""


@dataclass(frozen=True)
class Linear:
    """A projection ``x @ weight + bias``: weight ``[inputs, outputs]``, stored outputs first, and bias ``[outputs]`` or None.

    ``scale`` is the scale of a quantised weight, as `mm` takes it: fp8 ``[1, outputs]``, mxfp4 ``[inputs / 32, outputs]``.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None

    def __call__(self, ops: Any, x: Tensor, out: Tensor | None = None) -> Tensor:
        return ops.mm(x, self.weight, b_scale=self.scale, bias=self.bias, out=out)

    @property
    def nbytes(self) -> int:
        """The bytes of weight, bias and scale."""
        return sum(each.nbytes for each in (self.weight, self.bias, self.scale) if each is not None)


@dataclass(frozen=True)
class Layer:
    """One layer's weights. ``experts`` are the weights that `moe_apply.prepare` prepared for ``plan``."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    sinks: Tensor
    window_left: int
    mlp_norm: Tensor
    router: Linear
    experts: Any
    plan: Any


class GptOss:
    """A GPT-OSS model with its weights on a device. The experts' weights are prepared for the selected kernel.

    Args:
        config: the model's configuration.
        source: the model's tensors; see `gpt_oss.loader`. Each tensor is read once. For a GPU, a thread reads a checkpoint's
            tensors ahead. On a CPU, tensors of the right dtype stay in the mapped files.
        dtype: floating-point dtype of weights and activations. MXFP4 experts stay packed.
        device: the model's device.
        max_positions: the length of the longest sequence. None, or more than the configuration's context, means the context.
        console: shows the progress of loading, in bytes; None shows none.
        activation_dtype: the format to which experts quantise the inputs of their GEMMs: ``"none"``, ``"fp8"`` or ``"mxfp4"``.
        dense_weights: the format to which the weights of attention (qkv and output) and the output matrix are quantised when they
            are loaded: ``"none"``, ``"fp8"`` with a scale per output, or ``"mxfp4"``. Activations are not quantised. The router
            keeps ``dtype``.

    Attributes:
        ops: the operators: the public API, or a recording wrapper (`gpt_oss.kernels.listen`).
        one_call: whether decode passes run all layers in one call of `decoder_layers`. None: if one kernel runs that call, which
            depends on the number of tokens; otherwise the layers' operators are called one by one.

    Raises:
        TypeError, ValueError: an argument is not as stated; the message names it.
        CheckpointError: the tensors do not match the configuration.
    """

    def __init__(
        self,
        config: Config,
        source: TensorSource,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
        console: Console | None = None,
        activation_dtype: str = "none",
        dense_weights: str = "none",
    ) -> None:
        instance(Config).check("config", config)
        FLOAT_DTYPE.check("dtype", dtype)
        optional(COUNT).check("max_positions", max_positions)
        one_of("none", "fp8", "mxfp4").check("activation_dtype", activation_dtype)
        one_of("none", "fp8", "mxfp4").check("dense_weights", dense_weights)
        if dense_weights != "none" and dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dense_weights must be 'none' with dtype {dtype}, got {dense_weights!r}: it needs a 16-bit dtype")
        self._check_tensors(config, source)
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        self.activation_dtype, self.dense_weights = activation_dtype, dense_weights
        self.ops: Any = tokenspeed_kernel
        self.one_call: bool | None = None
        self.max_positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
        self.cos_sin = cos_sin_cache(config.rope, config.head_dim, self.max_positions, self.device)
        with self._reading(source, console):
            self.embedding = self._read("model.embed_tokens.weight")
            self.layers = [self._read_layer(layer) for layer in range(config.num_hidden_layers)]
            self.norm = self._read("model.norm.weight")
            unembedding = self.embedding if config.tie_word_embeddings else self._read("lm_head.weight")
            self.unembedding = self._quantized(unembedding, None)
        self._decoder_weights = self._whole_layers()
        # Number of tokens, page size and cache dtype of a decode pass -> whether one kernel runs all layers.
        self._one_call_by_shape: dict[tuple[int, int, torch.dtype], bool] = {}

    def forward(self, batch: Batch, cache: PagedKVCache | None, out: Tensor | None = None) -> Tensor:
        """Runs a batch, and writes its keys and values to the batch's cache slots. Changes nothing else.

        Args:
            batch: the batch to run.
            cache: the KV cache; None for a pass without a cache.
            out: receives the result.

        Returns:
            Logits in the model's dtype, ``[rows, vocab_size]``, of the tokens in ``batch.logit_rows``; of all tokens if that is
            None.
        """
        hidden, residual = self._run_layers(self.embedding.index_select(0, batch.tokens), batch, cache)
        if batch.logit_rows is not None:
            hidden = hidden.index_select(0, batch.logit_rows)
            residual = None if residual is None else residual.index_select(0, batch.logit_rows)
        return self.unembedding(self.ops, self._norm_last(hidden, residual), out)

    def _run_layers(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> tuple[Tensor, Tensor | None]:
        """Returns the last layer's output, and the residual stream to which it must be added; None if it was already added."""
        output = self._run_in_one_call(hidden, batch, cache)
        if output is not None:
            return output, None
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            caches: Caches = (None, None) if cache is None else (cache.k[index], cache.v[index])
            attended, residual = self._attend(layer, hidden, residual, batch, caches)
            normed, weights, ids, residual = self._route(layer, attended, residual)
            hidden = self.ops.moe_apply(normed, layer.experts, weights, ids, layer.plan)
        return hidden, residual

    @property
    def summed_over(self) -> Any:
        """The ranks over which the outputs of attention and of the experts are summed; None for a model of one rank."""
        return None

    def _run_in_one_call(self, hidden: Tensor, batch: Batch, cache: PagedKVCache | None) -> Tensor | None:
        """Runs all layers of a decode pass by `decoder_layers`, and returns the output, with the residual stream. Returns None if
        the layers' operators must be called one by one."""
        if batch.phase is not Phase.DECODE or cache is None:
            return None
        arguments = self._decoder_arguments(hidden, batch, cache)
        return self.ops.decoder_layers(**arguments) if self._runs_in_one_call(arguments) else None

    def _decoder_arguments(self, hidden: Tensor, batch: Batch, cache: PagedKVCache) -> dict[str, Any]:
        """Returns the arguments of `decoder_layers` for a decode pass."""
        return {
            "x": hidden,
            "weights": self._decoder_weights,
            "k_cache": cache.all_k,
            "v_cache": cache.all_v,
            "page_table": batch.page_table,
            "cache_seqlens": batch.cache_seqlens,
            "slot_mapping": batch.slot_mapping,
            "cos_sin_cache": self.cos_sin,
            "plan": self.layers[0].plan,
            "eps": self.config.rms_norm_eps,
        }

    def _runs_in_one_call(self, arguments: dict[str, Any]) -> bool:
        """Returns whether a decode pass calls `decoder_layers`. The selection is made at the first pass with a number of tokens."""
        if self.one_call is not None:
            return self.one_call
        cache = arguments["k_cache"]
        key = len(arguments["x"]), cache.shape[2], cache.dtype
        found = self._one_call_by_shape.get(key)
        if found is None:
            chosen = None
            # The operator takes only caches of the model's dtype.
            if cache.dtype == self.dtype:
                chosen = tokenspeed_kernel.get_operator("decoder_layers").function.explain(**arguments).chosen
            found = self._one_call_by_shape[key] = chosen is not None and chosen.solution not in ("composed", "reference")
        return found

    def _attend(self, layer: Layer, hidden: Tensor, residual: Tensor | None, batch: Batch, caches: Caches) -> tuple[Tensor, Tensor]:
        """Returns attention's output, and the residual stream before it, to which all earlier outputs are already added."""
        found = self.ops.rmsnorm_qkv_rope(
            hidden,
            layer.attention_norm,
            layer.qkv.weight,
            batch.positions,
            self.cos_sin,
            self.config.num_key_value_heads,
            self.config.head_dim,
            eps=self.config.rms_norm_eps,
            residual=residual,
            bias=layer.qkv.bias,
            k_cache=caches[0],
            v_cache=caches[1],
            slot_mapping=batch.slot_mapping,
            qkv_weight_scale=layer.qkv.scale,
        )
        qkv, residual = (found, hidden) if residual is None else found
        return layer.output(self.ops, self._attention(layer, qkv, batch, *caches)), residual

    def _route(self, layer: Layer, attended: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the normalised tokens for the experts, the top-k weights and ids of each token, and the residual stream."""
        chosen: tuple[Tensor, Tensor, Tensor, Tensor] = self.ops.rmsnorm_moe_topk(
            attended,
            layer.mlp_norm,
            layer.router.weight,
            self.config.num_experts_per_tok,
            eps=self.config.rms_norm_eps,
            residual=residual,
            router_bias=layer.router.bias,
        )
        return chosen

    def _norm_last(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """Returns the last norm's output, after the residual add if there is a residual stream."""
        normed = self.ops.rmsnorm(hidden, self.norm, self.config.rms_norm_eps, residual=residual)
        return normed if residual is None else normed[0]

    def _attention(self, layer: Layer, qkv: Tensor, batch: Batch, k_cache: Tensor | None, v_cache: Tensor | None) -> Tensor:
        """Returns attention's output, ``[tokens, heads * head_dim]``, before the output projection.

        ``qkv``: ``[tokens, (heads + 2 * kv_heads) * head_dim]``, rotated. If there is a cache, it has the keys and values already.
        """
        config, ops = self.config, self.ops
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        q, k, v = qkv.unflatten(1, (-1, config.head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        options = {"window_left": layer.window_left, "sinks": layer.sinks}
        if batch.phase is Phase.PREFILL:
            attended = ops.mha_prefill(q, k, v, batch.cu_seqlens_q, max_seqlen=batch.max_seqlen_q, **options)
        elif batch.phase is Phase.EXTEND:
            attended = ops.mha_extend_with_kvcache(
                q,
                batch.cu_seqlens_q,
                batch.cu_seqlens_kv,
                k_cache,
                v_cache,
                batch.page_table,
                batch.cache_seqlens,
                batch.max_seqlen_q,
                batch.max_seqlen_k,
                is_causal=True,
                **options,
            )
        elif batch.phase is Phase.MIXED:
            attended = ops.mha_with_kvcache(
                q,
                batch.cu_seqlens_q,
                k_cache,
                v_cache,
                batch.page_table,
                batch.cache_seqlens,
                batch.max_seqlen_q,
                batch.max_seqlen_k,
                **options,
            )
        else:
            attended = ops.mha_decode_with_kvcache(
                q, k_cache, v_cache, batch.page_table, batch.cache_seqlens, batch.max_seqlen_k, **options
            )
        return attended.flatten(1)

    # -- reading the weights --------------------------------------------------------------------------------------------------

    def _check_tensors(self, config: Config, source: TensorSource) -> None:
        check_source(config, source)

    @contextlib.contextmanager
    def _reading(self, source: TensorSource, console: Console | None) -> Iterator[None]:
        """Inside the block, tensors can be read, and the console shows the number of bytes read."""
        names, sizes = reading_order(self.config), bytes_of(source)
        columns = (TextColumn("loading the weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
        ahead = from_files(source) and self.device.type != "cpu"
        with Progress(*columns, console=console, disable=console is None) as progress:
            task = progress.add_task("", total=sum(sizes[name] for name in names))
            upload = Upload(self.device) if ahead and self.device.type == "cuda" else None
            reading = ReadAhead(source, names, upload=upload) if ahead else contextlib.nullcontext(source)
            with reading as reader:

                def get(name: str) -> Tensor:
                    tensor = reader.get(name)
                    progress.advance(task, sizes[name])
                    return tensor

                self._get = get
                yield
                del self._get
        if upload is not None:
            # PyTorch's allocator keeps memory freed by the upload stream for that stream, which is no longer used.
            torch.cuda.empty_cache()

    def _read(self, name: str) -> Tensor:
        return self._get(name).to(self.device, self.dtype)

    def _quantized(self, rows: Tensor, bias: Tensor | None) -> Linear:
        """Returns a projection whose weights ``[outputs, inputs]`` are quantised as `dense_weights` says."""
        if self.dense_weights == "none":
            return Linear(rows.t(), bias)
        quantize = self.ops.quantize_mxfp4 if self.dense_weights == "mxfp4" else self.ops.quantize_fp8
        weight, scale = quantize(rows)
        return Linear(weight.t(), bias, scale.t())

    def _read_linear(self, *names: str, bias: bool = True) -> Linear:
        """Reads one attention projection, or several concatenated along their outputs, and quantises it."""

        def joined(suffix: str) -> Tensor:
            return torch.cat([self._read(name + suffix) for name in names])

        return self._quantized(joined(".weight"), joined(".bias") if bias else None)

    def _read_layer(self, index: int) -> Layer:
        config, prefix = self.config, layer_prefix(index)
        attention = prefix + "self_attn."
        plan, experts = self._read_experts(prefix + "mlp.experts.")
        return Layer(
            attention_norm=self._read(prefix + "input_layernorm.weight"),
            qkv=self._read_linear(*(f"{attention}{x}_proj" for x in "qkv"), bias=config.attention_bias),
            output=self._read_linear(attention + "o_proj", bias=config.attention_bias),
            sinks=self._read(attention + "sinks").float(),
            window_left=config.window_left(index),
            mlp_norm=self._read(prefix + "post_attention_layernorm.weight"),
            router=Linear(self._read(prefix + "mlp.router.weight").t(), self._read(prefix + "mlp.router.bias")),
            experts=experts,
            plan=plan,
        )

    def _whole_layers(self) -> Any:
        """Returns the weights of all layers for `decoder_layers`, which refer to the layers' own tensors."""
        return self.ops.DecoderWeights(
            [
                self.ops.DecoderLayer(
                    input_norm=layer.attention_norm,
                    qkv=layer.qkv.weight.t(),
                    projection=layer.output.weight.t(),
                    norm=layer.mlp_norm,
                    router=layer.router.weight.t(),
                    experts=layer.experts,
                    window_left=layer.window_left,
                    qkv_bias=layer.qkv.bias,
                    projection_bias=layer.output.bias,
                    sinks=layer.sinks,
                    router_bias=layer.router.bias,
                    qkv_scale=None if layer.qkv.scale is None else layer.qkv.scale.t(),
                    projection_scale=None if layer.output.scale is None else layer.output.scale.t(),
                )
                for layer in self.layers
            ],
            self.summed_over,
        )

    def _read_experts(self, prefix: str) -> tuple[Any, Any]:
        """Returns the plan of a layer's experts, and the experts' weights prepared for this plan."""
        config = self.config
        packed = config.quantization == "mxfp4"
        plan = self.ops.moe_apply.plan(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.intermediate_size,
            dtype=self.dtype,
            device=self.device,
            weight_format="mxfp4" if packed else "dense",
            activation_dtype=self.activation_dtype,
            w13_interleaved=True,
            bias=True,
            alpha=config.swiglu_alpha,
            limit=config.swiglu_limit,
            beta=1.0,
        )
        read = self._read_packed if packed else self._read_dense
        w13, w13_scale = read(prefix + "gate_up_proj")
        w2, w2_scale = read(prefix + "down_proj")
        w13_bias, w2_bias = (self._read(f"{prefix}{name}_bias") for name in ("gate_up_proj", "down_proj"))
        weights = self.ops.MoEWeights(w13, w13_scale, w13_bias, w2, w2_scale, w2_bias)
        return plan, self.ops.moe_apply.prepare(weights, plan)

    def _read_packed(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns the packed MXFP4 values of one projection, ``[experts, outputs, inputs / 2]``, and their scales, ``[experts,
        outputs, inputs / 32]``. Both are uint8.
        """
        blocks, scales = self._get(name + "_blocks"), self._get(name + "_scales")
        return blocks.flatten(2).to(self.device), scales.to(self.device)

    def _read_dense(self, name: str) -> tuple[Tensor, None]:
        """Returns one projection's weight ``[experts, outputs, inputs]`` in the model's dtype, and None for the scales."""
        return self._read(name).transpose(1, 2).contiguous(), None
