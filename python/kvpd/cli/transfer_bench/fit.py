"""A link model from what was measured, for `kvpd.LinkModel` on this machine."""

from __future__ import annotations

from typing import Any

import numpy as np

_MIN_ROWS = 4


def fit_link(rows: list[dict[str, Any]]) -> dict[str, float] | None:
    """Seconds of reading as requests x a + descriptors x b + bytes x c, by least squares.

    Relative errors count, so that short requests weigh as much as long ones. Rows that convert
    while they read, or that pass through several chunks, are left out.

    Returns:
        Arguments of `LinkModel`; None where too little was measured to tell the three apart.
    """
    used = [row for row in rows if row["arm"] in ("stock", "half")]
    if len(used) < _MIN_ROWS:
        return None
    table = np.array(
        [[row["requests"], row["descriptors"]["merged"], row["bytes"]] for row in used],
        dtype=np.float64,
    )
    seconds = np.array([row["read"]["median"] for row in used])
    relative = table / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    solved, _, rank, _ = np.linalg.lstsq(relative / scale, np.ones(len(used)), rcond=None)
    chunk, descriptor, byte = (float(value) for value in solved / scale)
    if rank < 3 or min(chunk, descriptor, byte) <= 0:
        return None
    return {
        "bytes_per_second": 1 / byte,
        "seconds_per_descriptor": descriptor,
        "seconds_per_chunk": chunk,
    }
