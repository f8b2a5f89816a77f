"""Makes the tests' shared module importable, prevents network access of transformers, and runs tests in one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt_oss import benchmark, breakdown

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def few_samples() -> Iterator[None]:
    """Makes the benchmark time few calls, because tests check what its results are made of, and not times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(breakdown, "_BUDGET_S", 0.001)
        patch.setattr(benchmark, "_REPLAYS", 3)
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sets PyTorch's number of threads to one. The matrices are too small for more threads, which would slow down other processes
    on the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
