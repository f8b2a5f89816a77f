"""Properties are tried without limits of time, which a slow machine would exceed: as packages/conftest.py says it for packages."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("operators", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("operators")
