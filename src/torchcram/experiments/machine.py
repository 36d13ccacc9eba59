"""Names of the machine and versions of the packages that a result was computed with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGES = ("torch", "torchvision", "transformers", "numpy", "scikit-learn")


def versions() -> dict[str, str]:
    """Returns the versions of torchcram, Python, CUDA and the packages that results depend on."""
    named = {"torchcram": __version__, "python": platform.python_version()}
    named.update((package, text) for package in PACKAGES if (text := _version(package)))
    if torch.version.cuda is not None:
        named["cuda"] = torch.version.cuda
    return named


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_name(device: torch.device) -> str:
    """Returns the name of the GPU, or the model of the CPU, that `device` is."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_model() or f"{platform.system()} {platform.machine()}"


def _cpu_model() -> str | None:
    """Returns the model name of the first processor, on Linux."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return None
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return models[0] if models else None


def has_bfloat16_units() -> bool:
    """Returns whether the CPU has matrix units for bfloat16 that torch uses: AMX."""
    supported: Callable[[], bool] | None = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return supported is not None and supported()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
