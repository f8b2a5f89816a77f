"""Tests of device code by itself. Without Triton there is nothing to import; with it they run on a GPU or interpreted."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
