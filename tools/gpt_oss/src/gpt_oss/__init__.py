"""A small runtime for GPT-OSS on tokenspeed-kernel's public API: model, paged KV cache, engine, demonstration, benchmark."""

from gpt_oss.cache import OutOfPages, PageAllocator, PagedKVCache
from gpt_oss.config import PRESETS, Config, ConfigError, RopeConfig, preset
from gpt_oss.engine import Engine
from gpt_oss.loader import Checkpoint, CheckpointError, RandomTensors, save_checkpoint
from gpt_oss.model import GptOss
from gpt_oss.request import Completion, Event, Request
from gpt_oss.sampling import Sampling

__all__ = [
    "PRESETS",
    "Checkpoint",
    "CheckpointError",
    "Completion",
    "Config",
    "ConfigError",
    "Engine",
    "Event",
    "GptOss",
    "OutOfPages",
    "PageAllocator",
    "PagedKVCache",
    "RandomTensors",
    "Request",
    "RopeConfig",
    "Sampling",
    "preset",
    "save_checkpoint",
]
