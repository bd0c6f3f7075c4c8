"""Settings of the whole test run."""

from __future__ import annotations

from hypothesis import settings

# Machines that run these tests are shared: a slow example is not a failure.
settings.register_profile("kvpd", deadline=None)
settings.load_profile("kvpd")
