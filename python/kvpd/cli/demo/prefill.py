"""The prefill's process: standard pages, a NIXL agent, and handshakes to offer.

Started by the demo as ``python -m kvpd.cli.demo.prefill FD`` with one end of a socket pair.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import time
from dataclasses import replace

import msgspec
import numpy as np

from kvpd import wire
from kvpd._kvpd import EngineDescription, PageFormat, cache_regions
from kvpd.cli.demo.channel import Channel
from kvpd.cli.demo.facts import engine_facts
from kvpd.cli.demo.oracle import Bytes, pages, standard_pages
from kvpd.cli.demo.scenario import PREFILL_POISON, Scenario
from kvpd.errors import KvpdError, TransferError
from kvpd.nixl import Agent, MemoryRange

ENGINE_ID = "demo-prefill"
LAYOUT = "LBHNC"


def serve(channel: Channel) -> None:
    """Write the pages, offer the handshakes, then answer reports until the decoder hangs up.

    Raises:
        KvpdError: something could not be set up; the decoder sees the closed channel.
    """
    scenario = Scenario(**channel.receive_json())
    memory = written_memory(scenario)
    digest = _digest(memory)
    name = f"{ENGINE_ID}-{time.time_ns()}"
    agent = Agent.create(name)
    address = int(memory.ctypes.data)
    agent.register([MemoryRange(address, memory.size)])
    offers = handshakes(scenario, address, agent.metadata())
    channel.send_json({"agent": name, "offers": list(offers), "pid": os.getpid()})
    for blob in offers.values():
        channel.send(blob)
    channel.send_json(scenario.prefill_ids())
    while True:
        try:
            expected = channel.receive_json()
        except TransferError:
            return  # the decoder is done
        channel.send_json(
            {"notices": _notices(agent, expected), "unchanged": _digest(memory) == digest}
        )


def written_memory(scenario: Scenario) -> Bytes:
    """The prefill's cache [L, B, H, N, 2*D] as flat bytes, written by its own backend."""
    page_bytes = 2 * scenario.heads * scenario.tokens * scenario.head_dim * scenario.element_bytes
    shape = (scenario.layers, scenario.prefill_blocks, page_bytes)
    cache = np.full(shape, PREFILL_POISON, dtype=np.uint8)
    for request_id, ids in scenario.prefill_ids().items():
        token_ids = scenario.token_ids(request_id)
        for layer in range(scenario.layers):
            cache[layer, ids] = standard_pages(*pages(scenario, token_ids, layer))
    return cache.reshape(-1)


def handshakes(scenario: Scenario, address: int, nixl_metadata: bytes) -> dict[str, bytes]:
    """Wire bytes by name: what this prefill is, and three that a decoder must refuse.

    All lie over the same memory, so that none is refused for want of it.
    """
    one_byte = "float8_e4m3fn" if scenario.dtype != "float8_e4m3fn" else "float8_e4m3fnuz"
    fewer_blocks = scenario.prefill_blocks // 2
    return {
        "standard": _handshake(scenario, scenario.prefill_blocks, address, nixl_metadata),
        "untagged": msgspec.msgpack.encode(
            {"engine_id": ENGINE_ID, "agent_metadata": nixl_metadata}
        ),
        "other element type": _handshake(
            replace(scenario, dtype=one_byte), scenario.prefill_blocks, address, nixl_metadata
        ),
        "other head count": _handshake(
            replace(scenario, heads=2 * scenario.heads), fewer_blocks, address, nixl_metadata
        ),
    }


def _handshake(scenario: Scenario, num_blocks: int, address: int, nixl_metadata: bytes) -> bytes:
    format = PageFormat.standard(
        heads=scenario.heads,
        tokens=scenario.tokens,
        head_dim=scenario.head_dim,
        dtype=scenario.dtype,
    )
    regions = cache_regions(
        format, LAYOUT, address=address, num_blocks=num_blocks, layers=scenario.layer_names
    )
    facts = engine_facts(scenario, LAYOUT, "demo-standard")
    return wire.encode(wire.Handshake(ENGINE_ID, EngineDescription(facts, regions), nixl_metadata))


def _notices(agent: Agent, expected: list[str], *, patience_seconds: float = 30.0) -> list[str]:
    """Every notice that came, waiting until those expected did."""
    came: list[str] = []
    give_up_at = time.monotonic() + patience_seconds
    while not set(expected) <= set(came) and time.monotonic() < give_up_at:
        came += [text.decode() for texts in agent.notices().values() for text in texts]
        time.sleep(0.001)
    return came


def _digest(memory: Bytes) -> bytes:
    return hashlib.blake2b(memory.data).digest()


if __name__ == "__main__":
    try:
        # Minutes of silence mean that the decoder hangs; the demo has its own, shorter patience.
        serve(Channel(socket.socket(fileno=int(sys.argv[1])), timeout_seconds=600))
    except KvpdError as error:
        sys.exit(f"kvpd demo prefill: {error}")
