"""All measurements of one run: two processes, all arms in turn."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from socket import socketpair
from typing import Any

import numpy as np
import torch

from kvpd import __version__, wire
from kvpd._kvpd import LinkModel
from kvpd.cli.demo.channel import Channel
from kvpd.cli.transfer_bench.agent import SharedAgent
from kvpd.cli.transfer_bench.arms import Arm, ReceiverArm, Sample, StockArm
from kvpd.cli.transfer_bench.cache import Cache
from kvpd.cli.transfer_bench.fit import fit_link
from kvpd.cli.transfer_bench.patterns import Workload
from kvpd.cli.transfer_bench.scenario import Scenario
from kvpd.errors import DirectError, TransferError
from kvpd.nixl import Agent
from kvpd.wire import Handshake

Figures = dict[str, Any]
Progress = Callable[[str], None]
# What more blocks do to a victim is more of the same, and takes READs minutes.
_MAX_VICTIM_BLOCKS = 256
ARMS = ("stock", "half", "staged", "direct")


def measure(
    scenario: Scenario,
    workloads: Sequence[Workload],
    arm_names: Sequence[str],
    *,
    repeat: int,
    slab_bytes: int,
    num_slots: int,
    link: LinkModel,
    victims: bool,
    timeout_seconds: float,
    progress: Progress,
) -> Figures:
    """Check every arm byte for byte, time all of them in turn; everything as plain data.

    Raises:
        KvpdError: a process, an arm or a transfer failed.
    """
    torch.set_num_threads(1)
    if scenario.prefill_device == scenario.decode_device != "cpu":
        # Without it UCX reads between two processes on one GPU over TCP.
        os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")
    device = torch.device(scenario.decode_device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    figures: Figures = {
        "scenario": asdict(scenario),
        "has_link": scenario.has_link,
        "device": "host memory" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "nixl": _nixl_version(),
        "kvpd": __version__,
        "repeat": repeat,
        "slab_bytes": slab_bytes,
        "num_slots": num_slots,
        "not_run": {},
        "rows": [],
        "victims": [],
    }
    with ExitStack() as stack:
        progress(f"prefill on {scenario.prefill_device}, decoder on {scenario.decode_device}")
        channel = stack.enter_context(_prefill_process(scenario, timeout_seconds))
        handshake = wire.decode(channel.receive())
        why_not_direct = channel.receive_json()["why_not_direct"]
        if handshake is None:
            raise TransferError("the prefill sent no tag", code="untagged-peer", field="kvpd")
        cache = Cache(scenario, scenario.decode_device)
        agent = SharedAgent.create(
            f"bench-decode-{time.time_ns()}", num_threads=scenario.nixl_threads
        )
        stack.callback(agent.close)
        stack.callback(agent.deregister, cache.register(agent))
        arms: list[Arm] = []
        for name in arm_names:
            try:
                arm = _arm(
                    name, agent, cache, handshake, why_not_direct, slab_bytes, num_slots, link
                )
            except DirectError as error:
                figures["not_run"][name] = str(error)
                continue
            stack.callback(arm.close)
            arms.append(arm)
        for workload in workloads:
            figures["rows"] += _measure(cache, workload, arms, repeat, progress)
        figures["link"] = fit_link(figures["rows"])
        if victims:
            figures["victims"] = _beside_victims(device, workloads, arms, progress)
        figures["prefill_unchanged"] = _ask_prefill(channel, arms)
    return figures


def _arm(
    name: str,
    agent: Agent,
    cache: Cache,
    handshake: Handshake,
    why_not_direct: str,
    slab_bytes: int,
    num_slots: int,
    link: LinkModel,
) -> Arm:
    wait = _short_sleep if cache.device.type == "cpu" else _spin
    if name == "stock":
        return StockArm(agent, cache, handshake, wait)
    if name == "direct":
        if why_not_direct:
            raise DirectError(why_not_direct, code="not-offered", field="direct")
        return ReceiverArm(
            name, agent, cache, handshake, wait, must_be_direct=True, direct=True, link=link
        )
    if name == "half":
        return ReceiverArm(name, agent, cache, handshake, wait, placement="in_place", link=link)
    return ReceiverArm(
        name,
        agent,
        cache,
        handshake,
        wait,
        placement="staged",
        slab_bytes=slab_bytes,
        num_slots=num_slots,
        link=link,
    )


def _measure(
    cache: Cache, workload: Workload, arms: list[Arm], repeat: int, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Check, time in turn, check again: what was timed must have been right to the end."""
    right = {arm.name: _is_right(cache, workload, arm) for arm in arms}
    samples: dict[str, list[Sample]] = {arm.name: [] for arm in arms}
    for turn in range(repeat):
        # The order rotates: what an arm leaves behind must not favour the same neighbour always.
        # Nor is it what is measured, so each arm first moves the workload once untimed.
        for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
            arm.run(workload)
            samples[arm.name].append(arm.run(workload))
    cache.poison()
    num_bytes = workload.num_blocks * cache.scenario.block_bytes
    joint, alone = workload.pages_per_run
    for arm in arms:
        right[arm.name] &= _is_right(cache, workload, arm)
        taken = samples[arm.name]
        last = taken[-1]
        total = _spread([sample.total_seconds for sample in taken])
        row = {
            "arm": arm.name,
            "pattern": workload.pattern,
            "requests": len(workload.requests),
            "blocks": workload.num_blocks,
            "bytes": num_bytes,
            "pages_per_run": joint,
            "pages_per_remote_run": alone,
            "total": total,
            "read": _spread([sample.read_seconds for sample in taken]),
            "convert": _spread([sample.convert_seconds for sample in taken]),
            "post": _spread([sample.post_seconds for sample in taken]),
            "gigabytes_per_s": num_bytes / total["median"] / 1e9,
            "descriptors": {
                "planned": last.planned,
                "merged": last.merged,
                "counted": last.counted,
            },
            "predicted": arm.predict(workload),
            "explained": arm.explain(workload),
            "right": right[arm.name],
        }
        progress(
            f"  {workload.pattern}, {workload.num_blocks} blocks, {arm.name}: "
            f"{1e3 * total['median']:.2f} ms, {row['gigabytes_per_s']:.1f} GB/s"
            + ("" if row["right"] else ", WRONG BYTES")
        )
        yield row


def _is_right(cache: Cache, workload: Workload, arm: Arm) -> bool:
    """Whether each request alone leaves its pages and nothing else."""
    right = True
    for request in workload.requests:
        arm.run(Workload(workload.pattern, [request]))
        right &= cache.holds_exactly([request], converted=arm.converts)
    return right


def _beside_victims(
    device: torch.device, workloads: Sequence[Workload], arms: list[Arm], progress: Progress
) -> list[dict[str, Any]]:
    from kvpd.cli.transfer_bench.victims import make_victims, slowdown_seconds

    rows = []
    for workload in workloads:
        if workload.pattern != "random" or workload.num_blocks > _MAX_VICTIM_BLOCKS:
            continue
        for victim in make_victims(device):
            for arm in arms:
                try:
                    found = slowdown_seconds(victim, arm, workload)
                except TransferError as error:
                    # A transfer so long that no row of calls outlasts it; the rest is still worth
                    # measuring.
                    progress(f"  {victim.name} beside {arm.name}: not measured: {error}")
                    continue
                rows.append(
                    {"victim": victim.name, "arm": arm.name, "blocks": workload.num_blocks, **found}
                )
                progress(
                    f"  {victim.name} beside {arm.name}, {workload.num_blocks} blocks: "
                    f"+{1e3 * found['slowdown']:.2f} ms"
                )
    return rows


def _ask_prefill(channel: Channel, arms: list[Arm]) -> bool:
    """Whether the prefill's cache is as written, after one notice for each request of kvpd's."""
    expected = sum(arm.num_notices for arm in arms if isinstance(arm, ReceiverArm))
    came: list[str] = []
    give_up_at = time.monotonic() + 30.0
    while len(came) < expected and time.monotonic() < give_up_at:
        channel.send_json("notices")
        came += channel.receive_json()["notices"]
    channel.send_json("cache")
    answer = channel.receive_json()
    came += answer["notices"]
    if len(came) != expected or len(set(came)) != expected:
        raise TransferError(
            f"{len(came)} notices came, of {expected} requests",
            code="notices",
            field="notices",
            got=len(came),
            expected=expected,
        )
    return bool(answer["unchanged"])


def _nixl_version() -> str:
    for name in ("nixl", "nixl-cu13", "nixl-cu12", "nixl-rocm"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def _spread(values: list[float]) -> dict[str, float]:
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {"median": float(median), "p10": float(p10), "p90": float(p90)}


def _spin() -> None:
    """On a GPU's host there are cores enough: answer at once."""


def _short_sleep() -> None:
    """In host memory NIXL's threads move the bytes: leave them a core."""
    time.sleep(50e-6)


@contextmanager
def _prefill_process(scenario: Scenario, timeout_seconds: float) -> Iterator[Channel]:
    ours, theirs = socketpair()
    command = [sys.executable, "-m", "kvpd.cli.transfer_bench.prefill", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    channel = Channel(ours, timeout_seconds)
    try:
        channel.send_json(scenario.to_json())
        yield channel
    finally:
        channel.close()  # ends the prefill's loop
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
