"""Let one function of kvpd's raise, once, wherever it is called from; inside an engine's process.

Functions are found by watching a request: every call that kvpd's own code makes for it. What vLLM
calls itself is left out: it is the seam, and what it calls inside is what can fail.
"""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import kvpd

HOME = str(Path(kvpd.__file__).parent)
# What stands between an exception and the engine. One of them has to hold.
BOUNDARIES = {
    "ProvingWorker._alone",
    "ProvingWorker.going_on",
    "ProvingWorker._fail",
    "KvpdScheduler._alone",
    "Refusal.of",
}


class InjectedError(RuntimeError):
    """Raised by the test."""


class Watch:
    """Notes which functions kvpd's code calls, on every thread that starts after it did."""

    def __init__(self) -> None:
        self.codes: dict[str, CodeType] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if (
            event == "call"
            and code.co_filename.startswith(HOME)
            and caller is not None
            and caller.f_code.co_filename.startswith(HOME)
        ):
            self.codes[f"{Path(code.co_filename).stem}:{code.co_qualname}"] = code

    def start(self) -> None:
        """From now on."""
        sys.setprofile(self)
        threading.setprofile(self)

    def stop(self) -> list[str]:
        """The functions that can be made to raise; threads go on noting, for nobody."""
        sys.setprofile(None)
        threading.setprofile(None)
        # vLLM freezes what it has imported, and what is frozen is not listed.
        gc.unfreeze()
        functions = {
            item.__code__: item
            for item in gc.get_objects()
            if isinstance(item, FunctionType) and item.__code__.co_filename.startswith(HOME)
        }
        self.found = {
            name: functions[code]
            for name, code in sorted(self.codes.items())
            if code in functions and not code.co_freevars and code.co_qualname not in BOUNDARIES
        }
        return list(self.found)


class Raise:
    """The next call of a function raises, and none after it."""

    def __init__(self, function: FunctionType) -> None:
        original = function.__code__
        self.raised = 0

        def restore() -> None:
            function.__code__ = original
            self.raised += 1

        # No closure: a function's code may only be replaced by one with as many free variables.
        function.__globals__["_restore_and_raise"] = (restore, InjectedError)

        def stand_in(*_: Any, **__: Any) -> None:
            restore, error = _restore_and_raise  # type: ignore[name-defined] # noqa: F821
            restore()
            raise error("injected by the test")

        self.undo = restore
        function.__code__ = stand_in.__code__
