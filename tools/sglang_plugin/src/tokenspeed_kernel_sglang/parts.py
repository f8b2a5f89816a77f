"""Registers the plugin's parts with SGLang. A part is one of SGLang's hooks, and the layers that our kernels run through it:

* attention: the backend ``tokenspeed``, and built-in names that the settings replace, in SGLang's registry of backends.
* experts: our subclass of SGLang's configuration replaces the quantisation ``mxfp4``.
* norms, activations, rope: hooks around methods of SGLang's custom operators.
* sampling: our sampler takes the names of SGLang's built-in sampling backends for GPUs.
* decode step: SGLang's slot for kernels that run a whole decode step, see `megakernel`.

Without an eligible kernel, a layer or a call runs on SGLang's own code, and the receipt has the reason. SGLang keeps everything
else: scheduling, memory pools, loading, routing, and all communication between ranks.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from tokenspeed_kernel_base.installation import wrong_distributions
from tokenspeed_kernel_base.served import NotServedError
from tokenspeed_kernel_sglang import names
from tokenspeed_kernel_sglang.names import BACKEND
from tokenspeed_kernel_sglang.record import logger, record
from tokenspeed_kernel_sglang.settings import Settings

# SGLang's built-in attention backend, to which `BACKEND` falls back for models that our backends do not support.
FALLBACK = "triton"
# The name of the quantisation of GPT-OSS's experts.
QUANTIZATION = "mxfp4"
# SGLang's built-in sampling backends for GPUs, which our sampler replaces. Our sampler falls back to SGLang's own for some batches,
# and SGLang's own sampler rejects any other name.
SAMPLERS = ("flashinfer", "pytorch")
# SGLang's method that makes the caches of all layers.
POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers_normal"
# The names of SGLang's methods that this plugin has hooked in this process, and "sampling".
_hooked: set[str] = set()


def register_parts(settings: Settings) -> None:
    """Registers each enabled part. A part whose hook is missing is logged and skipped."""
    if not _is_our_core():
        return
    parts: list[tuple[str, bool, Callable[[], None]]] = [
        ("attention", settings.attention, lambda: _register_attention(settings.attention_replaces)),
        ("experts", settings.experts, _register_experts),
        ("norms", settings.norms, lambda: _register_layers("norms")),
        ("activations", settings.activations, lambda: _register_layers("activations")),
        ("rope", settings.rope, lambda: _register_layers("rope")),
        ("sampling", settings.sampling, _register_sampler),
    ]
    for name, wanted, add in parts:
        if not wanted:
            continue
        try:
            add()
        except (ImportError, AttributeError, TypeError) as error:  # a moved or changed hook raises one of these
            release = version("sglang")
            logger.error("tokenspeed_kernel_sglang: no %s, because a hook of SGLang %s is missing: %s", name, release, error)


def register_decode_step() -> None:
    """Fills SGLang's slot for kernels that run a whole decode step. Releases before 0.5.23 have no slot; nothing happens then."""
    if not _is_our_core():
        return
    try:
        from sglang.kernels.plugin_kernels.nvidia.spec import register
    except ImportError:
        logger.info("tokenspeed_kernel_sglang: SGLang %s has no slot for kernels of a whole step", version("sglang"))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tokenspeed_kernel_sglang.megakernel import stacked_caches

    register(architecture="GptOssForCausalLM", path="tokenspeed_kernel_sglang.megakernel:SPEC")
    if POOL not in _hooked:
        pkgutil.resolve_name(POOL)  # raises an error if the method is missing, which SGLang itself would only log
        _hooked.add(POOL)
        HookRegistry.register(POOL, stacked_caches, HookType.AROUND)


def _is_our_core() -> bool:
    """Whether the installed core is ours; logs distributions of another project that has functions of the same names."""
    wrong = wrong_distributions()
    for found in wrong:
        logger.error("tokenspeed_kernel_sglang: %s; %s", found, found.remedy)
    return all(found.name != "tokenspeed-kernel" for found in wrong)


def _register_attention(replaced: tuple[str, ...]) -> None:
    """Registers the backend `BACKEND`, and makes the names ``replaced`` select our backends, too."""
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    if BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(BACKEND)(_factory(BACKEND, ATTENTION_BACKENDS[FALLBACK]))
        server_args.add_attention_backend_choices([BACKEND])
    for name in replaced:
        if name not in ATTENTION_BACKENDS:
            logger.error("tokenspeed_kernel_sglang: %s is no attention backend of SGLang, so it is not replaced", name)
        elif name not in names.replaced:
            names.replaced.add(name)
            register_attention_backend(name)(_factory(name, ATTENTION_BACKENDS[name]))


def _factory(name: str, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a function that makes our backend for a model. For models that our backends do not support, it calls ``own``, which
    makes SGLang's backend.

    Args:
        name: the name that selects the backend. SGLang's models with latent attention choose the form of their calls by it.
        own: makes SGLang's backend.
    """

    def create(runner: Any) -> Any:
        from tokenspeed_kernel_sglang.attention import TokenspeedBackend
        from tokenspeed_kernel_sglang.latent import LatentBackend

        try:
            return LatentBackend(runner, name) if runner.use_mla_backend else TokenspeedBackend(runner)
        except NotServedError as error:
            record("attention", type(runner.model).__name__, reason=str(error))
            return own(runner)

    return create


def _register_experts() -> None:
    """Replaces SGLang's configuration of the quantisation `QUANTIZATION`, unless another plugin has replaced it."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    from tokenspeed_kernel_sglang.experts import GptOssConfig

    known = QUANTIZATION_METHODS.get(QUANTIZATION)
    if known is Mxfp4Config:
        QUANTIZATION_METHODS[QUANTIZATION] = GptOssConfig
    elif known is not GptOssConfig:
        logger.warning("tokenspeed_kernel_sglang: no experts, because SGLang's quantisation %s is %s here", QUANTIZATION, known)


def _register_sampler() -> None:
    """Registers our sampler under the names of SGLang's built-in sampling backends, see `SAMPLERS`."""
    from sglang.srt.layers import sampler

    from tokenspeed_kernel_sglang.sampling import TokenspeedSampler

    if "sampling" not in _hooked:  # SGLang warns about a second registration
        _hooked.add("sampling")
        for name in SAMPLERS:
            sampler.register_sampler_backend(name, TokenspeedSampler)


def _register_layers(part: str) -> None:
    """Wraps the methods of `layers.HOOKS` of one part."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from tokenspeed_kernel_sglang.layers import HOOKS

    for target, hook in HOOKS[part].items():
        pkgutil.resolve_name(target)  # raises an error for a missing method, which SGLang itself would only log
        if target not in _hooked:
            _hooked.add(target)
            HookRegistry.register(target, hook, HookType.AROUND)
