"""Fakes of a vLLM engine's side channel: one that answers as vLLM's listener, and hostile ones.

All are real sockets on the loopback. Payloads are written as plain maps with the names that vLLM's
dataclasses have on the wire.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from kvpd import EngineDescription
from kvpd.wire import Handshake, encode_tag

# In NIXL's part of the metadata, which holds keys to registered memory. It must appear nowhere.
NIXL_KEYS = b"\x93NIXL-REMOTE-KEYS\x00\xff"


def stock_fields(**changes: Any) -> dict[str, Any]:
    """The metadata of a stock engine: three layers of standard pages, 4 heads of 64, bf16."""
    page_bytes = 4 * 16 * 2 * 64 * 2
    fields: dict[str, Any] = {
        "engine_id": "engine-stock",
        "agent_metadata": NIXL_KEYS,
        "kv_caches_base_addr": [(1 << 40) + index * 11 * page_bytes for index in range(3)],
        "device_id": 0,
        "num_blocks": 11,
        "block_lens": [page_bytes] * 3,
        "block_strides": [page_bytes] * 3,
        "kv_cache_layout": "LBHNC",
        "block_size": 16,
        "ssm_sizes": [0, 0],
        "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 1,
        "region_num_blocks": [11] * 3,
        "region_group_ids": [0] * 3,
        "region_names": [f"layer.{index}" for index in range(3)],
        "region_mem_types": ["VRAM"] * 3,
        "dcp_size": 1,
        "pcp_size": 1,
        "ple_block_len": None,
        "region_members": [],
        "packed_member_layouts": {},
    }
    return {**fields, **changes}


def tagged_fields(description: EngineDescription, **changes: Any) -> dict[str, Any]:
    """The metadata of a kvpd engine with these regions."""
    regions = description.regions
    fields = stock_fields(
        engine_id="engine-kvpd",
        kv_caches_base_addr=[region.address for region in regions],
        block_lens=[region.block_bytes for region in regions],
        block_strides=[region.block_stride_bytes for region in regions],
        region_num_blocks=[region.num_blocks for region in regions],
        region_group_ids=[0] * len(regions),
        region_names=[region.layers[0] for region in regions],
        region_mem_types=[region.memory.upper() for region in regions],
        num_blocks=description.num_blocks,
        block_size=description.facts.block_size,
        kv_cache_layout=description.facts.layout,
        attn_backend_name=description.facts.backend,
    )
    fields |= changes
    fields.setdefault("kvpd", encode_tag(Handshake(fields["engine_id"], description)))
    return fields


def payload(fields: Mapping[str, Any], digest: str = "d" * 64) -> bytes:
    """What vLLM encodes for a peer."""
    return msgspec.msgpack.encode(
        {"compatibility_hash": digest, "agent_metadata_bytes": msgspec.msgpack.encode(fields)}
    )


@contextmanager
def listening(payloads: Mapping[int, bytes]) -> Iterator[str]:
    """A listener like vLLM's, with a payload per rank.

    Like vLLM's it is gone after the first question for a rank that it has not.
    """

    def answer(router: zmq.Socket[bytes], parts: list[bytes]) -> None:
        identity, empty, question = parts
        assert empty == b""
        message, pp_rank, tp_rank = msgspec.msgpack.decode(question)
        assert (message, pp_rank) == (b"get_meta_msg", 0)
        clock = msgspec.msgpack.encode(12.5)
        router.send_multipart([identity, b"", payloads[tp_rank], clock])

    with routing(answer) as address:
        yield address


@contextmanager
def routing(
    answer: Callable[[zmq.Socket[bytes], list[bytes]], None],
) -> Iterator[str]:
    """A ZeroMQ ROUTER that hands every message to `answer`, and ends if that raises."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def serve() -> None:
        try:
            while not stop.is_set():
                if router.poll(20):
                    answer(router, router.recv_multipart())
        except (KeyError, AssertionError, ValueError):
            return
        finally:
            router.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(10)
        context.destroy(linger=0)


@contextmanager
def plain_tcp(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A TCP server that knows no ZeroMQ; `behave` gets every connection."""
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.05)
    stop = threading.Event()

    def serve_one(connection: socket.socket) -> None:
        with connection:
            try:
                behave(connection, stop)
            except OSError:
                return

    def serve() -> None:
        threads = []
        while not stop.is_set():
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            threads.append(threading.Thread(target=serve_one, args=(connection,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join(10)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        stop.set()
        thread.join(20)
        server.close()


def flood(connection: socket.socket, stop: threading.Event) -> None:
    """Speak ZMTP 3.0 well, then send one message of parts without end."""
    connection.settimeout(5)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32))
    _receive(connection, 64)
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"ROUTER"
    connection.sendall(b"\x04" + bytes([len(ready)]) + ready)
    size = 1 << 20
    part = b"\x03" + size.to_bytes(8, "big") + bytes(size)
    while not stop.is_set():
        connection.sendall(part)


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise OSError("closed")
        received += chunk
    return received
