"""AITER's Triton kernel `fused_qk_rope_reshape_and_cache`, from an installed or given copy."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import torch

from kvpd.cli.convert_bench.writer import import_kernel
from kvpd.errors import MissingDependencyError
from kvpd.write import Rotation

_FOLDER = Path("ops") / "triton" / "_triton_kernels"
_KERNEL = "_fused_qk_rope_reshape_and_cache_kernel"
# What the kernel is made of: file, function.
_PARTS = (
    ("rope.py", "_get_neox_rotated_x_1D"),
    ("rope.py", "_get_gptj_rotated_x_1D"),
    ("fused_kv_cache.py", "_unit_rope"),
    ("fused_kv_cache.py", _KERNEL),
)


class AiterKernel:
    """The kernel with AITER's own launch arguments: a program per token and head of Q."""

    def __init__(self, package: Path | None) -> None:
        """Take it from the folder of the package `aiter`, found by itself if None.

        Raises:
            MissingDependencyError: there is no such package, or it has no such functions.
        """
        folder = _folder(package)
        parts = [_function(folder / file, name) for file, name in _PARTS]
        self._kernel = import_kernel(_KERNEL, "\n\n".join(parts))

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_plane: torch.Tensor,
        value_plane: torch.Tensor,
        slots: torch.Tensor,
        rotation: Rotation,
        query_out: torch.Tensor,
        key_out: torch.Tensor,
        tokens: int,
    ) -> None:
        """Rotate into `query_out` and `key_out`, and write pages with a transposed V."""
        num_tokens, query_heads, dim = query.shape
        heads, x = key.shape[1], 16 // key_plane.element_size()
        cos, sin = rotation.cos_sin.chunk(2, dim=-1)
        k_pages = key_plane.view(-1, heads, dim // x, tokens, x)
        v_pages = value_plane.view(-1, heads, dim, tokens)
        self._kernel[(num_tokens * query_heads, 1, 1)](
            query, key, value, rotation.positions, cos, sin, None, k_pages, v_pages, slots,
            query_out, key_out, None, num_tokens, num_tokens,
            *query.stride(), *key.stride(), *value.stride(), cos.stride(0), cos.stride(1),
            *query_out.stride(), *key_out.stride(), *k_pages.stride(), *v_pages.stride(), 0, 0, 0,
            k_scale_ptr=None,
            v_scale_ptr=None,
            QH_PER_KH=query_heads // heads,
            QH=query_heads,
            KH=heads,
            REUSE_FREQS_FRONT_PART=True,
            IS_NEOX=rotation.is_neox,
            BLOCK_D_pe=dim,
            BLOCK_D_HALF_pe=dim // 2,
            BLOCK_SIZE=tokens,
            X_SIZE=x,
            FLASH_LAYOUT=False,
            HAVE_POS=False,
            HAVE_K_SCALE=False,
            HAVE_V_SCALE=False,
            HAVE_ZEROS=False,
            num_warps=1,
        )  # fmt: skip


def _folder(package: Path | None) -> Path:
    if package is not None:
        return package / _FOLDER
    spec = importlib.util.find_spec("aiter")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        return Path(folder) / _FOLDER
    raise MissingDependencyError(
        "AITER was not found: install amd-aiter or name its package's folder",
        code="missing-dependency",
        field="aiter",
        got="not installed",
        expected=str(_FOLDER),
    )


def _function(source: Path, name: str) -> str:
    text = source.read_text() if source.is_file() else ""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            lines = text.splitlines()[node.lineno - 1 : node.end_lineno]
            return "\n".join(["@triton.jit", *lines])
    raise MissingDependencyError(
        f"{source} defines no {name}",
        code="missing-dependency",
        field="aiter",
        got="not defined",
        expected=name,
    )
