"""A progress bar on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress(description: str, num_steps: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """Yield what to call after each step. The bar goes to standard error."""
    if quiet or not sys.stderr.isatty():
        yield lambda: None
        return
    # rich honours NO_COLOR itself; `transient` leaves nothing behind in a scrollback.
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=num_steps)
        yield lambda: bar.advance(task)
