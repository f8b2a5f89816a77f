"""Settings for the tests: transformers uses no network, and this machine's tuning results do not affect tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["TOKENSPEED_KERNEL_TUNED"] = "off"
sys.path.append(str(Path(__file__).parent))
