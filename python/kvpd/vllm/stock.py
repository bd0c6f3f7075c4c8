"""What vLLM's own connector checks about a peer, as far as two handshakes tell.

The checks are those that vLLM 0.30 to 0.33 share. They decide about untagged peers of a kvpd
decoder, and about every peer of a stock decoder. Stock knows no page formats: a pair that passes
is one that it serves, not one that it serves right.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpd.vllm.published import Published, StockMetadata

_MLA = "MLA"


@dataclass(frozen=True)
class Veto:
    """One check that fails.

    Attributes:
        code: stable name.
        field: the published field.
        local, remote: the decoder's and the prefill's value.
        remedy: what to change.
    """

    code: str
    field: str
    local: str
    remote: str
    remedy: str


def digest_veto(local: Published, remote: Published) -> Veto | None:
    """Stock compares digests before anything else, unless ``enforce_handshake_compat`` is false."""
    if local.digest == remote.digest:
        return None
    return Veto(
        "stock-digest",
        "compatibility_hash",
        local.digest,
        remote.digest,
        "run both sides with one vLLM build, model, dtypes, attention backend and hybrid manager "
        "setting; load kvpd's connector on both sides to have the factor named",
    )


def stock_vetoes(local: StockMetadata, remote: StockMetadata) -> list[Veto]:
    """What stock refuses after the digest, whatever the tensor-parallel sizes are."""
    vetoes = []
    is_mla = _MLA in local.attn_backend_name
    if local.kv_cache_layout != remote.kv_cache_layout and not is_mla:
        vetoes.append(
            Veto(
                "stock-layout",
                "kv_cache_layout",
                local.kv_cache_layout,
                remote.kv_cache_layout,
                "use one KV cache layout on both sides: unset VLLM_KV_CACHE_LAYOUT",
            )
        )
    if local.block_size % remote.block_size:
        vetoes.append(
            Veto(
                "stock-block-size",
                "block_size",
                str(local.block_size),
                str(remote.block_size),
                "use one block size on both sides, or a multiple of the prefill's on the decoder",
            )
        )
    if len(local.block_lens) != len(remote.block_lens):
        vetoes.append(
            Veto(
                "stock-regions",
                "block_lens",
                f"{len(local.block_lens)} regions",
                f"{len(remote.block_lens)} regions",
                "serve one model in one layout on both sides",
            )
        )
    elif remote.region_names is not None and local.region_names != remote.region_names:
        vetoes.append(
            Veto(
                "stock-region-names",
                "region_names",
                _differing(local.region_names, remote.region_names),
                _differing(remote.region_names, local.region_names),
                "serve one model with the same layers on both sides",
            )
        )
    return vetoes


def block_bytes_differ(local: StockMetadata, remote: StockMetadata) -> bool:
    """Whether blocks have other lengths than equal tensor-parallel sizes give.

    Stock accepts the lengths that follow from unequal sizes, which it does not publish.
    """
    ratio = max(local.block_size // remote.block_size, 1)
    return [length // ratio for length in local.block_lens] != remote.block_lens


def _differing(own: list[str] | None, other: list[str] | None) -> str:
    for position, name in enumerate(own or []):
        if other is None or position >= len(other) or other[position] != name:
            return f"region {position} is {name}"
    return "none"
