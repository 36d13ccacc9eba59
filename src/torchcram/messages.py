"""Names and reasons in errors and warnings, and warnings that point at the caller's line."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

MOST_NAMES = 8
_SKIPPED = (
    *(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__)),
    contextlib.__file__,
)


def list_names(names: Iterable[str]) -> str:
    """Returns names joined by commas: the first eight, then the number of the others."""
    known = list(names)
    text = ", ".join(known[:MOST_NAMES])
    more = len(known) - MOST_NAMES
    return text if more <= 0 else f"{text} and {more} more"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issues a warning that points at the line of the program that called this library.

    Frames of this library and of torch, whose decorators and hooks may lie between, are skipped.
    """
    frame: FrameType = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_SKIPPED) and frame.f_back is not None:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def reason_of(error: Exception) -> str:
    """Returns the beginning of an error's message in one line; without a message, its type."""
    return " ".join(str(error).split())[:300] or type(error).__name__
