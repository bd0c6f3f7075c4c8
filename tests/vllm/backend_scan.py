"""What kvpd makes of every attention backend that a release of vLLM defines.

``python -m tests.vllm.backend_scan`` prints JSON lines, in an interpreter that has the release's
Python on its path; compiled and vendors' modules are not needed (standins.py). Of each class, for
each layout, element type, block and head size that it says it accepts: the layout that kvpd asks
for, and the page format, where the cache was specified by the class, and planned, allocated and
registered by vLLM's own code (geometry.py). Of each class in kvpd's table of packed pages the
class's own `do_kv_cache_update` runs as well; only the kernel behind it is a stand-in, which writes
numbers where it is told to, and the regions must hold them as the format says.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.vllm.standins import install

install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import vllm  # noqa: E402
from vllm._aiter_ops import rocm_aiter_ops  # noqa: E402
from vllm.platforms import current_platform, rocm  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE  # noqa: E402
from vllm.v1.attention.backend import MultipleOf  # noqa: E402
from vllm.v1.attention.backends.registry import (  # noqa: E402
    AttentionBackendEnum,
    MambaAttentionBackendEnum,
)
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402

from kvpd.errors import KvpdError  # noqa: E402
from kvpd.vllm.adapter import description  # noqa: E402
from kvpd.vllm.adapter.description import (  # noqa: E402
    _is_shuffled,
    _layer_cache,
    describe,
    own_layout,
)
from kvpd.vllm.formats import PACKED, why_opaque  # noqa: E402
from tests.oracle import pages  # noqa: E402
from tests.vllm import geometry  # noqa: E402

ROOT = Path(vllm.__file__).parent
BLOCK_SIZES = (16, 32, 64, 128, 256)
MAX_SIZES = 2
HEADS = 2
CLASS = re.compile(r"^class (\w+)\(([^)]*)\):", re.MULTILINE)
# Modules that import their model, which imports them.
IMPORTED_BY_MODEL = ("vllm.models.qwen4_exp.amd", "vllm.models.qwen4_exp.nvidia")
# How vLLM's own code says that a class does not serve a configuration.
REFUSALS = (AssertionError, NotImplementedError, RuntimeError, ValueError)


def defined_classes() -> list[str]:
    """Full paths of the classes below `AttentionBackend`, by the names of their bases.

    Read from the sources, and not from what happened to be imported.
    """
    bases: dict[tuple[str, str], set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        for name, above in CLASS.findall(path.read_text()):
            bases[module, name] = set(re.findall(r"\w+", above))
    known = {"AttentionBackend"}
    while True:
        found = {name for (_, name), above in bases.items() if above & known}
        if found <= known:
            break
        known |= found
    return sorted(f"{module}.{name}" for (module, name), above in bases.items() if above & known)


def members() -> dict[str, list[str]]:
    """The enums' names by class path."""
    names: dict[str, list[str]] = {}
    for enum in (AttentionBackendEnum, MambaAttentionBackendEnum):
        for member in enum:
            if member.value:
                names.setdefault(member.value, []).append(member.name)
    return names


@contextmanager
def as_built() -> Iterator[None]:
    yield


@contextmanager
def shuffled() -> Iterator[None]:
    """AITER is there, and its switch for shuffled pages is on."""
    with (
        mock.patch.object(rocm_aiter_ops, "is_enabled", lambda: True),
        mock.patch.object(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True),
    ):
        yield


@contextmanager
def shuffled_on_gfx1250() -> Iterator[None]:
    with shuffled(), mock.patch.object(rocm, "on_gfx1250", lambda: True):
        yield


@contextmanager
def blackwell() -> Iterator[None]:
    capability = DeviceCapability(10, 0)
    with mock.patch.object(
        type(current_platform), "get_device_capability", lambda *a, **k: capability
    ):
        yield


VARIANTS: dict[str, Callable[[], Any]] = {
    "": as_built,
    "shuffle switch on": shuffled,
    "shuffle switch on, gfx1250": shuffled_on_gfx1250,
    "compute capability 10": blackwell,
}


def sizes_of(backend: Any) -> tuple[list[int], list[int]]:
    """Block sizes and head sizes, a few that the class accepts."""
    try:
        kernel_sizes = backend.get_supported_kernel_block_sizes()
    except AssertionError:
        # A multiple of something that only a model's configuration says.
        kernel_sizes = [MultipleOf(1)]
    blocks = [
        size
        for size in BLOCK_SIZES
        if any(
            size % known.base == 0 if isinstance(known, MultipleOf) else size == known
            for known in kernel_sizes
        )
    ]
    if not blocks:
        blocks = [size if isinstance(size, int) else size.base for size in kernel_sizes] or [16]
    heads = list(backend.get_supported_head_sizes())
    if not heads:
        heads = [576] if backend.is_mla() else [64, 128]
    return blocks[:MAX_SIZES], sorted({heads[0], heads[-1]})


def dtypes_of(backend: Any) -> list[tuple[str, torch.dtype]]:
    """`--kv-cache-dtype` and the model's dtype: each that the class accepts."""
    found = []
    for name in list(backend.supported_kv_cache_dtypes) or ["auto"]:
        if backend.supports_kv_cache_dtype(name):
            models = backend.supported_dtypes if name == "auto" else backend.supported_dtypes[:1]
            found += [(name, dtype) for dtype in models]
    return found or [("auto", torch.bfloat16)]


def spec_of(backend: Any, name: str, model: torch.dtype, tokens: int, head_size: int) -> Any:
    """The cache's spec, as the class customises it: attention, MLA, or a state."""
    if backend.is_ssm():
        return MambaSpec(
            block_size=tokens, shapes=((3, 64), (HEADS, 16, 16)), dtypes=(model, torch.float32)
        )
    dtype = model if name == "auto" else STR_DTYPE_TO_TORCH_DTYPE.get(name, torch.uint8)
    plain: dict[str, Any] = {
        "block_size": tokens,
        "head_size": head_size,
        "dtype": dtype,
        "kv_quant_mode": get_kv_quant_mode(name),
    }
    if backend.is_mla():
        return backend.customize_spec(
            MLAAttentionSpec(num_kv_heads=1, cache_dtype_str=name, **plain)
        )
    return backend.customize_spec(FullAttentionSpec(num_kv_heads=HEADS, **plain))


def answers_of(backend: Any) -> Any:
    """All that the outcomes follow from; a variant that moves none of it needs no second look."""
    blocks, heads = sizes_of(backend)
    specs = []
    for name, model in dtypes_of(backend):
        try:
            specs.append(repr(spec_of(backend, name, model, blocks[0], heads[0])))
        except REFUSALS:
            specs.append("refused")
    return layouts_of(backend), blocks, heads, dtypes_of(backend), specs, _is_shuffled(backend)


def layouts_of(backend: Any) -> list[str] | None:
    layouts = backend.supported_kv_cache_layouts()
    return None if layouts is None else [layout.name for layout in layouts]


def outcome_of(backend: Any, spec: Any, layout: str, model: torch.dtype) -> str:
    """The format's family, or "opaque (why)", or what refuses it."""
    try:
        caches, worker = geometry.cache_of(backend, spec, layout, model)
    except REFUSALS:
        return "refused by vLLM"
    try:
        described = describe(worker, caches)
    except KvpdError as error:
        return f"refused by kvpd ({error.code})"
    (format,) = {region.format for region in described.regions}
    if format is None or format.family != "opaque":
        return "untagged" if format is None else str(format.family)
    regions = [r for r in described.regions if geometry.LAYERS[0] in r.layers]
    page_bytes = sum(region.block_bytes for region in regions)
    why = why_opaque(_layer_cache(worker, [geometry.LAYERS[0]], backend, page_bytes), backend)
    return f"opaque ({why or 'rows'})"


def findings_of(backend: Any) -> dict[str, Any]:
    """Everything about a class under the present variant."""
    try:
        name = backend.get_name()
    except NotImplementedError:
        return {"name": "", "layouts": None, "asks_for": [], "pages": {}, "shuffled": False}
    accepted = layouts_of(backend)
    layouts = accepted or [layout.name for layout in KVCacheLayout]
    blocks, heads = sizes_of(backend)
    pages_of: dict[str, dict[str, list[str]]] = {}
    chosen = set()
    # One size tells as much as many of a class whose pages nobody declares.
    path = ".".join(backend.full_cls_name())
    sizes = [(n, d) for n in blocks for d in heads]
    if path not in PACKED:
        sizes = sizes[:1]
    for dtype, model in dtypes_of(backend):
        key = dtype if dtype != "auto" else f"auto, {str(model).removeprefix('torch.')}"
        by_outcome: dict[str, list[str]] = {}
        for layout in layouts:
            outcomes = set()
            for tokens, head_size in sizes:
                try:
                    spec = spec_of(backend, dtype, model, tokens, head_size)
                except REFUSALS:
                    outcomes.add("refused by vLLM")
                    continue
                outcomes.add(outcome_of(backend, spec, layout, model))
                config = geometry.stand_in_config(backend, spec, layout, model)
                chosen.add(own_layout(config))
            by_outcome.setdefault(" or ".join(sorted(outcomes)), []).append(layout)
        pages_of[key] = by_outcome
    return {
        "name": name,
        "layouts": accepted,
        "asks_for": sorted(str(layout) for layout in chosen),
        "pages": pages_of,
        "shuffled": _is_shuffled(backend),
    }


class StandInKernel:
    """In place of the kernel that writes K and V: numbers each element of the views it is given."""

    def __init__(self, *, shuffles: bool = False) -> None:
        self._shuffles = shuffles
        self.calls = 0

    def __call__(
        self, key: Any, value: Any, key_cache: Any, value_cache: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.calls += 1
        k, v = numbered(key_cache.shape[1], key_cache.shape[2], key_cache.shape[3])
        for view, plane in ((key_cache, k), (value_cache, v)):
            data = plane.transpose(1, 0, 2)  # [N, H, D]
            if self._shuffles:
                heads, tokens, head_dim = plane.shape
                spec = pages.Spec("aiter-shuffle", "tiled", heads, tokens, head_dim, "bfloat16")
                planes = pages.planes(spec, k, v)
                data = planes[plane is v].reshape(data.shape)
            view.view(torch.int16).copy_(torch.from_numpy(data.copy().view(np.int16)))


def numbered(tokens: int, heads: int, head_dim: int) -> tuple[Any, Any]:
    """K and V [H, N, D]; no two elements are equal."""
    count = heads * tokens * head_dim
    numbers = np.arange(2 * count, dtype=np.uint16)
    shape = (heads, tokens, head_dim)
    return numbers[:count].reshape(shape), numbers[count:].reshape(shape)


def writer_of(backend: Any, heads: int, head_size: int) -> Any:
    """An implementation whose constructor was not run: only what writing a cache asks of it."""
    implementation = backend.get_impl_cls()
    writer = implementation.__new__(implementation)
    attributes = {
        "attn_type": "decoder",
        "num_kv_heads": heads,
        "head_size": head_size,
        "kv_cache_dtype": "auto",
        "cache_dtype": "auto",
        "kv_sharing_target_layer_name": None,
    }
    for name in (
        "is_kvcache_nvfp4", "nvfp4_fa2", "_set_kv_ptr_range",
        "_use_shuffle_kv", "_shuffle_kv_layout",
    ):  # fmt: skip
        attributes[name] = False
    for name, value in attributes.items():
        setattr(writer, name, value)
    for name in ("_is_per_token_head_quant",):
        if not isinstance(getattr(implementation, name, None), property):
            setattr(writer, name, False)
        else:
            writer._kv_quant_mode = get_kv_quant_mode("auto")
    return writer


def written(backend: Any, layout: str) -> dict[str, Any]:
    """Run the backend's own writer over a registered cache, and compare every page."""
    blocks, heads = sizes_of(backend)
    tokens, head_size, dtype = blocks[0], heads[0], torch.bfloat16
    spec = spec_of(backend, "auto", dtype, tokens, head_size)
    caches, worker = geometry.cache_of(backend, spec, layout, dtype)
    described = describe(worker, caches)
    implementation = backend.get_impl_cls()
    module = sys.modules[implementation.__module__]
    plain, tiled = StandInKernel(), StandInKernel(shuffles=True)
    layer = SimpleNamespace(_k_scale=torch.ones(1), _v_scale=torch.ones(1))
    key = torch.zeros(1, HEADS, head_size, dtype=dtype)
    slots = torch.zeros(1, dtype=torch.int64)
    places = [
        (torch.ops._C_cache_ops, "reshape_and_cache_flash", plain),
        (module, "reshape_and_cache_flash", plain),
        (module, "triton_reshape_and_cache_flash", plain),
        (module, "reshape_and_cache_shuffle_triton", tiled),
    ]
    previous = [getattr(place, name, None) for place, name, _ in places]
    for place, name, kernel in places:
        setattr(place, name, kernel)
    try:
        writer = writer_of(backend, HEADS, head_size)
        for cache in caches.values():
            writer.do_kv_cache_update(layer, key, key, cache, slots)
    finally:
        for (place, name, _), old in zip(places, previous, strict=True):
            if old is None:
                delattr(place, name)
            else:
                setattr(place, name, old)
    format = described.format
    family = "none" if format is None else format.family
    wrong = checked = 0
    is_oracle = True
    if family in ("standard", "aiter-shuffle"):
        variant = "tiled"
        if family == "standard":
            variant = "NHC" if layout in ("LBNHC", "BLNHC") else "HNC"
        page = pages.Spec(family, variant, HEADS, tokens, head_size, "bfloat16")
        expected = b"".join(
            part.tobytes() for part in pages.planes(page, *numbered(tokens, HEADS, head_size))
        )
        is_oracle = format is not None and format.digest == pages.digest(page)
        for name in caches:
            for block in range(geometry.NUM_BLOCKS):
                checked += 1
                wrong += geometry.page_of(described, name, block) != expected
    return {
        "kind": "written",
        "layout": layout,
        "family": family,
        "by": inspect.unwrap(implementation.do_kv_cache_update).__qualname__,
        "calls": plain.calls + tiled.calls,
        "pages": checked,
        "wrong_pages": wrong,
        "is_oracle_format": is_oracle,
    }


def factors_on(platform: str) -> list[list[str]]:
    """What another platform's own class makes part of a quantised page, and of a plain one."""
    cls = load(f"vllm.platforms.{platform}")
    capability = DeviceCapability(9, 4)
    with (
        mock.patch.object(cls, "get_device_capability", lambda *a, **k: capability),
        mock.patch.object(description, "current_platform", cls()),
    ):
        worker = SimpleNamespace()
        return [
            list(description._hardware_factors(worker, SimpleNamespace(dtype=dtype)))
            for dtype in (torch.uint8, torch.bfloat16)
        ]


def load(path: str) -> Any:
    if path.startswith(IMPORTED_BY_MODEL):
        importlib.import_module(f"{path.rsplit('.', 2)[0]}.model")
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def emit(finding: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(finding) + "\n")


def main() -> int:
    """Print the findings of every class, variant and writer, then of the tests' own geometry."""
    names = members()
    paths = sorted({*defined_classes(), *names})
    emit({"kind": "release", "vllm": vllm.__version__, "place": str(ROOT), "classes": paths})
    for path in paths:
        if importlib.util.find_spec(path.rpartition(".")[0]) is None:
            emit({"kind": "missing", "class": path, "enum": names.get(path, [])})
            continue
        backend = load(path)
        seen: list[Any] = []
        for variant, entered in VARIANTS.items():
            with entered():
                answers = answers_of(backend)
                if answers not in seen:
                    seen.append(answers)
                    found = findings_of(backend)
                    emit({"kind": "class", "class": path, "enum": names.get(path, []),
                          "variant": variant, **found})  # fmt: skip
                if path in PACKED:
                    for layout in layouts_of(backend) or [each.name for each in KVCacheLayout]:
                        emit({"class": path, "variant": variant, **written(backend, layout)})
    for name in ("cuda.CudaPlatformBase", "rocm.RocmPlatform", "xpu.XPUPlatform"):
        emit({"kind": "platform", "platform": name, "factors": factors_on(name)})
    for case in geometry.cases():
        emit({"kind": "geometry", **geometry.run(case)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
