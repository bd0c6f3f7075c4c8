"""Every error kvpd raises: one base class, what went wrong in attributes, prose in the message."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpd._kvpd import Verdict


class KvpdError(Exception):
    """Base of all errors raised by kvpd.

    Attributes:
        code: stable, machine-readable name of the failure, e.g. ``"length-over-stride"``.
        field: the parameter or wire field at fault, e.g. ``"block_bytes"``; "" when there is none.
        got: the value found, as text.
        expected: what would have been accepted, as text.
    """

    def __init__(
        self, message: str, *, code: str, field: str = "", got: object = "", expected: object = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.field = field
        self.got = str(got)
        self.expected = str(expected)


class FormatError(KvpdError, ValueError):
    """A page format that cannot be: extents, strides or coverage do not fit."""


class RegionError(KvpdError, ValueError):
    """Memory that cannot be described: overlap, overflow, out of extent, length over stride."""


class DescriptionError(KvpdError, ValueError):
    """Facts and regions that do not make one engine."""


class PlanError(KvpdError, ValueError):
    """Block ids or regions from which no transfer can be planned."""


class WireError(KvpdError, ValueError):
    """Handshake bytes that are malformed, oversized, or contradict themselves."""


class RequestError(KvpdError, ValueError):
    """What one request brings is malformed, or does not fit the peer or the prompt it names."""


class WireVersionError(WireError):
    """A handshake of another wire version; `got` and `expected` are the versions."""


class ConversionError(KvpdError, ValueError):
    """A conversion that no kernel may run: unknown pair of formats or a broken memory contract."""


class WriteError(KvpdError, ValueError):
    """Tokens that no kernel may write: unknown pages, or tensors that break a contract."""


class TransferError(KvpdError, RuntimeError):
    """A NIXL call failed, or a request was used out of turn."""


class DirectError(KvpdError, RuntimeError):
    """A peer's memory that cannot be mapped here, or may not be; the pair is served otherwise.

    The message is the reason, fit to be shown. It never holds a memory handle.
    """


class SideChannelError(KvpdError, RuntimeError):
    """An engine's side channel cannot be reached, or does not answer as one."""


class MissingDependencyError(KvpdError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class RefusedError(KvpdError):
    """The pair was refused; ``error.verdict.reasons`` has every reason."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(
            str(verdict),
            code="refused",
            field=", ".join(reason.field for reason in verdict.reasons),
        )
        self.verdict = verdict
