"""vLLM's own cache writer, taken from an installed or given copy of its source, never kept here."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from kvpd.errors import MissingDependencyError

_MODULE = Path("v1") / "attention" / "backends" / "rocm_aiter_fa.py"
_KERNEL = "reshape_and_cache_shuffle_kernel"


def writer_source(given: Path | None) -> Path:
    """The file that defines vLLM's shuffle writer.

    Raises:
        MissingDependencyError: nothing was given and vllm is not installed.
    """
    if given is not None:
        return given
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / _MODULE).is_file():
            return Path(folder) / _MODULE
    raise MissingDependencyError(
        "vLLM's cache writer was not found: install vllm or name its rocm_aiter_fa.py",
        code="missing-dependency",
        field="vllm",
        got="not installed",
        expected=str(_MODULE),
    )


def load_kernel(source: Path, name: str = _KERNEL) -> Any:
    """One Triton kernel of a source file that cannot be imported as a whole on this platform.

    Raises:
        MissingDependencyError: the file has no such function.
    """
    text = source.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            indent = len(lines[0]) - len(lines[0].lstrip())
            body = "\n".join(line[indent:] for line in lines)
            return import_kernel(name, f"@triton.jit\n{body}")
    raise MissingDependencyError(
        f"{source} defines no {name}",
        code="missing-dependency",
        field=name,
        got="not defined",
        expected=name,
    )


def import_kernel(name: str, functions: str) -> Any:
    """The kernel `name` out of the text of decorated Triton functions."""
    text = f"import triton\nimport triton.language as tl\n\n\n{functions}\n"
    # Triton reads a kernel's source from its file, so it needs one that outlives this call.
    folder = Path(tempfile.mkdtemp(prefix="kvpd-writer-"))
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"kvpd_writer_{name}", path)
    if spec is None or spec.loader is None:
        raise MissingDependencyError(
            f"{path} cannot be imported", code="missing-dependency", field=name
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def write_tokens(
    kernel: Any,
    key: Any,  # [tokens, H, D]
    value: Any,  # [tokens, H, D]
    key_cache: Any,  # [blocks, H*N*D] elements, any block stride
    value_cache: Any,  # as key_cache
    slots: Any,  # int64 [tokens]: block * N + token of the page
    tokens_per_page: int,
) -> None:
    """Launch vLLM's writer as its backend does: one program per token and head."""
    num_tokens, heads, head_dim = key.shape
    kernel[(num_tokens, heads)](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        None,
        None,
        16 // key_cache.element_size(),
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        tokens_per_page,
        head_dim,
        heads,
        BLOCK_SIZE=head_dim,
        QUANT=False,
    )
