"""The demo's prefill in a process of its own, with a NIXL agent and an offer of its memory.

``python -m tests.direct.nixl_prefill``. Commands as in `tests.direct.prefill`, and ``notices``: how
many release notices have come. The memory is the fake driver's: what the handshake calls a GPU's is
known to NIXL as the host's.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from kvpd import EngineDescription, PageFormat, cache_regions, wire
from kvpd.cli.demo.facts import engine_facts
from kvpd.cli.demo.prefill import written_memory
from kvpd.cli.demo.scenario import Scenario
from kvpd.direct import Exporter
from kvpd.nixl import Agent, MemoryRange
from tests.direct.fake_driver import FakeDriver
from tests.direct.prefill import serve


def main() -> None:
    scenario = Scenario(**json.loads(sys.argv[1]))
    driver = FakeDriver()
    written = written_memory(scenario)
    allocation = driver.allocate(written.size)
    memory = driver.bytes_of(allocation)
    memory[:] = written
    format = PageFormat.standard(
        heads=scenario.heads,
        tokens=scenario.tokens,
        head_dim=scenario.head_dim,
        dtype=scenario.dtype,
    )
    regions = cache_regions(
        format,
        "LBHNC",
        address=allocation.address,
        num_blocks=scenario.prefill_blocks,
        layers=scenario.layer_names,
        memory="vram",
    )
    description = EngineDescription(engine_facts(scenario, "LBHNC", "demo-standard"), regions)
    agent = Agent.create(f"direct-prefill-{time.time_ns()}")
    agent.register([MemoryRange(allocation.address, allocation.num_bytes)])
    came: list[bytes] = []

    def notices() -> int:
        came.extend(text for texts in agent.notices().values() for text in texts)
        return len(came)

    try:
        with Exporter(regions, driver=driver) as exporter:
            handshake = wire.Handshake("prefill", description, agent.metadata(), exporter.part)
            serve(
                handshake,
                exporter,
                unchanged=lambda: np.array_equal(memory, written),
                notices=notices,
            )
    finally:
        driver.free()


if __name__ == "__main__":
    main()
