"""Fixtures: a vLLM configuration for a machine without a GPU. Process-wide settings are restored after each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ["TOKENSPEED_KERNEL_TUNED"] = "off"  # this machine's tuning results must not affect tests
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def vllm_config() -> Iterator[Any]:
    """Yields an active vLLM configuration, with bf16 as the model's dtype."""
    pytest.importorskip("vllm", reason="needs vLLM: `nox -s vllm` installs it")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    from tokenspeed_kernel_vllm.attention.serving import find_serving

    config = VllmConfig(device_config=DeviceConfig("cpu"))
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    find_serving.cache_clear()
    try:
        with set_current_vllm_config(config), torch.inference_mode():
            yield config
    finally:
        torch.set_default_dtype(dtype)
        find_serving.cache_clear()


@pytest.fixture
def one_process(vllm_config: Any, tmp_path: Any) -> Iterator[Any]:
    """Creates vLLM's process groups with this process only."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    init_distributed_environment(1, 0, f"file://{tmp_path}/rendezvous", 0, "gloo")
    initialize_model_parallel(1, 1)
    yield vllm_config
    destroy_model_parallel()
    destroy_distributed_environment()
