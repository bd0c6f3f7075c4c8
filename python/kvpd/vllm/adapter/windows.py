"""What vLLM keeps of windows, for a decoder that computes a prompt's last token once more."""

from __future__ import annotations

from functools import partial
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)


def keep_for_last_token(kv_cache_manager: Any) -> None:
    """Keep also what the last computed token attends to; vLLM keeps what the next one does.

    A decoder that has got all of a prompt computes its last token again, to sample from it. Where
    the window of the next token begins with a block, that of the last one begins a block earlier:
    without it one prompt in as many as a block has tokens attends to the null block. A prefill has
    to keep the block, a decoder to ask for it.
    """
    for manager in kv_cache_manager.coordinator.single_type_managers:
        if isinstance(manager, (SlidingWindowManager, ChunkedLocalAttentionManager)):
            skipped = manager.get_num_skipped_tokens
            manager.get_num_skipped_tokens = partial(_before_last, skipped)


def _before_last(get_num_skipped_tokens: Any, num_computed_tokens: int) -> int:
    return int(get_num_skipped_tokens(max(0, num_computed_tokens - 1)))
