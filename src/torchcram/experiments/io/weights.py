"""Files of weights: safetensors, written whole or not at all, and compact files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import artifact
from torchcram.artifact.format import MANIFEST
from torchcram.experiments.io.files import write_atomically

if TYPE_CHECKING:
    from torch import Tensor, nn


def save_model(model: nn.Module, path: Path) -> None:
    """Writes the weights and buffers of a model as safetensors, whole or not at all."""
    from safetensors.torch import save

    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    write_atomically(path, save(tensors, {"format": "pt"}))


def load_model_(model: nn.Module, path: Path) -> None:
    """Reads into `model` what `save_model` wrote.

    Raises:
        ValueError: naming the file, if it is not whole or of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} is not the model that it should be: {error}") from error


def load_weights_(model: nn.Module, path: Path) -> None:
    """Reads a file of weights into `model`: a compact one, or what `save_model` wrote.

    Raises:
        ValueError: If the file is damaged or holds another model; it is named.
        OSError: If there is no such file.
    """
    if _is_compact(path):
        artifact.load(path, model)
    else:
        load_model_(model, path)


def _is_compact(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return MANIFEST in (file.metadata() or {})
    except SafetensorError:
        return False  # what is wrong with it is said by those who read it


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a short text that differs for tensors of other names, types, shapes or values."""
    seen = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        seen.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        seen.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]
