"""Every interface between vLLM and this package, by name. The README's table has the same rows."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = "vllm.v1.attention"
MOE = "vllm.model_executor.layers.fused_moe"
LINEAR = "vllm.model_executor.layers.linear"
QUANTIZATION = "vllm.model_executor.layers.quantization"
MLA = "vllm.model_executor.layers.attention.mla_attention"
MLA_PREFILL = f"{ATTENTION}.backends.mla.prefill"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors"
NVFP4_EXPERTS = f"{COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"
MXFP4_EXPERTS = f"{COMPRESSED}.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4"
FP8_UTILS = f"{QUANTIZATION}.utils.fp8_utils"


@dataclass(frozen=True)
class Hook:
    """A vLLM interface that is called, subclassed or read.

    Attributes:
        path: module and name.
        parameters: parameters that we pass to the function or class, or that vLLM passes to our replacement. Other parameters must
            have a default.
        attributes: attributes of a class or enumeration that this package reads or overrides; for a dataclass, its fields.
        partial: whether the function has further parameters, on which this package does not depend.
        until: the first release that lacks the hook. The package works with that release without the hook.
    """

    path: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    partial: bool = False
    until: str = ""


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FORWARD = "self layer query key value kv_cache attn_metadata output output_scale output_block_scale"
IMPL = (
    "self num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap attn_type "
    "kv_sharing_target_layer_name"
)
LATENT = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim qk_head_dim v_head_dim kv_b_proj indexer q_pad_num_heads"
PREFILL = "num_heads scale kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim vllm_config"
BUILD_DECODE = (
    "self block_table_tensor seq_lens_device max_seq_len query_start_loc_cpu query_start_loc_device num_decode_tokens "
    "dcp_tot_seq_lens_device"
)
BLOCK_SHAPE = "layer input_size output_size input_size_per_partition output_partition_sizes block_size"
COMMON = (
    "query_start_loc query_start_loc_cpu seq_lens num_reqs num_actual_tokens max_query_len max_seq_len block_table_tensor "
    "slot_mapping causal dcp_local_seq_lens mm_req_doc_ranges rswa_prefix_lens encoder_seq_lens"
)
VALIDATE = (
    "get_name get_impl_cls get_builder_cls get_supported_kernel_block_sizes "
    "supported_dtypes supported_kv_cache_dtypes supports_sink supports_sliding_window supports_head_size "
    "forward_includes_kv_cache_update validate_configuration"
)
ROUTED = (
    "moe_config renormalize use_grouped_topk custom_routing_function scoring_func routed_scaling_factor swiglu_limit swiglu_alpha "
    "swiglu_beta e_score_correction_bias apply_router_weight_on_input"
)
MOE_CONFIG = (
    "num_experts num_local_experts experts_per_token hidden_dim intermediate_size_per_partition in_dtype has_bias device "
    "activation moe_parallel_config moe_backend is_lora_enabled rocm_aiter_fmoe_enabled swiglu_limit swiglu_alpha swiglu_beta"
)
METHOD = (
    "create_weights process_weights_after_loading get_fused_moe_quant_config is_monolithic maybe_roundup_sizes apply_monolithic"
)
PATTERN = "uses_weight_scale_2_pattern"  # vLLM's loader of ModelOpt's experts asks for it
CREATE = "self layer num_experts hidden_size intermediate_size_per_partition params_dtype extra_weight_attrs"
APPLY = "self layer x topk_weights topk_ids shared_experts shared_experts_input"

HOOKS = [
    Hook("vllm.plugins.load_general_plugins"),
    Hook("vllm.logger.init_logger", words("name")),
    Hook(f"{ATTENTION}.backends.registry.register_backend", words("backend class_path")),
    Hook(f"{ATTENTION}.backends.registry.AttentionBackendEnum", attributes=words("CUSTOM get_path is_overridden")),
    Hook(f"{ATTENTION}.backend.AttentionBackend", attributes=words(VALIDATE)),
    Hook(
        f"{ATTENTION}.backend.AttentionBackend.get_kv_cache_shape",
        words("num_blocks block_size num_kv_heads head_size cache_dtype_str"),
        until="0.33",
    ),
    Hook(f"{ATTENTION}.backend.AttentionBackend.get_kv_cache_stride_order", words("include_num_layers_dimension"), until="0.33"),
    Hook(f"{ATTENTION}.backend.AttentionImpl.__init__", words(IMPL)),
    Hook(f"{ATTENTION}.backend.AttentionImpl.forward", words(FORWARD)),
    Hook(
        f"{ATTENTION}.backends.triton_attn.TritonAttentionImpl.do_kv_cache_update",
        words("self layer key value kv_cache slot_mapping"),
    ),
    Hook(
        f"{ATTENTION}.backend.AttentionMetadataBuilder",
        words("kv_cache_spec layer_names vllm_config device"),
        words("supports_update_block_table _init_reorder_batch_threshold build_for_cudagraph_capture"),
    ),
    Hook(
        f"{ATTENTION}.backend.AttentionMetadataBuilder.build",
        words("self common_prefix_len common_attn_metadata fast_build"),
    ),
    Hook(f"{ATTENTION}.backend.AttentionMetadataBuilder.update_block_table", words("self metadata blk_table slot_mapping")),
    Hook(f"{ATTENTION}.backend.AttentionMetadataBuilder.get_cudagraph_support", words("vllm_config kv_cache_spec")),
    Hook(f"{ATTENTION}.backend.CommonAttentionMetadata", attributes=words(COMMON)),
    Hook(f"{ATTENTION}.backend.AttentionCGSupport", attributes=words("ALWAYS UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE")),
    Hook(f"{ATTENTION}.backends.utils.split_decodes_and_prefills", words("common_attn_metadata decode_threshold require_uniform")),
    Hook(f"{ATTENTION}.backends.utils.get_kv_cache_layout", until="0.33"),
    Hook("vllm.model_executor.layers.attention.Attention.__init__", words("attn_backend extra_impl_args"), partial=True),
    Hook("vllm.config.get_layers_from_vllm_config", words("vllm_config layer_type layer_names")),
    Hook("vllm.config.get_current_vllm_config"),
    Hook("vllm.config.SchedulerConfig", attributes=words("max_num_batched_tokens max_num_seqs")),
    Hook("vllm.config.ModelConfig", attributes=words("max_model_len")),
    Hook(
        "vllm._custom_ops.reshape_and_cache_flash",
        words("key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale"),
    ),
    Hook(f"{QUANTIZATION}.register_quantization_config", words("quantization")),
    Hook(f"{QUANTIZATION}.mxfp4.GptOssMxfp4Config.get_quant_method", words("self layer prefix")),
    Hook(f"{LINEAR}.UnquantizedLinearMethod", attributes=words("create_weights process_weights_after_loading")),
    Hook(f"{LINEAR}.ReplicatedLinear", words("prefix"), partial=True),
    Hook("vllm.model_executor.custom_op.PluggableLayer.register_oot", words("_decorated_layer_cls name")),
    Hook(f"{LINEAR}.UnquantizedLinearMethod.apply", words("self layer x bias")),
    Hook(f"{MOE}.FusedMoEMethodBase", words("moe"), words(METHOD)),
    Hook(f"{MOE}.FusedMoEMethodBase.create_weights", words(CREATE)),
    Hook(f"{MOE}.FusedMoEMethodBase.apply_monolithic", words("self layer x router_logits input_ids")),
    Hook(
        f"{MOE}.FusedMoEMethodBase.maybe_roundup_sizes",
        words("self hidden_size intermediate_size_per_partition act_dtype moe_parallel_config"),
    ),
    Hook(f"{MOE}.RoutedExperts.__init__", words(ROUTED), partial=True),
    Hook(f"{MOE}.RoutedExperts", attributes=words("expert_map")),
    Hook(f"{MOE}.FusedMoEConfig", attributes=words(MOE_CONFIG)),
    Hook(f"{MOE}.FusedMoEParallelConfig", attributes=words("dp_size pcp_size sp_size use_ep enable_eplb")),
    Hook(f"{MOE}.activation.MoEActivation", attributes=words("SWIGLUOAI SILU")),
    Hook(f"{MOE}.FusedMoEMethodBase.apply", words(APPLY)),
    Hook("vllm.model_executor.custom_op.CustomOp.register_oot", words("_decorated_op_cls name")),
    Hook("vllm.model_executor.custom_op.op_registry_oot"),
    Hook(f"{MOE}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod", words("moe"), words(METHOD)),
    Hook(f"{MOE}.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.apply", words(APPLY)),
    Hook(f"{QUANTIZATION}.fp8.Fp8Config.get_quant_method", words("self layer prefix")),
    Hook(f"{QUANTIZATION}.fp8.Fp8Config.from_config", words("config")),
    Hook(f"{QUANTIZATION}.fp8.Fp8MoEMethod", words("quant_config layer"), words(METHOD)),
    # latent attention
    Hook(f"{MLA_PREFILL}.registry.register_mla_prefill_backend", words("backend class_path")),
    Hook(f"{MLA_PREFILL}.registry.MLAPrefillBackendEnum", attributes=words("CUSTOM get_path is_overridden")),
    Hook(f"{MLA_PREFILL}.base.MLAPrefillBackend", words(PREFILL), words("get_name prepare_metadata run_prefill_context_chunk")),
    Hook(f"{MLA_PREFILL}.base.MLAPrefillBackend.run_prefill_new_tokens", words("self q k v return_softmax_lse out output_scale")),
    Hook(
        f"{MLA}.MLACommonBackend",
        attributes=words("get_name get_impl_cls get_builder_cls is_mla validate_configuration get_preferred_block_size"),
    ),
    Hook(f"{MLA}.MLACommonImpl.__init__", words(f"{IMPL} {LATENT}")),
    Hook(f"{MLA}.MLACommonImpl.forward_mqa", words("self q kv_c_and_k_pe_cache attn_metadata layer")),
    Hook(
        f"{ATTENTION}.backend.MLAAttentionImpl.do_kv_cache_update",
        words("self kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale"),
        partial=True,
    ),
    Hook(f"{MLA}.MLACommonMetadataBuilder", words("kv_cache_spec layer_names vllm_config device"), partial=True),
    Hook(f"{MLA}.MLACommonMetadataBuilder._build_decode", words(BUILD_DECODE), partial=True),
    Hook(f"{MLA}.MLACommonDecodeMetadata", attributes=words("block_table seq_lens dcp_tot_seq_lens")),
    Hook(f"{MLA}.QueryLenSupport", attributes=words("VARLEN")),
    # fp8 linear layers
    Hook(f"{LINEAR}.LinearMethodBase", attributes=words("create_weights apply process_weights_after_loading")),
    Hook(f"{LINEAR}.register_weight_loader_v2_supported_method", words("cls")),
    Hook(f"{QUANTIZATION}.fp8.Fp8LinearMethod", words("quant_config")),
    Hook(f"{FP8_UTILS}.validate_fp8_block_shape", words(BLOCK_SHAPE)),
    Hook(f"{FP8_UTILS}.create_fp8_weight_parameter", words("output_size_per_partition input_size_per_partition weight_loader")),
    Hook(
        f"{FP8_UTILS}.create_fp8_scale_parameter",
        words("parameter_type output_partition_sizes input_size_per_partition block_size weight_loader"),
        partial=True,
    ),
    Hook(f"{FP8_UTILS}.create_fp8_input_scale", words("output_partition_sizes weight_loader")),
    Hook(f"{COMPRESSED}.compressed_tensors.CompressedTensorsConfig.get_quant_method", words("self layer prefix")),
    Hook(f"{COMPRESSED}.compressed_tensors.CompressedTensorsLinearMethod"),
    Hook(f"{COMPRESSED}.schemes.CompressedTensorsW8A8Fp8", words("weight_quant is_static_input_scheme")),
    # MXFP4 and NVFP4 layers
    Hook(f"{COMPRESSED}.compressed_tensors.CompressedTensorsConfig.get_scheme_dict", words("self layer layer_name")),
    Hook(f"{COMPRESSED}.schemes.CompressedTensorsW4A4Fp4", words("use_a16")),
    Hook(f"{COMPRESSED}.schemes.CompressedTensorsW4A4Mxfp4"),
    Hook(f"{QUANTIZATION}.modelopt.ModelOptNvFp4Config.get_quant_method", words("self layer prefix")),
    Hook(f"{QUANTIZATION}.modelopt.ModelOptMixedPrecisionConfig.get_quant_method", words("self layer prefix")),
    Hook(f"{QUANTIZATION}.modelopt.ModelOptNvFp4LinearMethod", until="0.33"),
    Hook(f"{QUANTIZATION}.modelopt.ModelOptNvFp4W4A16LinearMethod", until="0.33"),
    Hook(f"{QUANTIZATION}.modelopt.ModelOptNvFp4FusedMoE", words("quant_config moe_config"), words(f"{METHOD} {PATTERN}")),
    Hook(f"{NVFP4_EXPERTS}.CompressedTensorsW4A4Nvfp4MoEMethod", words("moe"), words(f"{METHOD} {PATTERN}"), partial=True),
    Hook(f"{MXFP4_EXPERTS}.CompressedTensorsW4A4Mxfp4MoEMethod", words("moe"), words(METHOD)),
    Hook(f"{QUANTIZATION}.quark.quark_moe.QuarkOCP_MX_MoEMethod", attributes=words(METHOD)),
    Hook(f"{QUANTIZATION}.quark.quark.QuarkConfig.get_quant_method", words("self layer prefix")),
    Hook(f"{QUANTIZATION}.quark.quark.QuarkLinearMethod"),
    Hook(f"{QUANTIZATION}.quark.schemes.QuarkOCP_MX"),
    Hook(f"{QUANTIZATION}.utils.quant_utils.kNvfp4Static"),
    Hook(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn.ChunkGatedDeltaRule.forward_native",
        words(
            "self q k v g beta initial_state output_final_state cu_seqlens chunk_indices chunk_offsets use_qk_l2norm_in_kernel "
            "core_attn_out"
        ),
    ),
    Hook(
        "vllm.model_executor.layers.layernorm.RMSNormGated.__init__",
        words("self hidden_size eps group_size norm_before_gate device dtype activation"),
    ),
    Hook("vllm.model_executor.layers.layernorm.RMSNormGated.forward_native", words("self x z")),
    Hook("vllm.ir.ops.rms_norm.register_impl", words("provider supported supports_args"), partial=True),
    Hook("vllm.ir.ops.fused_add_rms_norm.register_impl", words("provider supported supports_args"), partial=True),
    Hook("vllm.model_executor.utils.replace_parameter", words("layer param_name"), partial=True),
    Hook("vllm.model_executor.utils.set_weight_attrs", words("weight weight_attrs")),
]
