"""Cache files: tensors made from a dataset once, kept beside it or in the user's cache folder."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchcram.experiments.io.files import one_process_at_a_time, remove_leftovers
from torchcram.files import let_read, written_aside

if TYPE_CHECKING:
    from torch import Tensor

KEY = "torchcram"  # key of the description in the metadata of a safetensors file
CALLER = 4  # stack level of the code that asked for the data: cached < packed < load_data < it

Content = TypeVar("Content")

Report = Callable[[str], None]
"""Called with a line of text before something that takes long."""


class CacheError(ValueError):
    """A cache file is damaged, or was made from other data or in another way."""


def cached(
    folder: Path,
    name: str,
    *,
    read: Callable[[Path], Content],
    write: Callable[[Path], None],
) -> tuple[Content, bool]:
    """Reads a cache file; makes it first if it is missing, damaged or out of date.

    The file lies in `folder`, or in the user's cache folder if `folder` is read-only. A damaged
    file is named in a warning. Of several processes that need the file at once, one makes it while
    the others wait.

    Args:
        folder: Folder of the data that the file is made from.
        name: Name of the file.
        read: Function that reads the file at a path and raises `CacheError` if it is not right.
        write: Function that makes the file and writes it to a path.

    Returns:
        Content of the file, and whether it was made by this call.
    """
    paths = [folder / name, cache_folder() / name]
    for path in paths:
        if path.is_file():
            try:
                return read(path), False
            except CacheError as error:
                warnings.warn(f"{error}; it is made anew", stacklevel=CALLER)
    path = paths[0] if writable(folder) else paths[1]
    with one_process_at_a_time(path.parent):
        with suppress(CacheError):
            return read(path), False  # another process made it meanwhile
        remove_leftovers(path.parent, name)
        write(path)
    return read(path), True


def cache_folder() -> Path:
    """Returns the user's cache folder of torchcram."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchcram"


def writable(folder: Path) -> bool:
    """Returns whether files may be written to a folder, which need not exist yet."""
    if not folder.is_dir():
        return True  # a download makes it
    # the mode too: a read-only folder is respected even when root could write to it
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def write_cache(path: Path, tensors: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Writes tensors and a description of them as one safetensors file, atomically.

    Args:
        path: Path of the file, which is replaced if it exists.
        tensors: Tensors by name.
        description: Values that JSON can hold, for `open_cache`.
    """
    from safetensors.torch import save_file

    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with written_aside(path) as aside:
        save_file(contiguous, aside, {KEY: json.dumps(description)})
        let_read(aside)


@contextmanager
def open_cache(path: Path, what: str, expected: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Opens a file of `write_cache` for a `with` block, and checks its description.

    Args:
        path: Path of the file.
        what: Content that the file should have, for the error message.
        expected: Entries that its description must have.

    Yields:
        Open safetensors file, and its description.

    Raises:
        CacheError: If the file cannot be read, inside the block too, or is described otherwise.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})[KEY])
            for key, value in expected.items():
                if description[key] != value:
                    raise ValueError(f"its {key} is {description[key]!r}, expected {value!r}")
            yield file, description
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise CacheError(f"{path} is not {what}: {error}") from error
