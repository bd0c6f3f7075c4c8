"""Pairing the components of two formats: the one condition for a permutation to exist."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from kvpd.errors import ConversionError

if TYPE_CHECKING:
    from kvpd._kvpd import Component, PageFormat


@dataclass(frozen=True)
class Placed:
    """A component and the byte of the page where its plane's offsets count from."""

    component: Component
    page_start_bytes: int


def match_components(source: PageFormat, target: PageFormat) -> tuple[tuple[Placed, Placed], ...]:
    """Pairs (source, target) of the components of two formats, in the target's order.

    Raises:
        ConversionError: the formats do not hold the same named tensors; every difference is named.
    """
    differences: list[str] = []
    of_source = {component.name: component for component in source.components}
    of_target = {component.name: component for component in target.components}
    for name in sorted(of_source.keys() ^ of_target.keys()):
        differences.append(f"{name} only in the {'source' if name in of_source else 'target'}")
    for name in sorted(of_source.keys() & of_target.keys()):
        for field in ("dtype", "heads", "tokens", "channels"):
            got, expected = getattr(of_source[name], field), getattr(of_target[name], field)
            if got != expected:
                differences.append(f"{name}.{field} {got} against {expected}")
    if differences:
        raise ConversionError(
            f"{source.name} and {target.name} hold different components: {'; '.join(differences)}",
            code="components-differ",
            field="components",
            got=source.name,
            expected=target.name,
        )
    starts = [list(accumulate(fmt.plane_bytes, initial=0)) for fmt in (source, target)]
    return tuple(
        (
            Placed(of_source[component.name], starts[0][of_source[component.name].plane]),
            Placed(component, starts[1][component.plane]),
        )
        for component in target.components
    )
