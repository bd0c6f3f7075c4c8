"""``kvpd demo``: the main job between two processes over real NIXL, every byte checked."""

from __future__ import annotations
