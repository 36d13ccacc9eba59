"""Models of other packages: timm's by name, and those that a function in a module or file builds.

A name says where the code is; nothing is imported before a model is built.

    timm/NAME                   timm.create_model(NAME, num_classes=N, **args)
    package.module:factory      factory(num_classes=N, **args) of an installed module
    ./folder/file.py:factory    the same of a file
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from torchcram.experiments.io.dataclass_io import did_you_mean

TIMM = "timm/"
PATHS = ("/", "./", "../", "~")  # beginnings of the path of a folder
FORMS = (f"{TIMM}NAME", "package.module:factory", "./file.py:factory")
_IDENTIFIER = r"[^\W\d]\w*"
_FILE = re.compile(rf"(.+\.py):({_IDENTIFIER})")
_MODULE = re.compile(rf"({_IDENTIFIER}(?:\.{_IDENTIFIER})*):({_IDENTIFIER})")


def is_factory(name: str) -> bool:
    """Returns whether a model name is that of a function in a module or a file."""
    return bool(_FILE.fullmatch(name) or _MODULE.fullmatch(name))


def takes_args(name: str) -> bool:
    """Returns whether a model name is one that `model.args` may go with."""
    return is_factory(name) or (name.startswith(TIMM) and name != TIMM)


def with_absolute_path(name: str, folder: str | Path = "") -> str:
    """Returns a model name in which the path of a file or folder, if there is one, is absolute.

    Args:
        name: Name of a model.
        folder: Folder that a relative path starts from; by default the working folder.
    """
    match = _FILE.fullmatch(name)
    if match is None and not name.startswith(PATHS):
        return name
    path, factory = (name, "") if match is None else (match[1], f":{match[2]}")
    path = os.path.join(folder, os.path.expanduser(path))  # noqa: PTH111, PTH118
    return os.path.abspath(path) + factory  # noqa: PTH100  links stay as they are


def short_name(name: str) -> str:
    """Returns a model name without folders and packages, for names of recipes."""
    if match := _FILE.fullmatch(name):
        return f"{Path(match[1]).stem}-{match[2]}"
    if match := _MODULE.fullmatch(name):
        return f"{match[1].rpartition('.')[2]}-{match[2]}"
    return name.rstrip("/").split("/")[-1]


def build_from_timm(
    name: str, *, classes: int, args: Mapping[str, Any], pretrained: bool
) -> nn.Module:
    """Returns a model of timm.

    Args:
        name: Name of the model, with "timm/" in front.
        classes: Number of scores that it gives.
        args: Further arguments of `timm.create_model`.
        pretrained: Whether to start from the weights that timm has for it.

    Raises:
        ValueError: If timm is not installed or has no such model.
    """
    try:
        import timm
    except ImportError as error:
        raise ValueError(f"model {name!r} needs timm ({error}): pip install timm") from error
    theirs = name.removeprefix(TIMM)
    if not timm.is_model(theirs):
        raise ValueError(
            f"timm has no model {theirs!r}{did_you_mean(theirs, timm.list_models())}; allowed: "
            "a name of timm.list_models()"
        )
    model: nn.Module = timm.create_model(theirs, pretrained=pretrained, num_classes=classes, **args)
    return model


def build_from_factory(name: str, *, classes: int, args: Mapping[str, Any]) -> nn.Module:
    """Returns what a factory makes of `num_classes=classes` and `args`; runs the user's code.

    Args:
        name: Name of the model: "package.module:factory", or a file and its factory.
        classes: Number of scores that the model gives.
        args: Further keyword arguments of the factory.

    Raises:
        ValueError: If there is no such factory, its arguments are others, or it makes no model.
    """
    with _factory(name) as factory:
        arguments = {"num_classes": classes, **args}
        try:
            inspect.signature(factory).bind(**arguments)
        except TypeError as error:
            raise ValueError(
                f"model {name!r}: {error}; given: {', '.join(arguments)}; allowed: "
                f"{', '.join(inspect.signature(factory).parameters) or 'no arguments'}"
            ) from None
        except ValueError:  # the signature is unknown, for example that of a C function
            pass
        model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model {name!r}: the factory returned {type(model).__name__}; allowed: an nn.Module"
        )
    return model


@contextmanager
def _factory(name: str) -> Iterator[Callable[..., object]]:
    """Yields the function that a name refers to; modules beside its file can be imported then."""
    before = list(sys.path)
    try:
        if match := _FILE.fullmatch(name):
            sys.path.insert(0, str(Path(match[1]).parent))
            module = _import_file(name, Path(match[1]))
        else:
            match = _MODULE.fullmatch(name)
            assert match is not None  # noqa: S101
            module = _import_module(name, match[1])
        factory = getattr(module, match[2], None)
        if not callable(factory):
            known = [key for key, value in vars(module).items() if callable(value)]
            what = "is not callable" if hasattr(module, match[2]) else "is not there"
            raise ValueError(
                f"model {name!r}: {match[2]!r} {what}{did_you_mean(match[2], known)}; allowed: a "
                f"function or a class of {match[1]}"
            )
        yield factory
    finally:
        sys.path[:] = before


def _import_module(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"model {name!r}: {module} cannot be imported: {error}; allowed: an installed module, "
            "or a file as in ./file.py:factory"
        ) from error


def _import_file(name: str, path: Path) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ValueError(f"model {name!r}: {path} cannot be read: {error.strerror}") from error
    seen = hashlib.sha256(f"{path}\n".encode() + source).hexdigest()[:12]
    title = f"{path.stem}_{seen}"  # a changed file is another module
    if title in sys.modules:
        return sys.modules[title]
    spec = importlib.util.spec_from_file_location(title, path)
    assert spec is not None and spec.loader is not None  # noqa: S101, PT018  it ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        del sys.modules[title]
        raise ValueError(f"model {name!r}: {path} cannot be imported: {error}") from error
    except BaseException:
        del sys.modules[title]
        raise
    return module
