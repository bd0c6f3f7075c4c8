"""Settings of the whole test run."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.patience import let_nixl_wait

# Before torch is imported, here and in the processes that tests start: on a shared machine threads
# that wait for each other in tiny operations cost a hundred times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Machines that run these tests are shared: a slow example is not a failure.
settings.register_profile("kvpd", deadline=None)
settings.load_profile("kvpd")


@pytest.fixture(scope="session", autouse=True)
def patient_nixl(request: pytest.FixtureRequest) -> None:
    """On CPUs; what is measured on GPUs is measured with NIXL as it comes."""
    if find_spec("nixl") and not any(i.get_closest_marker("gpu") for i in request.session.items):
        let_nixl_wait()
