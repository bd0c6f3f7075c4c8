"""Which pairs of engines are compared: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kvpd.words import Placement

# "standard" is TRITON_ATTN, "flash" FLASH_ATTN: both keep standard pages, and compute otherwise.
Backend = Literal["standard", "flash", "shuffled"]
Connector = Literal["stock", "kvpd"]


@dataclass(frozen=True)
class Side:
    """One engine: how it keeps pages, whose connector it loads, ``kv_connector_extra_config``."""

    backend: Backend
    connector: Connector
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Arm:
    """One pair.

    Attributes:
        is_right: its tokens and pages have to be right; else all of its tokens have to be wrong,
            without a word: the defect.
        on_main_stream: test only, conversions run on the model's stream.
        placement: how kvpd has to bring the pages; None where stock brings them.
    """

    prefill: Side
    decode: Side
    is_right: bool = True
    on_main_stream: bool = False
    placement: Placement | None = None

    @property
    def converts(self) -> bool:
        """Whether the pages arrive in another format than they were sent in."""
        shuffles = [side.backend == "shuffled" for side in (self.prefill, self.decode)]
        return self.is_right and shuffles[0] != shuffles[1]


EQUAL = Side("standard", "stock")
KVPD = Side("standard", "kvpd")
CONVERTING: dict[str, Any] = {"page_format_conversion": True}
DEFAULT = Side("shuffled", "kvpd", CONVERTING)
IN_PLACE = Side("shuffled", "kvpd", CONVERTING | {"slab_bytes": 0})
# 256 blocks of Qwen3-8B's pages: a request of 4,096 tokens.
SLAB = Side("shuffled", "kvpd", CONVERTING | {"slab_bytes": 603_979_776})
OFFERING = Side("standard", "kvpd", {"direct_transfer": True})
DIRECT = Side("shuffled", "kvpd", CONVERTING | {"direct_transfer": True})
FLASH = Side("flash", "kvpd")
FLASH_OFFERING = Side("flash", "kvpd", {"direct_transfer": True})

ARMS: dict[str, Arm] = {
    "stock, equal formats": Arm(EQUAL, EQUAL),
    "stock, standard to shuffled": Arm(EQUAL, Side("shuffled", "stock"), is_right=False),
    "kvpd, equal formats": Arm(KVPD, KVPD),
    "kvpd, default": Arm(KVPD, DEFAULT, placement="staged"),
    "kvpd, in place": Arm(KVPD, IN_PLACE, placement="in_place"),
    "kvpd, in place, main stream": Arm(KVPD, IN_PLACE, on_main_stream=True, placement="in_place"),
    "kvpd, slab": Arm(KVPD, SLAB, placement="staged"),
    "kvpd, slab, main stream": Arm(KVPD, SLAB, on_main_stream=True, placement="staged"),
    "kvpd, direct": Arm(OFFERING, DIRECT, placement="direct"),
    "kvpd, direct, main stream": Arm(OFFERING, DIRECT, on_main_stream=True, placement="direct"),
    "kvpd, direct, equal formats": Arm(OFFERING, OFFERING, placement="direct"),
}
_HOW: tuple[tuple[str, Side, Placement | None], ...] = (
    ("default", DEFAULT, "staged"),
    ("in place", IN_PLACE, "in_place"),
    ("direct", DIRECT, "direct"),
)
# Two prefills and five decoders.
SMOKE_ARMS: dict[str, Arm] = {
    f"{name}, {how}": Arm(prefill, decode, placement=placement)
    for name, prefill, equal in (
        ("TRITON_ATTN", OFFERING, KVPD),
        ("FLASH_ATTN", FLASH_OFFERING, FLASH),
    )
    for how, decode, placement in (*_HOW, ("equal formats", equal, None))
}
