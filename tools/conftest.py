"""Makes Hypothesis test the tools without time limits, which a slow machine would exceed. packages/conftest.py does the same for
the packages.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("operators", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("operators")
