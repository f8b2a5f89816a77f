"""Settings for the tests: SGLang can be imported on a machine without a GPU, and this machine's tuning results do not affect
tests."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENSPEED_KERNEL_TUNED"] = "off"
sys.path.append(str(Path(__file__).parent))

if importlib.util.find_spec("sglang") is not None:
    from absent import stand_in

    stand_in()


@pytest.fixture(autouse=True)
def _empty_record() -> Iterator[None]:
    """Clears the recorded decisions before and after each test, so the receipt of a test has only its own decisions."""
    if importlib.util.find_spec("tokenspeed_kernel_sglang") is None:
        yield
        return
    from tokenspeed_kernel_sglang import layers, record

    record.forget()
    layers._decide.cache_clear()
    yield
    record.forget()
