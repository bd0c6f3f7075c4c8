"""What a request says about blocks of a peer: vLLM's ``kv_transfer_params``, proved before use.

They come through a client and a router, so they are hostile. What is read here has the right types
and sizes; whether the peer has such blocks and ranks is asked later, of the peer's handshake
(`kvpd.vllm.pairing`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from kvpd.errors import RequestError

FIELD = "kv_transfer_params"
# The key of ours among vLLM's.
KEY = "kvpd"
MAX_GROUPS = 64
MAX_TP_SIZE = 1024
_HOW = "a router has to pass on kv_transfer_params as the prefill returned them"

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_BlockId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_One = Annotated[int, msgspec.Meta(ge=1, le=1)]


class Proof(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the engine that owns the blocks says about the prompt they were computed from.

    Attributes:
        num_tokens: leading tokens of the request that the blocks hold.
        prompt: `kvpd.vllm.prompt.digest` of these tokens; None where it cannot be made.
        request: random id by which the engine can be asked whether it still holds the blocks; None
            where it holds none.
    """

    num_tokens: _NumTokens
    prompt: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    request: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")] | None = None


class Reference(
    msgspec.Struct,
    frozen=True,
    rename={
        "engine_id": "remote_engine_id",
        "request_id": "remote_request_id",
        "host": "remote_host",
        "port": "remote_port",
        "block_ids": "remote_block_ids",
        "num_tokens": "remote_num_tokens",
        "blocks_expiry": "remote_blocks_expiry_time",
        "generation": "remote_registration_generation",
        "proof": KEY,
    },
):
    """Blocks of a peer that a request wants to be read.

    Attributes:
        engine_id, request_id: whose they are.
        host, port: the side channel of that engine.
        block_ids: for each of the peer's KV groups, ids of blocks in order. They end with the block
            of the last of `num_tokens`; of a sliding window only the last ones are listed.
        num_tokens: leading tokens of the sequence that the peer computed.
        blocks_expiry: until when the peer keeps them, by its clock in seconds; None if it says not.
        proof: kvpd's own part; None of a stock peer, or where a router dropped it.
    """

    engine_id: _Name
    request_id: _Name
    host: _Name
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    block_ids: Annotated[tuple[tuple[_BlockId, ...], ...], msgspec.Meta(max_length=MAX_GROUPS)]
    num_tokens: _NumTokens
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_TP_SIZE)]
    dcp_size: _One = 1
    pp_size: _One = 1
    blocks_expiry: float | None = None
    generation: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    proof: Proof | None = None

    @property
    def num_usable_tokens(self) -> int:
        """Leading tokens that may be taken from the peer: what its proof covers, if there is one.

        Without it a token that the peer sampled, and the request did not, could be counted.
        """
        if self.proof is None:
            return self.num_tokens
        return min(self.num_tokens, self.proof.num_tokens)


@dataclass(frozen=True)
class Refusal:
    """Why one request is not served; plain, so that it reaches the workers of an engine.

    Attributes:
        code: stable name.
        reason: field, values and what to do, in words.
    """

    code: str
    reason: str

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        """The refusal that an error is."""
        code = getattr(error, "code", "") or "internal-error"
        return cls(str(code), str(error) or type(error).__name__)


def referred(params: object, *, reads_while_prefilling: bool) -> Reference | None:
    """What a request's parameters refer to; None if it reads nothing of a peer.

    Args:
        params: a request's ``kv_transfer_params``, of any type.
        reads_while_prefilling: a prefill of this engine may read blocks of a decoder, too
            (vLLM's ``bidirectional_kv_xfer``).

    Raises:
        RequestError: they are malformed; which field, what it is and what it has to be.
    """
    if params is None:
        return None
    if not isinstance(params, Mapping):
        raise _error(FIELD, type(params).__name__, "a map")
    roles = {}
    for role in ("do_remote_prefill", "do_remote_decode"):
        roles[role] = params.get(role)
        if not isinstance(roles[role], bool | None):
            raise _error(role, repr(roles[role]), "true or false")
    wants = roles["do_remote_prefill"] or (
        reads_while_prefilling and roles["do_remote_decode"] and params.get("remote_block_ids")
    )
    if not wants:
        return None
    try:
        reference = msgspec.convert(params, Reference)
    except (msgspec.ValidationError, RecursionError) as error:
        # msgspec ends its message with "- at `$.path`".
        what, _, path = str(error).partition(" - at `$")
        field = path.removesuffix("`").removeprefix(".") or FIELD
        raise _error(field, what, "as the peer gave it") from error
    if reference.blocks_expiry is not None and not math.isfinite(reference.blocks_expiry):
        raise _error("remote_blocks_expiry_time", str(reference.blocks_expiry), "a time")
    mode = params.get("transfer_mode")
    if mode not in (None, "pull"):
        raise _error("transfer_mode", repr(mode), "'pull'")
    return reference


def publish(params: dict[str, Any], proof: Proof) -> None:
    """Add our part to the parameters that an engine returns with a finished request."""
    params[KEY] = msgspec.to_builtins(proof)


def _error(field: str, got: str, expected: str) -> RequestError:
    where = field if field == FIELD else f"{FIELD}.{field}"
    return RequestError(
        f"{where}: {got[:200]}; expected {expected}; {_HOW}",
        code="invalid-params",
        field=where,
        got=got[:200],
        expected=expected,
    )
