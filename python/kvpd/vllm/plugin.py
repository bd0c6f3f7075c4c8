"""What vLLM loads of kvpd by itself: a general plugin, off unless its switch is on."""

from __future__ import annotations

import os

from kvpd.errors import KvpdError

SWITCH = "KVPD_FUSED_WRITERS"


def register_fused_writers() -> None:
    """Let AITER FA write its shuffled pages with kvpd's kernels, where `SWITCH` is 1.

    vLLM calls this in each of its processes.

    Raises:
        KvpdError: the switch has another value, or this vLLM is not one that kvpd was tried on.
    """
    value = os.environ.get(SWITCH, "0")
    if value in ("", "0"):
        return
    if value != "1":
        raise KvpdError(
            f"{SWITCH} is {value!r}; 1 is on, 0 or nothing is off",
            code="switch-value",
            field=SWITCH,
            got=value,
            expected="0 or 1",
        )
    # Deferred: with the switch off, nothing of vLLM is touched.
    from kvpd.vllm.adapter import aiter_fa

    aiter_fa.register()
