"""Makes Hypothesis test the tools without time limits, which a slow machine would exceed, and makes `processes` importable.
packages/conftest.py does the same for the packages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1] / "packages"))

settings.register_profile("operators", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("operators")
