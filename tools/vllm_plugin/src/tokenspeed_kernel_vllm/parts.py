"""Registers the plugin's parts with vLLM. A part is one of vLLM's hooks, and the layers that our kernels run through it:

* attention, MLA prefill: the backend CUSTOM in vLLM's registries of attention backends. The user selects it by an option.
* GPT-OSS layers: the new quantisation ``gpt_oss_mxfp4``, which the user selects by an option.
* fp8, compressed-tensors, ModelOpt and Quark layers: our subclasses replace vLLM's configurations of these quantisations.
* routers, unquantised experts, the gated delta rule, gated norms: our subclasses replace vLLM's classes, by vLLM's registry of
  out-of-tree operators.
* norms: a provider of vLLM's IR.

An eligible kernel is searched for when a layer is built. Without one, an attention backend raises an error, because the user has
selected it. All other layers then run on vLLM's own method, and one line of the log has the reason. vLLM keeps everything else:
scheduling, cache allocation, loading, routing unless a part says otherwise, sampling, and all communication between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm.logger import init_logger

from tokenspeed_kernel_base.installation import wrong_distributions
from tokenspeed_kernel_vllm.settings import Settings, core_is_there

# The logger is a child of vLLM's logger, so that vLLM's logging settings apply here, too.
logger = init_logger("vllm.plugins.tokenspeed_kernel")

BACKEND = "tokenspeed_kernel_vllm.attention.backend.TokenspeedBackend"
MLA_BACKEND = "tokenspeed_kernel_vllm.mla.backend.LatentBackend"
MLA_PREFILL = "tokenspeed_kernel_vllm.mla.prefill.LatentPrefill"
QUANTIZATION = "gpt_oss_mxfp4"
# Names of the vLLM classes that this plugin replaces as a whole.
DENSE, ROUTERS = "UnquantizedFusedMoEMethod", "ReplicatedLinear"
DELTA_RULE, GATED_NORM = "ChunkGatedDeltaRule", "RMSNormGated"


def register_parts(settings: Settings) -> None:
    """Registers each enabled part. A part whose hook is missing is logged and skipped.

    Each part imports its hook by itself, so that a hook that vLLM has moved disables only its own part.
    """
    for wrong in wrong_distributions():
        logger.error("tokenspeed_kernel_vllm: %s; %s", wrong, wrong.remedy)
    # If a switch is not set, the device decides whether MXFP4 layers run on our kernels, and it is not known yet. So the hook of
    # these layers is registered, and decides for each layer when the layer is built.
    mxfp4 = settings.fp4_linear is not False or settings.other_experts is not False
    others = bool(settings.other_experts)
    fp4 = others or bool(settings.fp4_linear)
    parts: list[tuple[str, bool, Callable[[], None]]] = [
        ("attention", settings.attention, lambda: _register_attention(MLA_BACKEND if settings.mla else BACKEND)),
        ("MLA prefill", settings.attention and settings.mla, _register_mla_prefill),
        ("GPT-OSS layers", settings.experts or settings.linear, _register_quantization),
        ("routers", settings.linear and core_is_there(), _register_routers),
        ("norms", core_is_there(), _register_norms),
        ("unquantised experts", others, _register_dense_experts),
        ("fp8 layers", others or settings.fp8_linear, _register_fp8),
        ("compressed-tensors layers", settings.fp8_linear or mxfp4, _register_compressed),
        ("ModelOpt layers", fp4, _register_modelopt),
        ("Quark layers", fp4, _register_quark),
        ("gated delta rule", settings.delta_rule and core_is_there(), _register_delta_rule),
        ("gated norms", settings.gated_norms and core_is_there(), _register_gated_norms),
    ]
    for name, wanted, add in parts:
        if not wanted:
            continue
        try:
            add()
        except (ImportError, AttributeError, TypeError) as error:  # a moved or changed hook raises one of these
            import vllm

            logger.error("tokenspeed_kernel_vllm: no %s, because a hook of vLLM %s is missing: %s", name, vllm.__version__, error)


def _register_attention(path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    _name_backend("attention", path, AttentionBackendEnum.CUSTOM, register_backend)


def _register_mla_prefill() -> None:
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend

    _name_backend("MLA prefill", MLA_PREFILL, MLAPrefillBackendEnum.CUSTOM, register_mla_prefill_backend)


def _name_backend(kind: str, path: str, custom: Any, register: Callable[[Any, str], Any]) -> None:
    """Registers a class as vLLM's backend CUSTOM of some kind, unless another class is registered under this name."""
    # vLLM gets the class's name, and imports the class when a layer needs it. Importing the module here makes an import failure
    # visible now.
    import_module(path.rpartition(".")[0])
    taken = custom.get_path() if custom.is_overridden() else path
    if taken != path:
        logger.warning("tokenspeed_kernel_vllm: no %s, because %s is the %s backend CUSTOM already", kind, taken, kind)
        return
    register(custom, path)


def _register_quantization() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.experts.config import GptOssConfig

    register_quantization_config(QUANTIZATION)(GptOssConfig)


def _register_routers() -> None:
    from vllm.model_executor.custom_op import PluggableLayer

    from tokenspeed_kernel_vllm.linear import RouterLinear

    _replace("routers", ROUTERS, RouterLinear, PluggableLayer)


def _register_dense_experts() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from tokenspeed_kernel_vllm.experts.routed import DenseExperts

    _replace("unquantised experts", DENSE, DenseExperts, CustomOp)


def _register_delta_rule() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from tokenspeed_kernel_vllm.delta_rule import DeltaRule

    _replace("gated delta rule", DELTA_RULE, DeltaRule, CustomOp)


def _register_gated_norms() -> None:
    from vllm.model_executor.custom_op import CustomOp

    from tokenspeed_kernel_vllm.gated_norms import GatedNorm

    _replace("gated norms", GATED_NORM, GatedNorm, CustomOp)


def _register_norms() -> None:
    # Importing the module registers the norms, once per process.
    import_module("tokenspeed_kernel_vllm.norms")


def _replace(part: str, name: str, ours: type[Any], kind: Any) -> None:
    """Replaces vLLM's class with this name by our class, unless another replacement is registered."""
    from vllm.model_executor.custom_op import op_registry_oot

    if name not in op_registry_oot:
        kind.register_oot(ours, name=name)
    elif op_registry_oot[name] is not ours:
        logger.warning("tokenspeed_kernel_vllm: no %s, because %s replaces %s already", part, op_registry_oot[name], name)


def _register_fp8() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.experts.routed import BlockFp8Config

    register_quantization_config("fp8")(BlockFp8Config)


def _register_compressed() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.checkpoints.compressed_tensors import CompressedConfig

    register_quantization_config("compressed-tensors")(CompressedConfig)


def _register_modelopt() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.checkpoints.modelopt import ModelOptConfig, ModelOptMixedConfig

    register_quantization_config("modelopt_fp4")(ModelOptConfig)
    register_quantization_config("modelopt_mixed")(ModelOptMixedConfig)


def _register_quark() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.checkpoints.quark import QuarkMxfp4Config

    register_quantization_config("quark")(QuarkMxfp4Config)
