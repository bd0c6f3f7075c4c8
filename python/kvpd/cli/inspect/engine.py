"""One side of a pair: a running engine, or a file that was saved of one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvpd.cli.inspect.inspection import load
from kvpd.errors import KvpdError, SideChannelError
from kvpd.vllm.published import Published, decode_payload
from kvpd.vllm.sidechannel import Address, ask
from kvpd.wire import Handshake


@dataclass(frozen=True)
class Rank:
    """Which rank to ask for, and what makes asking safe.

    Attributes:
        tp_rank: the rank.
        tp_size: ranks of an engine that does not publish how many it has.
        timeout_seconds: for each question.
    """

    tp_rank: int = 0
    tp_size: int | None = None
    timeout_seconds: float = 5.0


@dataclass(frozen=True)
class Engine:
    """A rank's handshake, and where it came from."""

    source: str
    tp_rank: int
    published: Published

    @cached_property
    def tag(self) -> Handshake | None:
        """What its tag says; None if it has none that this release reads."""
        try:
            return self.published.handshake()
        except KvpdError:
            return None


def engine_of(text: str, rank: Rank) -> Engine:
    """Ask ``HOST:PORT``, or read a saved file.

    Raises:
        KvpdError: neither can be had, or the file is of another rank than the one asked for.
    """
    address = Address.of(text)
    if address is not None and not os.path.exists(text):
        return _asked(address, rank)
    inspection = load(Path(text))
    # Rank 0 is what nobody asked for: the default takes a file as it is.
    if rank.tp_rank not in (0, inspection.tp_rank):
        raise KvpdError(
            f"{text} was saved of tensor-parallel rank {inspection.tp_rank}, not of rank "
            f"{rank.tp_rank}; save that one with kvpd inspect --tp-rank {rank.tp_rank} --save",
            code="no-such-rank",
            field="tp_rank",
            got=rank.tp_rank,
            expected=inspection.tp_rank,
        )
    return Engine(inspection.source, inspection.tp_rank, inspection.published())


def _asked(address: Address, rank: Rank) -> Engine:
    # Every engine has rank 0. Asked for a rank that it has not, vLLM's listener ends for good.
    published = decode_payload(ask(address, 0, timeout_seconds=rank.timeout_seconds))
    if rank.tp_rank > 0:
        _check_has_rank(address, published, rank)
        payload = ask(address, rank.tp_rank, timeout_seconds=rank.timeout_seconds)
        published = decode_payload(payload)
    return Engine(str(address), rank.tp_rank, published)


def _check_has_rank(address: Address, published: Published, rank: Rank) -> None:
    tag = Engine(str(address), 0, published).tag
    tp_size = rank.tp_size if tag is None else tag.description.facts.tp_size
    if tp_size is None:
        raise SideChannelError(
            f"{address} does not publish how many tensor-parallel ranks it has, and vLLM's side "
            "channel ends for good when it is asked for one that it has not; "
            "say --tp-size to ask for another than rank 0",
            code="unknown-tp-size",
            field="tp_rank",
            got=rank.tp_rank,
            expected="0, or --tp-size",
        )
    if rank.tp_rank >= tp_size:
        raise SideChannelError(
            f"the tensor-parallel size of {address} is {tp_size}; there is no rank "
            f"{rank.tp_rank} and it was not asked for",
            code="no-such-rank",
            field="tp_rank",
            got=rank.tp_rank,
            expected=f"below {tp_size}",
        )
