"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def eventually(holds: Callable[[], Any], seconds: float = 30.0) -> bool:
    """Whether it holds within this time; much more than anything takes, for machines are shared."""
    give_up_at = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.002)
    return True
