"""Settings of the whole test run."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch is imported, here and in the processes that tests start: on a shared machine threads
# that wait for each other in tiny operations cost a hundred times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines that run these tests are shared: a slow example is not a failure.
settings.register_profile("kvpd", deadline=None)
settings.load_profile("kvpd")
