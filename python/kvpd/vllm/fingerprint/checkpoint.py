"""Which files weights were loaded from, found as vLLM's loader finds them, without a network."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from kvpd.errors import KvpdError

# Formats of vLLM whose weights are safetensors files of the checkpoint, as they are. Of others
# (dummy, streamed, memory of another process, files cut per rank) no such file is what was loaded.
SAMPLED_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer"}
)
_MISTRAL, _HF = (
    ("consolidated*.safetensors", "consolidated.safetensors.index.json"),
    (
        "*.safetensors",
        "model.safetensors.index.json",
    ),
)
_MAX_INDEX_BYTES = 64 << 20
_Name = Annotated[str, msgspec.Meta(max_length=4096)]


class _Index(msgspec.Struct):
    weight_map: dict[_Name, _Name]


@dataclass(frozen=True)
class Source:
    """Where a model came from.

    Attributes:
        model: a folder, or a name in the Hugging Face hub.
        revision: of the hub's repository; None for its main branch.
        download_dir: the hub's cache, if it is not the usual one.
        load_format: vLLM's ``--load-format``.
        is_from_other_hub: names are those of another hub, whose files are elsewhere.
    """

    model: str
    revision: str | None = None
    download_dir: str | None = None
    load_format: str = "auto"
    is_from_other_hub: bool = False


def weight_files(source: Source) -> list[Path]:
    """The safetensors files that the loader reads.

    Raises:
        KvpdError: there are none here, with why.
    """
    if source.load_format not in SAMPLED_FORMATS:
        raise unknown(f"load format {source.load_format!r} reads no safetensors files as they are")
    folder = _folder(source)
    patterns = [_HF]
    if source.load_format == "mistral":
        patterns = [_MISTRAL]
    elif source.load_format == "auto":
        patterns = [_MISTRAL, _HF]
    for pattern, index in patterns:
        files = sorted(folder.glob(pattern))
        if files:
            return _listed_in(folder / index, files)
    raise unknown(f"{folder} has no safetensors files")


def unknown(why: str) -> KvpdError:
    """The error that says why weights cannot be sampled."""
    return KvpdError(why, code="weights-unknown", field="model_weights", got=why)


def _folder(source: Source) -> Path:
    if os.path.isdir(source.model):
        return Path(source.model)
    if source.is_from_other_hub:
        raise unknown(f"{source.model} is not a folder, and its hub's files are not known")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise unknown(f"{source.model} is not a folder: {error}") from error
    try:
        found = snapshot_download(
            source.model,
            revision=source.revision,
            cache_dir=source.download_dir,
            local_files_only=True,
        )
    # Not in the cache, or not a name that the hub could have.
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise unknown(f"{source.model} is not a folder, nor in the hub's cache: {first}") from error
    return Path(found)


def _listed_in(index: Path, files: Sequence[Path]) -> list[Path]:
    """Those that the index names, where there is one: others are copies of the same weights."""
    if not index.is_file():
        return list(files)
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise unknown(f"{index.name} is larger than any index")
    try:
        named = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.DecodeError, RecursionError) as error:
        raise unknown(f"{index.name}: {error}") from error
    missing = named - {path.name for path in files}
    if missing:
        raise unknown(f"{index.name} names {min(missing)!r}, which is not there")
    return [path for path in files if path.name in named]
