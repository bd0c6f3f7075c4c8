"""An inspection for people."""

from __future__ import annotations

import hashlib
import json

import msgspec

from kvpd._kvpd import EngineFacts
from kvpd.cli.console import Page, counted, readable_bytes
from kvpd.cli.inspect.fits import Fit
from kvpd.cli.inspect.inspection import Inspection
from kvpd.cli.inspect.regions import RegionGroup
from kvpd.errors import KvpdError

_MAX_PART_CHARACTERS = 300


def show(inspection: Inspection, page: Page) -> None:
    """Print everything that the engine offers."""
    summary, metadata = inspection.summary, inspection.metadata
    tagged = {"kvpd": "kvpd's connector, tagged", "stock": "stock connector, untagged"}
    page.line(f"{inspection.source} rank {inspection.tp_rank}: {tagged[summary.connector]}", "bold")
    if summary.tag_problem is not None:
        page.line(f"  its tag cannot be read: {summary.tag_problem.message}", "yellow")
    page.pairs(_facts(inspection))
    page.heading(
        f"{counted(len(metadata.block_lens), 'region')} of "
        f"{counted(summary.num_layers, 'layer')}, {readable_bytes(summary.total_bytes)} registered"
    )
    show_regions(summary.regions, page)
    if summary.connector == "stock" or summary.tag_problem is not None:
        _show_fits(summary.fits, page)
    if summary.optional_parts:
        page.heading("optional parts")
        page.pairs([(n, _short(value)) for n, value in summary.optional_parts.items()])
    if summary.left_out:
        page.line(f"  not shown and not saved: {', '.join(summary.left_out)}")


def show_regions(groups: list[RegionGroup], page: Page) -> None:
    """The table of regions."""
    rows = [
        [
            _layers(group.layers),
            str(group.position),
            group.planes or "?",
            group.page_format or "untagged",
            group.memory,
            f"{group.block_bytes:,}",
            f"{group.block_stride_bytes:,}" + ("" if group.is_dense else " padded"),
            f"{group.num_blocks:,}",
        ]
        for group in groups
    ]
    names = [
        "layers",
        "region",
        "holds",
        "page format",
        "memory",
        "block bytes",
        "stride",
        "blocks",
    ]
    page.table(["  " + names[0], *names[1:]], [["  " + row[0], *row[1:]] for row in rows], right=3)


def _show_fits(fits: list[Fit], page: Page) -> None:
    names = list(dict.fromkeys(name for fit in fits for name in fit.formats))
    if not names:
        page.heading("fits no known page format with a usual head size")
        return
    page.heading(
        "fits (KV heads of the rank x head size)"
        + (
            "; cannot be told apart"
            if sum(len(f.formats) * len(f.shapes) for f in fits) > 1
            else ""
        )
    )
    sizes = list(dict.fromkeys(fit.element_bits for fit in fits))
    cells = {
        (name, bits): ", ".join(
            f"{heads}x{head_dim}"
            for fit in fits
            if fit.element_bits == bits and name in fit.formats
            for heads, head_dim in fit.shapes
        )
        for name in names
        for bits in sizes
    }
    page.table(
        ["  page format", *(f"{bits}-bit elements" for bits in sizes)],
        [["  " + name, *(cells[name, bits] or "-" for bits in sizes)] for name in names],
    )


def _facts(inspection: Inspection) -> list[tuple[str, str]]:
    metadata = inspection.metadata
    rows: list[tuple[str, str]] = [("engine", metadata.engine_id)]
    try:
        handshake = inspection.published().handshake()
    except KvpdError:
        handshake = None
    if handshake is not None:
        facts = handshake.description.facts
        rows += [
            ("vLLM", facts.release),
            ("connector", facts.connector),
            ("model", f"{facts.model}, {facts.model_dtype}, quantization {facts.quantization}"),
            ("weights", _known(facts.model_weights)),
            ("configuration", _configuration(facts.model_config)),
            ("cache", _cache(facts)),
            ("speculative", facts.speculative),
            ("parallel", f"TP rank {facts.tp_rank} of {facts.tp_size}, PP {facts.pp_size}"),
            (
                "KV groups",
                f"{facts.num_kv_groups}{', MLA' if facts.uses_mla else ''}, hybrid manager "
                f"{'on' if facts.hybrid_manager else 'off'}",
            ),
        ]
    blocks_per_block = metadata.physical_blocks_per_logical_kv_block
    per_block = "" if blocks_per_block == 1 else f", {blocks_per_block} kernel blocks per block"
    rows += [
        ("layout", metadata.kv_cache_layout),
        ("backend", metadata.attn_backend_name),
        ("block size", f"{metadata.block_size} tokens{per_block}"),
        ("blocks", f"{metadata.num_blocks:,}"),
        ("device", str(metadata.device_id)),
        ("digest", inspection.compatibility_hash),
    ]
    if inspection.summary.page_format is not None:
        rows.append(("page format", inspection.summary.page_format))
    if (metadata.dcp_size, metadata.pcp_size) != (1, 1):
        rows.append(("context parallel", f"DCP {metadata.dcp_size}, PCP {metadata.pcp_size}"))
    return rows


def _known(digest: str | None) -> str:
    return "unknown; the engine's log says why" if digest is None else digest


def _configuration(fields: dict[str, str] | None) -> str:
    """A digest for people to compare by eye; the fields are in the JSON."""
    if fields is None:
        return _known(None)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
    return f"{counted(len(fields), 'field')}, {digest}"


def _cache(facts: EngineFacts) -> str:
    text = f"{facts.total_kv_heads} KV heads of {facts.head_dim}, {facts.cache_dtype}"
    if facts.cache_dtype_setting != facts.cache_dtype:
        text += f" (set as {facts.cache_dtype_setting})"
    if not facts.quantised_cache:
        return text
    if facts.scales is None:
        return f"{text}, scales unknown"
    return f"{text}, scales of {counted(len(facts.scales), 'layer')}"


def _layers(names: tuple[str, ...]) -> str:
    unique = list(dict.fromkeys(names))
    if len(unique) <= 2:
        return ", ".join(unique)
    return f"{unique[0]} ... {unique[-1]} ({len(unique)})"


def _short(value: object) -> str:
    text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False)
    return text if len(text) <= _MAX_PART_CHARACTERS else text[:_MAX_PART_CHARACTERS] + " ..."
