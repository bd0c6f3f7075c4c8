"""Stock's pull scheduler; what a request brings is proved before anything is done by it.

Every method here is called for one request by vLLM's scheduler, where an exception ends the engine.
So each ends that request instead: it is parked, as one whose blocks are awaited, and the workers
report that they did not come.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from kvpd.errors import RequestError
from kvpd.vllm.adapter.groups import groups_of
from kvpd.vllm.adapter.handshake import start_of
from kvpd.vllm.adapter.listener import serve_handshakes
from kvpd.vllm.adapter.releases import Releases
from kvpd.vllm.adapter.windows import keep_for_last_token
from kvpd.vllm.held import Records, content_digest
from kvpd.vllm.pairing import Wanted
from kvpd.vllm.prompt import Media, digest
from kvpd.vllm.reference import Proof, Reference, Refusal, publish, referred

# vLLM configures handlers for its own loggers only.
logger = logging.getLogger("vllm.kvpd")


@dataclass
class Asked:
    """A request that asks for blocks of a peer.

    Attributes:
        what: what it refers to, or why it is refused.
        num_computed_tokens: leading tokens that are here already, as last asked for.
        wanted: which blocks wait for the peer's; None if none does, or if the model keeps states.
    """

    what: Reference | Refusal
    num_computed_tokens: int = 0
    wanted: Wanted | None = None


class KvpdScheduler(NixlPullConnectorScheduler):
    """Stock's scheduler. A request's parameters are read once, here, and what is bad is refused.

    Finished requests carry until when their blocks are kept, a proof of their prompt, and an id by
    which the side channel says whether the blocks are still held.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._has_states = groups_of(kv_cache_config) is None
        self._records = Records()
        self._nixl_handshake_listener = partial(serve_handshakes, records=self._records)
        self._asked: dict[str, Asked] = {}
        # To be failed by the workers, with the blocks that wait for nothing.
        self._refused: dict[str, tuple[Refusal, Sequence[Sequence[int]] | None]] = {}

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Of what the engine's cache manager keeps; states are not computed again."""
        if not self._has_states:
            keep_for_last_token(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        """As stock, for a request whose parameters are as they have to be."""
        with self._alone(request):
            reference = referred(
                request.kv_transfer_params,
                reads_while_prefilling=self.is_bidirectional_kv_xfer_enabled,
            )
            if reference is not None:
                self._check_prompt(request, reference)
            super().on_new_request(request)
            if reference is not None:
                self._asked[request.request_id] = Asked(reference)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As stock, but no more tokens than the peer computed.

        A refused request is told to wait for all of its prompt: only one that waits can fail.
        """
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        count = 0
        with self._alone(request):
            asked.num_computed_tokens = num_computed_tokens
            if isinstance(asked.what, Reference):
                stock, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
                count = self._num_usable_tokens(asked.what, stock, num_computed_tokens)
        if isinstance(self._asked[request.request_id].what, Refusal):
            count = int(request.num_prompt_tokens) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As stock, with the positions of the blocks that wait."""
        name = request.request_id
        with self._alone(request):
            asked = self._asked.get(name)
            what = None if asked is None else asked.what
            if not isinstance(what, Refusal):
                super().update_state_after_alloc(request, blocks, num_external_tokens)
            if asked and isinstance(what, Reference) and num_external_tokens > 0:
                num_tokens = asked.num_computed_tokens + num_external_tokens
                # vLLM 0.30 and 0.31 may have taken fewer tokens than they were offered.
                self._check_state(what, num_tokens)
                if not self._has_states:
                    asked.wanted = self._wanted(blocks, num_tokens)
        asked = self._asked.get(name)
        if asked is not None and isinstance(asked.what, Refusal):
            # Once: a request that is recomputed comes here again.
            del self._asked[name]
            self._reqs_need_recv.pop(name, None)
            unread = None
            if num_external_tokens > 0:
                unread = self.get_exchange_clipped_blocks(
                    blocks.get_unhashed_block_ids_all_groups()
                )
            self._refused[name] = asked.what, unread

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As stock, with what was found out about the requests that are read."""
        meta = super().build_connector_meta(scheduler_output)
        for name, request in meta.reqs_to_recv.items():
            asked = self._asked.pop(name, None)
            request.kvpd = None if asked is None else (asked.what, asked.wanted)
        meta.kvpd_refused, self._refused = self._refused, {}
        return meta

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """As stock, with ``remote_blocks_expiry_time`` filled in, and our proof of the prompt."""
        name = request.request_id
        is_delayed: bool = False
        params: dict[str, Any] | None = None
        with self._alone(request):
            if not self._is_refused(name):
                # Nothing that a refused request names may be told anything.
                is_delayed, params = super().request_finished(request, block_ids)
            if params is not None:
                publish(params, self._proof(request, params, is_delayed))
                if (
                    # There stock reads it as a date that heartbeats do not move, and declines live
                    # leases.
                    not self.is_bidirectional_kv_xfer_enabled
                    and params.get("remote_blocks_expiry_time") is None
                ):
                    # In this process's clock, like the deadlines stock publishes in the other
                    # direction; a reader corrects it by the offset that the handshake measured.
                    params["remote_blocks_expiry_time"] = self._reqs_need_send.get(name)
        if self._is_refused(name) or name not in self._reqs_need_recv:
            self._asked.pop(name, None)
        if not is_delayed:
            # A lease of blocks that are freed now would be ended for a request nobody knows.
            self._reqs_need_send.pop(name, None)
        return is_delayed, params

    def _proof(self, request: Any, params: dict[str, Any], is_delayed: bool) -> Proof:
        """What this engine proves about the blocks of a finished request.

        Of a prefill the prompt only: what it sampled is not what a decoder's request goes on with.
        Of a decoder all that it computed, which the next turn's prompt repeats.
        """
        is_prefill = params["do_remote_prefill"]
        have = request.num_prompt_tokens if is_prefill else max(0, request.num_tokens - 1)
        num_computed = int(params["remote_num_tokens"])
        covered = min(num_computed, int(have))
        prompt = _digest(request, covered)
        if not is_delayed:
            return Proof(covered, prompt)
        # Before the parameters leave: whoever reads the blocks may ask at once.
        content = content_digest(params["remote_block_ids"], num_computed, covered, prompt)
        return Proof(covered, prompt, self._records.enter(request.request_id, content).hex())

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """As stock. The caches were registered anew: what was held before is not any more."""
        self._records.begin(start for payload in metadata.values() if (start := start_of(payload)))
        super().set_xfer_handshake_metadata(metadata)

    def update_connector_output(self, connector_output: Any) -> None:
        """As stock. vLLM frees what was sent as soon as this returns."""
        releases = connector_output.kv_connector_worker_meta
        if isinstance(releases, Releases):
            for start, requests in releases.agents.items():
                for name, agents in requests.items():
                    self._records.release(name, start, agents)
        for name in connector_output.finished_sending or ():
            self._records.end(name)
        super().update_connector_output(connector_output)

    def let_go(self) -> None:
        """The cache's content is about to be lost; nothing of it is held any more."""
        self._records.clear()

    def shutdown(self) -> None:
        """As stock; nothing is held any more."""
        self._records.clear()
        super().shutdown()

    @contextmanager
    def _alone(self, request: Any) -> Iterator[None]:
        """Let an exception end this request, and nothing else."""
        try:
            yield
        except Exception as error:
            logger.debug("%s", request.request_id, exc_info=True)
            if not isinstance(request.kv_transfer_params, dict):
                # vLLM's scheduler goes on to look things up in it.
                request.kv_transfer_params = {}
            request.kv_transfer_params["do_remote_prefill"] = False
            self._stop_heartbeat(request.request_id)
            self._asked[request.request_id] = Asked(Refusal.of(error))

    def _is_refused(self, name: str) -> bool:
        asked = self._asked.get(name)
        return asked is not None and isinstance(asked.what, Refusal)

    def _check_prompt(self, request: Any, reference: Reference) -> None:
        """Raise `RequestError` if the blocks were computed from another prompt than this one."""
        proof = reference.proof
        if proof is None or proof.prompt is None:
            return
        have = request.num_tokens
        if have < proof.num_tokens:
            raise RequestError(
                f"kv_transfer_params are of a prefill of {proof.num_tokens} tokens, this request "
                f"has {have}; give every request the kv_transfer_params of its own prefill",
                code="prompt-differs",
                field="prompt",
                got=f"{have} tokens",
                expected=f"{proof.num_tokens} tokens or more",
            )
        ours = _digest(request, proof.num_tokens)
        if ours is not None and ours != proof.prompt:
            raise RequestError(
                f"kv_transfer_params are of another prompt: the first {proof.num_tokens} tokens, "
                "their images and other media, or the LoRA adapter differ; give every request the "
                "kv_transfer_params of its own prefill, and load the model under one name on both "
                "sides where requests have media",
                code="prompt-differs",
                field="prompt",
                got=ours,
                expected=proof.prompt,
            )

    def _num_usable_tokens(self, reference: Reference, count: int, num_computed: int) -> int:
        """Of `count` tokens that stock would wait for, those that the peer has computed."""
        has = reference.num_usable_tokens
        if has > num_computed and not any(reference.block_ids):
            raise RequestError(
                f"kv_transfer_params.remote_block_ids names no blocks for {has} tokens; give every "
                "request the kv_transfer_params of its own prefill, as they came",
                code="remote-blocks",
                field="kv_transfer_params.remote_block_ids",
                got="0 blocks",
                expected=f"those of {has} tokens",
            )
        if count > 0:
            self._check_state(reference, num_computed + count)
        return min(count, has - num_computed)

    def _check_state(self, reference: Reference, num_tokens: int) -> None:
        """Raise `RequestError` if the model keeps states, and they are those after other tokens."""
        has = reference.num_usable_tokens
        if self._has_states and has != num_tokens:
            raise RequestError(
                f"kv_transfer_params.remote_num_tokens is {has}; the state of this model is that "
                f"after its last token, which has to be token {num_tokens}; give every request the "
                "kv_transfer_params of its own prefill",
                code="remote-tokens",
                field="kv_transfer_params.remote_num_tokens",
                got=has,
                expected=num_tokens,
            )

    def _wanted(self, blocks: Any, num_tokens: int) -> Wanted:
        """What a request waits for, of all its blocks.

        Stock cuts the lists of windows to their length, from the end: in front of blocks that are
        ahead of the tokens it would lose some that are attended to.
        """
        select = self.kv_cache_config.select_transfer_block_ids
        held = select([[block.block_id for block in group] for group in blocks.blocks])
        waiting = select(blocks.get_unhashed_block_ids_all_groups())
        first_blocks = []
        for ids, group in zip(held, waiting, strict=True):
            first = ids.index(group[0]) if group else len(ids)
            if list(group) != ids[first : first + len(group)]:
                raise RequestError(
                    "the blocks that wait do not follow each other in the sequence",
                    code="positions-unknown",
                    field="local_block_ids",
                    got=list(group)[:16],
                    expected=ids[first : first + 16],
                )
            first_blocks.append(first)
        return Wanted(tuple(map(tuple, waiting)), tuple(first_blocks), num_tokens)


def _digest(request: Any, num_tokens: int) -> str | None:
    """Digest of a request's first tokens; None where what they stand for is not known."""
    if request.prompt_embeds is not None:
        return None
    media = []
    for feature in request.mm_features:
        place = feature.mm_position
        if place.offset < num_tokens:
            content = feature.mm_hash or feature.identifier
            if re.search(rf"-{re.escape(feature.modality)}-\d+$", content):
                # With its caches off vLLM names media by the request, not by what is in them.
                content = ""
            media.append(Media(feature.modality, content, place.offset, place.length))
    adapter = "" if request.lora_request is None else request.lora_request.lora_name
    return digest(request.all_token_ids[:num_tokens], media, adapter)
