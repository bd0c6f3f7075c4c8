"""Direct placement: kernels of the decoder's GPU read the prefill's pages where they are.

The prefill offers the allocations of its cache, and its handshake carries the offer's `part`:

    exporter = Exporter(description.regions)
    handshake = Handshake(engine_id, description, metadata, direct=exporter.part)

A decoder of the same host and user maps them, once per peer, and converts from them:

    mapping = map_peer(handshake.direct, handshake.description.regions, device)
    pages = Pages.of(format, mapping.regions, mapping.storages)
    conversion = prepare(pages, own_pages, tuning=DIRECT)
    ...                # conversions, on any stream, until the peer leaves
    mapping.close()    # when the last of them has ended

Whatever stands in the way is a `DirectError` with the reason, after which the pair can be served
otherwise. Needs CUDA, torch and NVIDIA's cuda-bindings (extra ``direct``); importing needs none.
"""

from __future__ import annotations

from kvpd.direct.exporter import Exporter
from kvpd.direct.mapping import Mapping, map_peer
from kvpd.direct.part import DirectPart, HostIdentity
from kvpd.errors import DirectError

__all__ = ["DirectError", "DirectPart", "Exporter", "HostIdentity", "Mapping", "map_peer"]
