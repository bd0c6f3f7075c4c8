"""Which releases of vLLM and NIXL this connector was tried on; anything else fails at start-up.

vLLM's connector internals are not an interface: a release that moved one of them would be found
out by wrong tokens. So an unknown release is refused by name instead.
"""

from __future__ import annotations

from importlib import metadata

from kvpd.errors import KvpdError

VLLM_RELEASES = ("0.30", "0.31", "0.32", "0.33")
NIXL_DISTRIBUTIONS = ("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm")
# Strided descriptor rows, which transfer plans are made of, came with 1.5.
NIXL_RELEASES = ("1.5",)


def public_release(version: str) -> str:
    """The version without its local suffix: a CUDA and a ROCm build of one release are equal."""
    return version.partition("+")[0]


def check_vllm(version: str) -> None:
    """Raise `KvpdError` unless this vLLM is one the connector was tried on."""
    _check("vLLM", "vllm", version, VLLM_RELEASES)


def check_nixl() -> None:
    """Raise `KvpdError` unless an installed NIXL is one the connector was tried on."""
    found = []
    for name in NIXL_DISTRIBUTIONS:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            continue
    for version in found:
        _check("NIXL", "nixl", version, NIXL_RELEASES)
    if not found:
        _check("NIXL", "nixl", "none", NIXL_RELEASES)


def _check(title: str, field: str, version: str, releases: tuple[str, ...]) -> None:
    if ".".join(public_release(version).split(".")[:2]) in releases:
        return
    expected = ", ".join(f"{release}.x" for release in releases)
    raise KvpdError(
        f"kvpd's connector does not know {title} {version}; it works with {expected}",
        code="unsupported-version",
        field=field,
        got=version,
        expected=expected,
    )
