"""Checkpoints: everything that a training needs to continue bit for bit."""

from __future__ import annotations

import hashlib
import inspect
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import remove_leftovers, write_atomically
from torchcram.experiments.recipe.adapters import has_recipe_adapters
from torchcram.experiments.training.shards import shard_as

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.experiments.training.weight_average import WeightAverage


def require_state(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    state: object,
    average: WeightAverage | None = None,
) -> None:
    """Raises ValueError unless a state is that of such a training, before anything is loaded.

    The names, shapes and dtypes of all tensors are compared. A wrapper such as `CrAM` checks what
    it adds to the state of its base optimizer itself.

    Args:
        model: Model that the state is for.
        optimizer: Optimizer that the state is for.
        device: Device whose random generator the state may have.
        state: Content of the checkpoint.
        average: Average of the weights that the state is for, if there is one.

    Raises:
        ValueError: If it is not; the message names the part that differs.
    """
    parts = _mapping(state, "state", ("model", "optimizer", "random"))
    _require_tensors(parts["model"], saved_tensors(model))
    if average is not None:
        averaged = _mapping(parts, "state", ("average",))["average"]
        _require_tensors(averaged, average.state_dict(), "average of the weights")
        if (steps := int(averaged["n_averaged"])) < 1:
            raise ValueError(f"its average of the weights is that of {steps} steps")
    required = [key for key in optimizer.state_dict() if key != "param_groups"]
    states = _mapping(parts["optimizer"], "state of the optimizer", required)
    _require_moments(_mapping(states["state"], "state of the optimizer"), optimizer)
    random = _mapping(parts["random"], "state of random generators", ("cpu",))
    _require_tensors({"cpu": random["cpu"]}, {"cpu": torch.get_rng_state()})
    if device.type == "cuda" and "cuda" in random:
        expected = torch.cuda.get_rng_state(device)
        _require_tensors({"cuda": random["cuda"]}, {"cuda": expected})


def _mapping(value: object, what: str, keys: Sequence[str] = ()) -> Mapping[Any, Any]:
    """Returns a value that must be a mapping with the given keys."""
    if not isinstance(value, Mapping):
        raise ValueError(f"its {what} is {value!r:.80}, not a mapping")
    for key in keys:
        if key not in value:
            raise ValueError(f"its {what} has no {key!r}")
    return value


def _require_tensors(state: object, expected: Mapping[str, Tensor], what: str = "model") -> None:
    for name, value in _mapping(state, what, list(expected)).items():
        if name not in expected:
            raise ValueError(f"it has {name!r:.80}, which this training does not have")
        known = expected[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"its {name!r} is {value!r:.80}, not a tensor")
        if value.shape != known.shape or value.dtype != known.dtype or value.is_sparse:
            raise ValueError(f"its {name!r} is {_form(value)}; expected: {_form(known)}")


def _require_moments(states: Mapping[Any, Any], optimizer: Optimizer) -> None:
    """Raises ValueError for a state of parameters that does not belong to the base optimizer."""
    base: Optimizer = getattr(optimizer, "base", optimizer)
    parameters = [p for group in base.param_groups for p in group["params"]]
    shapes = {parameter.shape: _state_shapes(base, parameter.shape) for parameter in parameters}
    if any(shapes.values()) and not states:
        raise ValueError("its state of the optimizer is empty")
    for number, state in states.items():
        if type(number) is not int or not 0 <= number < len(parameters):
            raise ValueError(
                f"its optimizer has a parameter {number!r:.80}; expected: {len(parameters)} "
                "parameters, numbered from 0"
            )
        entries = _mapping(state, f"state of parameter {number}")
        parameter = parameters[number]
        shaped = shapes[parameter.shape]
        present = {name for name, value in entries.items() if value is not None}
        if missing := shaped.keys() - present:
            raise ValueError(f"its state of parameter {number} has no {min(missing)!r}")
        for name, shape in shaped.items():
            value = entries[name]
            fits = isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse
            number_like = shape != parameter.shape and shape.numel() == 1
            if not fits or (value.numel() != 1 if number_like else value.shape != shape):
                what = _form(value) if isinstance(value, Tensor) else f"{value!r:.80}"
                raise ValueError(
                    f"its {name!r} of parameter {number} is {what}; the parameter is "
                    f"{_form(parameter)}"
                )


def _state_shapes(base: Optimizer, shape: torch.Size) -> dict[str, torch.Size]:
    """Returns the shapes of an optimizer's state for a parameter of a shape; () for numbers.

    They are found by a step on a parameter of zeros, as torch has no function for it.
    """
    probe = torch.nn.Parameter(torch.zeros(shape))
    probe.grad = torch.zeros(shape)
    accepted = inspect.signature(type(base)).parameters
    options = {name: value for name, value in base.defaults.items() if name in accepted}
    twin = type(base)([probe], **options)
    twin.step()
    return {
        name: value.shape if isinstance(value, Tensor) else torch.Size(())
        for name, value in twin.state[probe].items()
        if value is not None
    }


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"


KEPT = 2  # number of checkpoints in a folder
_MAGIC = b"torchcram-checkpoint 1 "
_HEADER = len(_MAGIC) + 64 + 1  # a digest in hexadecimal digits, a line feed
_NAME = re.compile(r"epoch-(\d{4,})\.pt")


def save_checkpoint(
    folder: Path, epoch: int, state: Mapping[str, Any], *, identity: Mapping[str, Any]
) -> Path:
    """Writes `epoch-0012.pt`; of it and all older checkpoints, the two newest stay.

    Args:
        folder: Folder of the checkpoints, which is made if it does not exist.
        epoch: Number of epochs that are done.
        state: State to save: tensors, numbers, texts, and dicts, lists and tuples of them.
        identity: Identity of the run, as plain data; `load_latest` refuses that of another run.

    Returns:
        Path of the file.
    """
    buffer = io.BytesIO()
    torch.save({"identity": dict(identity), "epoch": epoch, "state": dict(state)}, buffer)
    payload = buffer.getbuffer()
    digest = hashlib.sha256(payload).hexdigest().encode()
    path = checkpoint_path(folder, epoch)
    write_atomically(path, b"".join((_MAGIC, digest, b"\n", payload)))
    for old in [file for number, file in _checkpoints(folder) if number <= epoch][KEPT:]:
        old.unlink(missing_ok=True)
    return path


def checkpoint_path(folder: Path, epoch: int) -> Path:
    """Returns the path of the checkpoint of an epoch."""
    return folder / f"epoch-{epoch:04d}.pt"


def load_latest(
    folder: Path, identity: Mapping[str, Any], *, before: int | None = None
) -> tuple[int, dict[str, Any]] | None:
    """Returns the epoch and state of the newest valid checkpoint, or None if there is none.

    A file that is cut off, altered or not a checkpoint is named in a warning, and the one before
    it is used. Temporary files of killed processes are removed.

    Args:
        folder: Folder of the checkpoints, which need not exist.
        identity: Identity of the run to continue.
        before: Epoch that the checkpoint must be older than; None accepts any.

    Raises:
        ValueError: If the checkpoint belongs to another run; the message names the differences.
    """
    remove_leftovers(folder)
    for number, path in _checkpoints(folder):
        if before is not None and number >= before:
            continue
        try:
            content = _read(path, number)
        except (OSError, ValueError) as error:
            warnings.warn(f"{path} is not used: {error}", stacklevel=2)
            continue
        if different := explain_differences(content["identity"], identity):
            raise ValueError(f"{path} belongs to another run: {'; '.join(different)}")
        return number, content["state"]
    return None


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints of a folder by epoch, newest first."""
    names = [(_NAME.fullmatch(path.name), path) for path in folder.glob("epoch-*.pt")]
    return sorted(((int(match[1]), path) for match, path in names if match), reverse=True)


def _read(path: Path, epoch: int) -> dict[str, Any]:
    whole = path.read_bytes()
    if not whole.startswith(_MAGIC):
        raise ValueError("it is not a checkpoint of torchcram")
    digest, payload = whole[len(_MAGIC) : _HEADER - 1], memoryview(whole)[_HEADER:]
    if hashlib.sha256(payload).hexdigest().encode() != digest or whole[_HEADER - 1] != ord("\n"):
        raise ValueError("it is cut off or altered: its digest does not match")
    try:
        content = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except MemoryError:
        raise
    except Exception as error:
        # a file with the right digest may hold anything, and torch may raise anything
        raise ValueError(f"torch cannot read it: {error}") from error
    if not isinstance(content, dict) or content.keys() != {"identity", "epoch", "state"}:
        raise ValueError("it does not hold identity, epoch and state")
    if not isinstance(content["identity"], dict) or not _is_plain(content["identity"]):
        raise ValueError("its identity is not a mapping of plain values")
    if not isinstance(content["state"], dict):
        raise ValueError("its state is not a mapping")
    if type(content["epoch"]) is not int or content["epoch"] != epoch:
        raise ValueError(f"its epoch is {content['epoch']!r:.80}, not {epoch}")
    return content


def _is_plain(value: object) -> bool:
    """Returns whether a value is one that JSON can hold; others cannot be compared."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, bool, int, float))


def state_of(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Returns the state of the model, the optimizer and the global random generators.

    The parameter groups are left out: they follow from the recipe, the schedule and the device.

    Args:
        model: Model that is trained.
        optimizer: Optimizer of its parameters.
        device: Device whose random generator belongs to the state.
        average: Average of the weights, if there is one.
    """
    optimizer_state = optimizer.state_dict()
    del optimizer_state["param_groups"]
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    state = {"model": saved_tensors(model), "optimizer": optimizer_state, "random": random}
    if average is not None:
        state["average"] = dict(average.state_dict())
    return state


def saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the tensors of a model that a checkpoint has; with adapters, no frozen weights."""
    tensors: dict[str, Tensor] = dict(model.state_dict())
    for name in frozen_tensors(model):
        tensors.pop(name, None)
    return tensors


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the frozen weights of a model with adapters of a recipe; none of another model."""
    if not has_recipe_adapters(model):
        return {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if not parameter.requires_grad}


def load_state_(
    model: nn.Module,
    optimizer: Optimizer,
    device: torch.device,
    *,
    state: object,
    average: WeightAverage | None = None,
) -> None:
    """Loads a state that `state_of` returned, on the same device or another one.

    Args:
        model: Model that gets the weights.
        optimizer: Optimizer of its parameters.
        device: Device of the model.
        state: Content of the checkpoint.
        average: Average of the weights, if the state has one.

    Raises:
        ValueError: If the state belongs to another model or optimizer, or is not a state. The model
            is unchanged then, unless the optimizer itself refuses a part of the state.
    """
    require_state(model, optimizer, device, state=state, average=average)
    try:
        parts = cast("dict[str, Any]", state)
        _load_state_(model, optimizer, device, state=parts)
        if average is not None:
            average.load_state_dict(parts["average"])
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"its state is not that of such a training: {error!r}") from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or "CUDA" in str(error):  # such as a lack of memory
            raise
        raise ValueError(f"its state is not that of such a training: {error}") from error


def _load_state_(
    model: nn.Module, optimizer: Optimizer, device: torch.device, *, state: dict[str, Any]
) -> None:
    tensors = saved_tensors(model)
    loaded = {name: shard_as(value, tensors[name]) for name, value in state["model"].items()}
    # `require_state` has compared the names, and frozen weights are not among them
    model.load_state_dict(loaded, strict=False)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    moments = {
        number: {
            name: shard_as(value, parameters[number]) if isinstance(value, Tensor) else value
            for name, value in entries.items()
        }
        for number, entries in state["optimizer"]["state"].items()
    }
    states = {**optimizer.state_dict(), **state["optimizer"], "state": moments}
    optimizer.load_state_dict(states)
    _align_(optimizer)
    torch.set_rng_state(state["random"]["cpu"])
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)


def _align_(optimizer: Optimizer) -> None:
    """Gives state the strides of its parameters, which fused steps need and devices choose."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                entries[name] = torch.empty_like(parameter).copy_(value)


@contextmanager
def forked_rng(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the global generators of the CPU and `device` for a `with` block; restores them."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
