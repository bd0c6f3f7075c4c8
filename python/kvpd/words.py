"""The closed lists of words in kvpd's signatures, for annotations."""

from typing import Literal, TypeAlias

Interior: TypeAlias = Literal["HNC", "NHC"]
"""Order of heads and tokens inside a page."""

Memory: TypeAlias = Literal["dram", "vram"]
"""Kind of memory, as NIXL tells them apart."""

Placement: TypeAlias = Literal["direct", "in_place", "staged"]
"""Where the bytes of a peer's pages land before they are local pages."""

Order: TypeAlias = Literal["by_row", "by_page"]
"""Order of a READ's descriptors."""
