"""Captures the calls of an engine without the device that will run it, from which ``tokenspeed-kernel pack build`` makes a pack.

The model and its cache are on PyTorch's meta device: their tensors have shapes and no data, so that no memory is needed and nothing
is computed. An engine's warm-up makes every call that requests will make. The captured calls have the same shapes as on the device.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gpt_oss.cache import PagedKVCache
from gpt_oss.config import Config
from gpt_oss.engine import Engine
from gpt_oss.loader import RandomTensors
from gpt_oss.model import GptOss
from gpt_oss.warmup import WarmUp
from tokenspeed_kernel import shape_capture
from tokenspeed_kernel.workbench.packing import device_of
from tokenspeed_kernel_base.platform import use_platform

META = torch.device("meta")


class ShapesOnly(RandomTensors):
    """Tensors with the shapes and dtypes of a configuration, and without data. The arguments are those of `RandomTensors`."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__(config, dtype=dtype, device=META)

    def get(self, name: str) -> Tensor:
        return torch.empty(self.shapes()[name], dtype=getattr(torch, self.dtypes()[name]), device=META)


def capture_calls(
    path: str | Path,
    config: Config,
    arch: str,
    dtype: torch.dtype = torch.bfloat16,
    pages: int = 4096,
    page_size: int = 64,
    prefill_tokens: int = 512,
    max_sequences: int = 64,
    max_positions: int | None = None,
    activation_dtype: str = "none",
    dense_weights: str = "none",
) -> WarmUp:
    """Adds the calls of an engine's warm-up to a file of captured calls. Returns the number of passes, and the duration.

    Args:
        path: the file.
        config: the model's configuration.
        arch: the device that will run the engine: ``"h200"``, ``"mi355x"``, ``"sm_90a"``. Experts are planned for it.
        dtype, max_positions, activation_dtype, dense_weights: see `GptOss`.
        pages, page_size: see `PagedKVCache`.
        prefill_tokens, max_sequences: see `Engine`.

    Raises:
        TypeError, ValueError: an argument is not as stated, or ``arch`` is unknown; the message names it.
        OSError: the file cannot be written, or is no capture.
    """
    with use_platform(device_of(arch)):
        source = ShapesOnly(config, dtype)
        model = GptOss(config, source, dtype, META, max_positions, activation_dtype=activation_dtype, dense_weights=dense_weights)
        cache = PagedKVCache(config, pages, page_size, dtype, META)
        with shape_capture(path):
            # A device with graphs runs the same decode passes as this engine, in the same static buffers.
            engine = Engine(model, cache, prefill_tokens, max_sequences, decode="static", warm="all")
    assert engine.warmed is not None
    return engine.warmed
