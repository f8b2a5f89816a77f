"""What is registered with vLLM, part by part."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from vllm.logger import init_logger

from tokenspeed_kernel_vllm.settings import Settings

# Below vLLM's own name, so that its logging settings hold for us too.
logger = init_logger("vllm.plugins.tokenspeed_kernel")

BACKEND = "tokenspeed_kernel_vllm.attention.backend.TokenspeedBackend"
QUANTIZATION = "gpt_oss_mxfp4"
DENSE = "UnquantizedFusedMoEMethod"


def register_parts(settings: Settings) -> None:
    """Registers each part that is switched on. One whose hook is missing is logged and left out."""
    parts: list[tuple[str, bool, Callable[[], None]]] = [
        ("attention", settings.attention, _register_attention),
        ("GPT-OSS layers", settings.experts or settings.linear, _register_quantization),
        ("unquantised experts", settings.other_experts, _register_dense_experts),
        ("fp8 experts", settings.other_experts, _register_fp8_experts),
    ]
    for name, wanted, add in parts:
        if not wanted:
            continue
        try:
            add()
        except (ImportError, AttributeError, TypeError) as error:  # what a hook that moved or changed its arguments raises
            import vllm

            logger.error("tokenspeed_kernel_vllm: no %s, because a hook of vLLM %s is missing: %s", name, vllm.__version__, error)


def _register_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    # A name is given to vLLM, and the class imported where a layer asks for it; what would fail there fails here instead.
    import_module(BACKEND.rpartition(".")[0])
    taken = custom.get_path() if custom.is_overridden() else BACKEND
    if taken != BACKEND:
        logger.warning("tokenspeed_kernel_vllm: no attention, because %s is the attention backend CUSTOM already", taken)
        return
    register_backend(custom, BACKEND)


def _register_quantization() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.experts.config import GptOssConfig

    register_quantization_config(QUANTIZATION)(GptOssConfig)


def _register_dense_experts() -> None:
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot

    from tokenspeed_kernel_vllm.experts.routed import DenseExperts

    taken = op_registry_oot.get(DENSE, DenseExperts)
    if taken is not DenseExperts:
        logger.warning("tokenspeed_kernel_vllm: no unquantised experts, because %s serves them already", taken)
    elif DENSE not in op_registry_oot:
        CustomOp.register_oot(DenseExperts, name=DENSE)


def _register_fp8_experts() -> None:
    from vllm.model_executor.layers.quantization import register_quantization_config

    from tokenspeed_kernel_vllm.experts.routed import BlockFp8Config

    register_quantization_config("fp8")(BlockFp8Config)
