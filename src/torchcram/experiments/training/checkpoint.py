"""Checkpoints: written whole or not at all, read without executing code, checked before use.

A file is one line, `torchcram-checkpoint 1 <sha256>`, and then what `torch.save` makes of
{"identity": ..., "epoch": ..., "state": ...}; the digest is of all that follows the line.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import remove_leftovers, write_atomically
from torchcram.experiments.training.checkpoint_content import require_state

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

KEPT = 2
_MAGIC = b"torchcram-checkpoint 1 "
_HEADER = len(_MAGIC) + 64 + 1  # a digest in hexadecimal digits, a line feed
_NAME = re.compile(r"epoch-(\d{4,})\.pt")


def save_checkpoint(
    folder: Path, epoch: int, state: Mapping[str, Any], *, identity: Mapping[str, Any]
) -> Path:
    """Writes `epoch-0012.pt` and removes all but the two newest up to it.

    Args:
        folder: made if it is not there.
        epoch: how many are done.
        state: tensors, numbers, text, and dicts, lists and tuples of them.
        identity: what the run is, likewise; `load_latest` refuses to continue another one.

    Returns:
        The path of the file.
    """
    buffer = io.BytesIO()
    torch.save({"identity": dict(identity), "epoch": epoch, "state": dict(state)}, buffer)
    payload = buffer.getbuffer()
    digest = hashlib.sha256(payload).hexdigest().encode()
    path = checkpoint_path(folder, epoch)
    write_atomically(path, b"".join((_MAGIC, digest, b"\n", payload)))
    for old in [one for number, one in _found(folder) if number <= epoch][KEPT:]:
        old.unlink(missing_ok=True)
    return path


def checkpoint_path(folder: Path, epoch: int) -> Path:
    """Returns the path of the checkpoint of an epoch."""
    return folder / f"epoch-{epoch:04d}.pt"


def load_latest(
    folder: Path, identity: Mapping[str, Any], *, before: int | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Returns the epoch and state of the newest checkpoint that is whole, or None without one.

    A file that is cut off, altered or something else is named in a warning, and the one before it
    is taken. What a killed process was writing is removed.

    Args:
        folder: Folder of the checkpoints, which need not be there.
        identity: Identity of the run that is to continue.
        before: Epoch that the checkpoint must be older than; by default any will do.

    Raises:
        ValueError: if the checkpoint is of another run, naming in what they differ.
    """
    remove_leftovers(folder)
    for number, path in _found(folder):
        if before is not None and number >= before:
            continue
        try:
            content = _read(path, number)
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is not used: {error}", stacklevel=2)
            continue
        if different := explain_differences(content["identity"], identity):
            raise ValueError(f"{path} is of another run: {'; '.join(different)}")
        return number, content["state"]
    return None


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints of a folder by epoch, newest first."""
    names = [(_NAME.fullmatch(path.name), path) for path in folder.glob("epoch-*.pt")]
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def _read(path: Path, epoch: int) -> dict[str, Any]:
    whole = path.read_bytes()
    if not whole.startswith(_MAGIC):
        raise ValueError("it is not a checkpoint of torchcram")
    digest, payload = whole[len(_MAGIC) : _HEADER - 1], memoryview(whole)[_HEADER:]
    if hashlib.sha256(payload).hexdigest().encode() != digest or whole[_HEADER - 1] != ord("\n"):
        raise ValueError("it is cut off or altered, its digest is another one")
    try:
        content = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:
        # with the right digest it may hold anything, and torch raises whatever comes of that
        raise ValueError(f"torch cannot read it: {error}") from error
    if not isinstance(content, dict) or content.keys() != {"identity", "epoch", "state"}:
        raise ValueError("it does not hold identity, epoch and state")
    if not isinstance(content["identity"], dict) or not _is_plain(content["identity"]):
        raise ValueError("its identity is no mapping of plain values")
    if not isinstance(content["state"], dict):
        raise ValueError("its state is no mapping")
    if type(content["epoch"]) is not int or content["epoch"] != epoch:
        raise ValueError(f"it is of epoch {content['epoch']!r:.80}, not {epoch}")
    return content


def _is_plain(value: object) -> bool:
    """Says whether a value is what JSON could hold; anything else cannot be compared."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int, float))


def state_of(model: nn.Module, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """Returns the state of the model, the optimizer and the global random generators.

    The parameter groups are left out: the recipe says what is in them, the schedule their learning
    rate, and the device whether the optimizer is fused.
    """
    optimizer_state = optimizer.state_dict()
    del optimizer_state["param_groups"]
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    return {"model": dict(model.state_dict()), "optimizer": optimizer_state, "random": random}


def load_state_(
    model: nn.Module, optimizer: Optimizer, device: torch.device, *, state: object
) -> None:
    """Continues from what `state_of` returned, on this device or another one.

    Raises:
        ValueError: If the state is of another model or optimizer, or none at all. Only where a part
            of it is junk that the optimizer itself refuses, the model may have changed by then.
    """
    require_state(model, optimizer, device, state=state)
    try:
        _load_state_(model, optimizer, device, state=cast("dict[str, Any]", state))
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"its state is not that of such a training: {error!r}") from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or "CUDA" in str(error):  # the memory is full, say
            raise
        raise ValueError(f"its state is not that of such a training: {error}") from error


def _load_state_(
    model: nn.Module, optimizer: Optimizer, device: torch.device, *, state: dict[str, Any]
) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict({**optimizer.state_dict(), **state["optimizer"]})
    _align_(optimizer)
    torch.set_rng_state(state["random"]["cpu"])
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)


def _align_(optimizer: Optimizer) -> None:
    """Lays state out in memory as its parameters: fused steps need that, and devices differ."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                entries[name] = torch.empty_like(parameter).copy_(value)


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the global generators of the CPU and of `device`; puts them back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
