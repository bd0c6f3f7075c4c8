"""What the handshake says of direct placement: which host, which GPU, where to ask.

Nothing in it is a secret, and no memory handle is: handles are given only to those who reach the
endpoint, a socket of this host.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvpd.errors import DirectError

_Inode = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]

# Words are bounded, not spelled out: what a later release says otherwise must not cost a pair its
# handshake, only direct placement.
_Word = Annotated[str, msgspec.Meta(pattern=r"^[\x21-\x7e]+\Z", max_length=64)]

DeviceUuid = _Word
"""A GPU's UUID as NVIDIA's tools print it."""

RUNTIME: Final = "cuda"
"""What the handles are made with. ROCm has such handles too; nobody has verified them there."""


class HostIdentity(msgspec.Struct, frozen=True):
    """One process on one running host.

    Attributes:
        boot_id: the kernel's id of this boot; machines that share a disk or a name differ in it.
        pid_namespace: inode of the namespace; without it a pid names another process.
        network_namespace: abstract sockets exist inside one.
        user_namespace: without it a uid names another user.
        ipc_namespace: where system V and message-queue names mean the same; a precaution.
        pid: the process, in its namespace.
    """

    boot_id: _Word
    pid_namespace: _Inode
    network_namespace: _Inode
    user_namespace: _Inode
    ipc_namespace: _Inode
    pid: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]

    @classmethod
    def of_this_process(cls) -> HostIdentity:
        """Read from /proc.

        Raises:
            DirectError: it cannot be read; what is unknown is the same as nothing.
        """
        try:
            found = {
                "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                "pid_namespace": _namespace("pid"),
                "network_namespace": _namespace("net"),
                "user_namespace": _namespace("user"),
                "ipc_namespace": _namespace("ipc"),
                "pid": os.getpid(),
            }
            # Checked as a peer will check it: one bad field would cost us the whole handshake.
            return msgspec.convert(found, cls)
        except (OSError, msgspec.ValidationError) as error:
            raise DirectError(
                f"this host cannot be identified: {error}",
                code="no-identity",
                field="host",
                got=error,
                expected="a readable /proc",
            ) from error


class DirectPart(msgspec.Struct, frozen=True):
    """The optional part of a handshake that offers direct placement.

    Attributes:
        runtime: what the memory handles are made with, see `RUNTIME`.
        host: the exporting process.
        device_uuid: the GPU all its regions are on.
        endpoint: name of its socket in the abstract namespace. Unguessable, but any process of the
            network namespace can list it: what keeps strangers out is the check of who connects.
    """

    runtime: _Word
    host: HostIdentity
    device_uuid: DeviceUuid
    endpoint: _Word


def check_same_host(exporter: HostIdentity, own: HostIdentity) -> None:
    """Refuse an exporter of another host, of a foreign container, or of our own process.

    Raises:
        DirectError: "other-host", with what differs in `field`, or "same-process".
    """
    for field in msgspec.structs.fields(HostIdentity):
        theirs, ours = getattr(exporter, field.name), getattr(own, field.name)
        if field.name != "pid" and theirs != ours:
            what = "another host" if field.name == "boot_id" else f"another {field.name}"
            raise DirectError(
                f"the peer runs in {what.replace('_', ' ')}",
                code="other-host",
                field=field.name,
                got=theirs,
                expected=ours,
            )
    if exporter.pid == own.pid:
        raise DirectError(
            "the peer is this process, which cannot open its own handles",
            code="same-process",
            field="pid",
            got=exporter.pid,
            expected="another process",
        )


def _namespace(name: str) -> int:
    return os.stat(f"/proc/self/ns/{name}").st_ino
