"""The prefill's process: a written cache, a NIXL agent, and a handshake to offer.

Started by the bench as ``python -m kvpd.cli.transfer_bench.prefill FD`` with one end of a socket
pair.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import torch

from kvpd import wire
from kvpd.cli.demo.channel import Channel
from kvpd.cli.transfer_bench.cache import Cache
from kvpd.cli.transfer_bench.scenario import Scenario
from kvpd.direct import DirectError, Exporter
from kvpd.errors import KvpdError, TransferError
from kvpd.nixl import Agent


def serve(channel: Channel) -> None:
    """Offer a handshake for each arm, then answer questions until the decoder hangs up.

    Raises:
        KvpdError: something could not be set up; the decoder sees the closed channel.
    """
    scenario = Scenario(**channel.receive_json())
    device = torch.device(scenario.prefill_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    cache = Cache(scenario, scenario.prefill_device)
    cache.write_prefill()
    agent = Agent.create(f"bench-prefill-{time.time_ns()}", num_threads=scenario.nixl_threads)
    registration = cache.register(agent)
    description = cache.description(scenario.standard, "LBHNC")
    exporter, why_not = None, "the caches are in host memory"
    if device.type == "cuda":
        try:
            exporter = Exporter(description.regions)
        except DirectError as error:
            why_not = str(error)
    handshake = wire.Handshake(
        "bench-prefill",
        description,
        agent.metadata(),
        direct=None if exporter is None else exporter.part,
    )
    channel.send(wire.encode(handshake))
    channel.send_json({"pid": os.getpid(), "why_not_direct": why_not if exporter is None else ""})
    answer(channel, cache, agent)
    if exporter is not None:
        exporter.close()
    agent.deregister(registration)
    agent.close()


def answer(channel: Channel, cache: Cache, agent: Agent) -> None:
    """Say which notices came and whether the cache is as it was written."""
    while True:
        try:
            question = channel.receive_json()
        except TransferError:
            return  # the decoder is done
        notices = [text.decode() for texts in agent.notices().values() for text in texts]
        unchanged = cache.is_prefill() if question == "cache" else None
        channel.send_json({"notices": notices, "unchanged": unchanged})


def main(arguments: list[str]) -> int:
    """The process: serve one decoder."""
    # A bench of the transfer alone should not wait for torch's threads on the prefill.
    torch.set_num_threads(1)
    channel = Channel(socket.socket(fileno=int(arguments[0])), timeout_seconds=3600.0)
    try:
        serve(channel)
    except KvpdError as error:
        print(f"prefill: {error}", file=sys.stderr)
        return 2
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
