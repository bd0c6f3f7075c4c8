"""The side channel of an engine: it answers whoever asks for a rank's handshake, or whether blocks
of a request are still held, and only that.

Stock's listener decodes what it is sent as it comes: a stray packet, or a question for a rank that
does not exist, ends it, and no peer can shake hands any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.utils.network_utils import make_zmq_path

from kvpd.vllm.held import Question, Records, Reply

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvpd")

# A question for a handshake has some twenty bytes, one about blocks 120 and 18 more a rank.
MAX_QUESTION_BYTES = 1 << 10
_LOOK_MS = 1000
# One part where an answer has two: a reader that asked for what is not there fails at once.
_NO_ANSWER = b""


class _Question(msgspec.Struct, array_like=True, frozen=True):
    what: bytes
    pp_rank: int
    tp_rank: int


def serve_handshakes(
    payloads: Mapping[tuple[int, int], bytes],
    is_ready: threading.Event,
    is_stopped: threading.Event,
    host: str,
    port: int,
    records: Records,
) -> None:
    """Answer until stopped. Takes the place of stock's listener, and its arguments.

    Args:
        payloads: by pipeline and tensor-parallel rank; read anew for every question.
        is_ready: set once questions are taken.
        is_stopped: looked at once a second.
        host, port: where to listen.
        records: which requests' blocks this engine holds.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        channel = context.socket(zmq.ROUTER)
        channel.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        channel.setsockopt(zmq.RCVTIMEO, _LOOK_MS)
        channel.setsockopt(zmq.IPV6, int(":" in host))
        try:
            channel.bind(make_zmq_path("tcp", host, port))
        except zmq.ZMQError as error:
            # vLLM waits for this thread, and would not say what for.
            logger.error(
                "the side channel cannot listen on %s port %d: %s; set VLLM_NIXL_SIDE_CHANNEL_HOST "
                "and VLLM_NIXL_SIDE_CHANNEL_PORT to an address of this host that is free",
                host,
                port,
                error,
            )
            raise
        is_ready.set()
        while not is_stopped.is_set():
            try:
                parts = channel.recv_multipart()
            except zmq.Again:
                continue
            except zmq.ZMQError:
                logger.debug("side channel: a message that cannot be taken", exc_info=True)
                continue
            answer = _answer(payloads, records, parts)
            if answer is not None:
                try:
                    channel.send_multipart(answer, zmq.NOBLOCK)
                except zmq.ZMQError:
                    logger.debug("side channel: an answer that cannot be sent", exc_info=True)
    finally:
        context.destroy(linger=0)


def _answer(
    payloads: Mapping[tuple[int, int], bytes], records: Records, parts: list[bytes]
) -> list[bytes] | None:
    """What is sent for a message; None where there is nobody to answer."""
    if len(parts) != 3 or parts[1]:
        return None
    identity, frame, message = parts
    asked = Question.decode(message)
    if asked is not None:
        return [identity, frame, Reply(asked.number, records.answer(asked)).encode()]
    try:
        question = msgspec.msgpack.decode(message, type=_Question)
    except (msgspec.DecodeError, msgspec.ValidationError):
        question = None
    payload = None
    if question is not None and question.what == GET_META_MSG:
        payload = payloads.get((question.pp_rank, question.tp_rank))
    if payload is None:
        logger.warning("side channel: asked for what this engine has not")
        return [identity, frame, _NO_ANSWER]
    # With our clock, from which readers estimate its offset to theirs. It has to be the one that
    # stamps the leases of requests: this process's.
    return [identity, frame, payload, msgspec.msgpack.encode(time.perf_counter())]
