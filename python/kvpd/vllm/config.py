"""The operator's keys in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from kvpd._kvpd import LinkModel
from kvpd.errors import KvpdError, PlanError

if TYPE_CHECKING:
    from kvpd.words import Memory


# A request that waits keeps its blocks, and its client.
MAX_HELD_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class ConnectorConfig:
    """What an operator chose.

    Attributes:
        page_format_conversion: on a decoder, accept peers whose page format is another one and
            convert their pages, where the pair is in scope. Off: such peers are refused.
        allow_other_weights: on the reading side, accept peers that loaded other weights, or the
            same ones quantised otherwise. What decides the shape of K and V, and rope, is compared
            all the same; so are the element type of the cache and its scales.
        held_timeout_seconds: on the reading side, how long a prefill may take to say whether it
            still held the blocks that were read, more than 0 and 60 at most. Without an answer the
            request fails.
        link: what transfers cost here, where the defaults of `kvpd.LinkModel` are wrong; names and
            units are its own. Between two GPUs ``kvpd bench transfer`` prints it.
        direct_transfer: on a prefill, offer the cache's memory to processes of this user on this
            host; on a decoder, read the memory of prefills that offer it with the conversion
            itself, in place of NIXL. Both sides must switch it on. A pair that cannot (another
            host, no CUDA, memory that cannot be shared) is served as without it.
        require_tagged_peers: refuse peers that publish no page format, whatever our own pages are.
        slab_bytes: memory in which raw pages land before they are converted into the cache. 0:
            they land in the cache itself, which needs no memory but makes two short descriptors of
            each page. None, the key being absent: see `kvpd.vllm.slab_size`. Requests of any length
            pass through a slab of any size, in chunks.
    """

    page_format_conversion: bool = False
    require_tagged_peers: bool = False
    slab_bytes: int | None = None
    direct_transfer: bool = False
    allow_other_weights: bool = False
    held_timeout_seconds: float = 2.0
    link: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Read our keys; others belong to vLLM.

        Raises:
            KvpdError: a key has a value of another kind, or is nearly one of ours. Nothing is
                guessed from a truthy string.
        """
        ours = [known.name for known in fields(cls)]
        for key in extra:
            # Passed over, a misspelt `require_tagged_peers` would let every peer in.
            meant = [] if key in ours else get_close_matches(str(key), ours, n=1, cutoff=0.8)
            if meant:
                raise KvpdError(
                    f"kv_connector_extra_config has no key {key!r}; is {meant[0]!r} meant?",
                    code="invalid-config",
                    field=f"kv_connector_extra_config.{key}",
                    got=repr(key),
                    expected=repr(meant[0]),
                )
        return cls(
            page_format_conversion=_flag(extra, "page_format_conversion"),
            require_tagged_peers=_flag(extra, "require_tagged_peers"),
            slab_bytes=_size(extra, "slab_bytes"),
            direct_transfer=_flag(extra, "direct_transfer"),
            allow_other_weights=_flag(extra, "allow_other_weights"),
            held_timeout_seconds=_held_timeout_seconds(extra),
            link=_rates(extra),
        )

    def link_model(self, memory: Memory) -> LinkModel:
        """The model of a cache in this kind of memory."""
        return LinkModel(memory, **self.link)


def _flag(extra: Mapping[str, Any], key: str) -> bool:
    value = extra.get(key, False)
    if not isinstance(value, bool):
        raise _invalid(key, value, "true or false")
    return value


def _size(extra: Mapping[str, Any], key: str) -> int | None:
    if key not in extra:
        return None
    value = extra[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _invalid(key, value, "a number of bytes, 0 or more")
    return value


def _held_timeout_seconds(extra: Mapping[str, Any]) -> float:
    seconds = extra.get("held_timeout_seconds", ConnectorConfig.held_timeout_seconds)
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= MAX_HELD_TIMEOUT_SECONDS:
        limit = f"seconds, more than 0 and {MAX_HELD_TIMEOUT_SECONDS:g} at most"
        raise _invalid("held_timeout_seconds", seconds, limit)
    return float(seconds)


def _rates(extra: Mapping[str, Any]) -> Mapping[str, float]:
    rates = extra.get("link", {})
    if not isinstance(rates, Mapping) or not all(
        isinstance(rate, (int, float)) and not isinstance(rate, bool) for rate in rates.values()
    ):
        raise _invalid("link", rates, "a map of rates")
    found = {str(name): float(rate) for name, rate in rates.items()}
    try:
        LinkModel("dram", **found)
    except (TypeError, PlanError) as error:
        raise _invalid("link", found, f"rates of kvpd.LinkModel ({error})") from error
    return found


def _invalid(key: str, value: object, expected: str) -> KvpdError:
    return KvpdError(
        f"kv_connector_extra_config.{key} is {value!r}; expected {expected}",
        code="invalid-config",
        field=f"kv_connector_extra_config.{key}",
        got=repr(value),
        expected=expected,
    )
