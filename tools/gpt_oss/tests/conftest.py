"""Makes the tests' shared module importable, prevents network access of transformers, and runs tests in one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sets PyTorch's number of threads to one. The matrices are too small for more threads, which would slow down other processes
    on the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
