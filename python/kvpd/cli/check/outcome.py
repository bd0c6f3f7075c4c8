"""What two handshakes say about a pair.

A kvpd decoder decides by `kvpd.vllm.judgement`, and so does this. A stock decoder decides by its
own checks, and nobody can say from its handshake what its pages look like.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from kvpd._kvpd import Reason, Verdict, negotiate
from kvpd.cli.check.kernels import kernel_problems
from kvpd.cli.inspect.engine import Engine
from kvpd.cli.inspect.fits import fits
from kvpd.errors import KvpdError, RefusedError, WireError
from kvpd.vllm.judgement import Digests, Judgement, Local, Policy, judge
from kvpd.vllm.stock import Veto, block_bytes_differ, digest_veto, stock_vetoes
from kvpd.wire import Handshake

Status = Literal["works", "refused", "unknown"]
Answer = Literal["accepted", "refused", "unknown"]

_FOREIGN_DIGEST = (
    "a stock decoder would misread these pages, so kvpd publishes a digest that none has; load "
    "kvpd's connector on the decoder"
)
_UNCOMPARED = (
    "stock serves pairs that pass its checks and compares no pages: tokens are right only if both "
    "keep one page format; load kvpd's connector on the decoder to have it checked"
)

_NOT_OFFERED = (
    "the pair is served by NIXL; set direct_transfer on the prefill too, where it runs on the same "
    "host and its memory can be shared"
)


class Finding(msgspec.Struct, frozen=True):
    """A reason, a doubt, something unproved, or a warning.

    Attributes:
        code: stable name.
        field: what differs or is unknown.
        decode, prefill: both values.
        remedy: what to change, or what to make of it.
        is_shared: both sides have one value, and that is what is wrong.
    """

    code: str
    field: str
    decode: str
    prefill: str
    remedy: str
    is_shared: bool = False


@dataclass(frozen=True)
class Assumed:
    """What the decoder's operator configured; no engine publishes it.

    Attributes:
        page_format_conversion, require_tagged_peers, direct_transfer, allow_other_weights: kvpd's
            keys.
        enforce_handshake_compat: stock's.
    """

    page_format_conversion: bool = False
    require_tagged_peers: bool = False
    enforce_handshake_compat: bool = True
    direct_transfer: bool = False
    allow_other_weights: bool = False


@dataclass(frozen=True)
class Outcome:
    """The answer.

    Attributes:
        decided_by: whose code the decoder runs.
        reasons: why the decoder refuses the prefill; empty if it does not.
        doubts: what neither handshake says and the decoder's answer depends on.
        unproved: the decoder accepts, and whether tokens are right depends on pages or weights that
            somebody does not describe, or that differ with the operator's leave.
        warnings: what makes an accepted pair slow.
        verdict: of the page formats; None where a stock decoder decides, or it is refused.
        is_direct: the prefill offers its memory, and the decoder takes such offers.
        would_convert: refused, and converted if the decoder had conversion enabled.
    """

    decided_by: Literal["kvpd", "stock"]
    reasons: list[Finding] = field(default_factory=list)
    doubts: list[Finding] = field(default_factory=list)
    unproved: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)
    verdict: Verdict | None = None
    is_direct: bool = False
    would_convert: bool = False

    @property
    def handshake(self) -> Answer:
        """What the decoder will answer; refused is refused whatever the doubts are."""
        if self.reasons:
            return "refused"
        return "unknown" if self.doubts else "accepted"

    @property
    def status(self) -> Status:
        """Whether the pair works. Accepted is not enough where pages are only believed equal."""
        if self.handshake == "accepted" and not self.unproved:
            return "works"
        return "refused" if self.reasons else "unknown"


def outcome_of(prefill: Engine, decode: Engine, assumed: Assumed) -> Outcome:
    """Decide as the decoder would.

    Raises:
        KvpdError: the decoder's own tag cannot be read, so nothing can be told.
    """
    if decode.published.metadata.kvpd is None:
        return _by_stock(prefill, decode, assumed)
    return _by_kvpd(prefill, decode, decode.published.handshake(), assumed)


def _by_kvpd(prefill: Engine, decode: Engine, local: Handshake | None, assumed: Assumed) -> Outcome:
    if local is None:
        raise WireError("the decoder's tag is empty", code="malformed", field="kvpd")
    try:
        judgement = _judge(prefill, decode, local, assumed)
    except KvpdError as error:
        would_convert = _would_convert(prefill, decode, local, assumed)
        return Outcome("kvpd", _reasons(error), would_convert=would_convert)
    verdict = judgement.verdict
    reasons: list[Finding] = []
    doubts = _parallel_doubts(prefill, decode)
    if judgement.handshake is None:
        # Accepted by kvpd, then registered by stock, which has its own checks.
        reasons, more = _stock_checks(prefill, decode)
        doubts += more
    if verdict.kind == "convert":
        # The decoder prepares its kernels while it shakes hands, and refuses if it cannot.
        problems = kernel_problems(verdict, local.description)
        reasons += [Finding(*problem) for problem in problems.reasons]
        doubts += [Finding(*problem) for problem in problems.doubts]
    offers = judgement.handshake is not None and judgement.handshake.direct is not None
    warnings = _padding_warnings(prefill, decode)
    if assumed.direct_transfer and not offers:
        warnings.append(Finding("direct-not-offered", "direct", "on", "no offer", _NOT_OFFERED))
    return Outcome(
        "kvpd",
        reasons,
        doubts,
        unproved=[_of_reason(warning) for warning in verdict.warnings],
        warnings=warnings,
        verdict=verdict,
        is_direct=assumed.direct_transfer and offers,
    )


def _judge(prefill: Engine, decode: Engine, local: Handshake, assumed: Assumed) -> Judgement:
    # A decoder whose pages stock would misread publishes a digest of its own, not stock's. It
    # accepts no untagged peer, and only those are judged by the digest.
    return judge(
        Local(
            local.description,
            decode.published.metadata.physical_blocks_per_logical_kv_block,
        ),
        prefill.published.metadata,
        Digests(
            decode.published.digest, prefill.published.digest, assumed.enforce_handshake_compat
        ),
        Policy(
            assumed.page_format_conversion,
            assumed.require_tagged_peers,
            assumed.allow_other_weights,
        ),
    )


def _would_convert(prefill: Engine, decode: Engine, local: Handshake, assumed: Assumed) -> bool:
    enabled = replace(assumed, page_format_conversion=True)
    try:
        return _judge(prefill, decode, local, enabled).verdict.kind == "convert"
    except KvpdError:
        return False


def _by_stock(prefill: Engine, decode: Engine, assumed: Assumed) -> Outcome:
    reasons, doubts = _stock_checks(prefill, decode)
    veto = digest_veto(decode.published, prefill.published)
    if veto is not None and assumed.enforce_handshake_compat:
        finding = _of_veto(veto)
        if prefill.tag is not None and negotiate(prefill.tag.description, None).kind == "refuse":
            finding = msgspec.structs.replace(finding, remedy=_FOREIGN_DIGEST)
        reasons.insert(0, finding)
    unproved = Finding("pages-unknown", "page_format", _pages(decode), _pages(prefill), _UNCOMPARED)
    doubts += _parallel_doubts(prefill, decode)
    return Outcome("stock", reasons, doubts, [unproved], _padding_warnings(prefill, decode))


def _pages(engine: Engine) -> str:
    """What is known of its pages."""
    if engine.tag is not None:
        format = engine.tag.description.format
        return "several formats" if format is None else format.name
    if engine.published.metadata.kvpd is not None:
        return "a tag that cannot be read"
    fitting = fits(engine.published.metadata)
    names = dict.fromkeys(name for fit in fitting for name in fit.formats)
    return f"untagged, fits {' or '.join(names) or 'no known format'}"


def _stock_checks(prefill: Engine, decode: Engine) -> tuple[list[Finding], list[Finding]]:
    local, remote = decode.published.metadata, prefill.published.metadata
    reasons = [_of_veto(veto) for veto in stock_vetoes(local, remote)]
    doubts = []
    if not reasons and block_bytes_differ(local, remote):
        doubts.append(
            Finding(
                "block-bytes",
                "block_lens",
                str(local.block_lens[:1]),
                str(remote.block_lens[:1]),
                "stock accepts other block lengths only where they follow from unequal "
                "tensor-parallel sizes, which a stock engine does not publish",
            )
        )
    return reasons, doubts


def _parallel_doubts(prefill: Engine, decode: Engine) -> list[Finding]:
    local, remote = decode.published.metadata, prefill.published.metadata
    sizes = [f"DCP {side.dcp_size}, PCP {side.pcp_size}" for side in (local, remote)]
    if sizes[0] == sizes[1]:
        return []
    remedy = "what vLLM does with unequal context-parallel sizes is not judged here"
    return [Finding("context-parallel", "dcp_size", sizes[0], sizes[1], remedy)]


def _padding_warnings(prefill: Engine, decode: Engine) -> list[Finding]:
    values = []
    for side in (decode, prefill):
        metadata = side.published.metadata
        pairs = zip(metadata.block_lens, metadata.block_strides, strict=True)
        values.append("dense" if all(a == b for a, b in pairs) else "padded")
    if values == ["dense", "dense"]:
        return []
    remedy = "NIXL merges no neighbours where the stride is longer than the block"
    return [Finding("padded-regions", "block_strides", values[0], values[1], remedy)]


def _reasons(error: KvpdError) -> list[Finding]:
    if isinstance(error, RefusedError):
        return [_of_reason(reason) for reason in error.verdict.reasons]
    return [Finding(error.code, error.field, error.expected, error.got, str(error))]


def _of_reason(reason: Reason) -> Finding:
    values = reason.local, reason.remote
    return Finding(reason.code, reason.field, *values, reason.remedy, reason.is_shared)


def _of_veto(veto: Veto) -> Finding:
    return Finding(veto.code, veto.field, veto.local, veto.remote, veto.remedy)
