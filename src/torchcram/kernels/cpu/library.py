"""Loading the compiled CPU kernels, and the signatures of their functions."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_BUILT = Path(__file__).resolve().parent / "libtorchcram.so"
LIBRARY = Path(os.environ.get("TORCHCRAM_LIBRARY") or _BUILT)
"""The library that is loaded: the one in the package, or the one that TORCHCRAM_LIBRARY names."""

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_MATRIX = (_POINTER, _LONG)  # packed matrix and its bytes
_INTERFACE = 10  # torchcram_interface in api.cpp
_FUNCTIONS = {
    "interface": (_INT, []),
    "level": (ctypes.c_char_p, []),
    "use_level": (_INT, [_INT]),
    "use_openmp": (None, [_POINTER]),
    "check": (_INT, [_POINTER, _LONG]),
    "expand": (_LONG, [_POINTER, _LONG, _POINTER, _LONG, _LONG, _POINTER]),
    "crc32": (ctypes.c_uint32, [_POINTER, _LONG, ctypes.c_uint32]),
    "count_ones": (_LONG, [_POINTER, _LONG]),
    "look_up": (None, [_POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    "decode": (_LONG, [_POINTER, _LONG, _POINTER, _LONG, _INT, _POINTER, _LONG, _POINTER]),
    "pack_linear": (_LONG, [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER, _LONG]),
    "pack_images": (_LONG, [_POINTER, _LONG, _LONG, _POINTER, _POINTER, _LONG]),
    "linear": (
        _INT,
        [_POINTER, *[_LONG] * 3, *_MATRIX, *[_POINTER] * 2, _INT, _POINTER, _INT],
    ),
    "has_int8": (_INT, []),
    "linear_int8": (
        _INT,
        [_POINTER, _LONG, _LONG, _LONG, _POINTER, _INT, *[_POINTER] * 3, _INT],
    ),
    "feed_forward": (
        _INT,
        [_POINTER, *[_LONG] * 4, *_MATRIX, _POINTER, _INT, *_MATRIX, *[_POINTER] * 3, _INT],
    ),
    "convolution": (
        _INT,
        [*[_POINTER] * 2, _LONG, *_MATRIX, _INT, *[_POINTER] * 2, _INT, _POINTER, _INT],
    ),
    "chain": (_INT, [_POINTER, _LONG, _POINTER, _LONG, _INT]),
    "pad": (_INT, [_POINTER, *[_LONG] * 8, _POINTER, _INT]),
    "max_pool": (_INT, [_POINTER, _LONG, _POINTER, _POINTER, _INT]),
    "use_huge_pages": (_INT, [_POINTER, _LONG]),
    "reverse_dimensions": (_INT, [_POINTER, *[_LONG] * 3, _POINTER, _INT]),
    "cut_tiles": (_INT, [_POINTER, *[_LONG] * 6, _POINTER, _INT]),
    "join_tiles": (_INT, [_POINTER, *[_LONG] * 6, _POINTER, _INT]),
    "attention": (_INT, [*[_POINTER] * 3, *[_LONG] * 4, ctypes.c_float, _POINTER, _INT]),
    "norm_rows": (_INT, [_POINTER, _LONG, _LONG, _POINTER, ctypes.c_float, _POINTER, _INT]),
    "gate_values": (_INT, [_POINTER, _POINTER, _LONG, _POINTER, _INT]),
    "row_product": (_INT, [_POINTER, _POINTER, _LONG, _POINTER, _INT]),
    "decoder_step": (_INT, [_POINTER, _INT]),
}
_NO_MEMORY = -2  # result of functions that allocate memory when there is not enough
_ARM = platform.machine() in ("aarch64", "arm64")
LEVELS = ("portable", "neon", "neon_dotprod") if _ARM else ("portable", "avx2", "avx512")
"""Instruction sets that there are kernels for on this architecture, from the slowest up."""


_ALLOCATE = (
    *("pack_linear", "pack_images", "pad", "convolution", "chain"),
    *("linear", "linear_int8", "feed_forward", "attention", "max_pool"),
    *("reverse_dimensions", "cut_tiles", "join_tiles"),
    *("norm_rows", "gate_values", "row_product", "decoder_step"),
)


def _raise_memory_error(result: int, function: Any, _: tuple[object, ...]) -> int:  # noqa: ANN401
    if result == _NO_MEMORY:
        raise MemoryError(f"{function.__name__}: not enough memory")
    return result


class _State:
    """State of this process.

    Attributes:
        why: Reason why there are no kernels; empty if there are.
        forked: Whether the process was forked. The OpenMP runtime of torch hangs in a child of a
            process that has used it.
    """

    why = ""
    forked = False

    def note_fork(self) -> None:
        self.forked = True


_state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.note_fork)


@functools.cache
def find() -> ctypes.CDLL | None:
    """Returns the library, or None if it has not been built or cannot be loaded."""
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"torchcram_{name}")
            function.restype, function.argtypes = result, arguments
            if name in _ALLOCATE:
                function.errcheck = _raise_memory_error
        if loaded.torchcram_interface() != _INTERFACE:
            raise OSError(f"{LIBRARY} was built from another version of the sources")
    except (OSError, AttributeError) as error:  # AttributeError: another version of the library
        missing = f"they have not been built: there is no {LIBRARY}"
        _state.why = str(error) if LIBRARY.exists() else missing
        return None
    loaded.torchcram_use_openmp(None if _state.forked else _openmp_of_torch())
    return loaded


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the library, or None with a single warning if it cannot be used."""
    loaded = find()
    if loaded is None:
        warnings.warn(
            "torchcram.runtime runs all layers dense, because its kernels cannot be used: "
            f"{_state.why}. "
            "With a C++ compiler, `python -m torchcram.runtime.build` builds them.",
            stacklevel=2,
        )
    return loaded


def kernels() -> ctypes.CDLL:
    """Returns the library.

    Raises:
        RuntimeError: If it cannot be used.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError(
            f"the kernels of torchcram.runtime cannot be used: {_state.why}; run "
            "`python -m torchcram.runtime.build`"
        )
    return loaded


def available() -> bool:
    """Returns whether the kernels can be used on this machine."""
    return library() is not None


def has_int8() -> bool:
    """Returns whether this machine has kernels for 8 bits, which need AVX-512 VNNI or NEON."""
    loaded = library()
    return loaded is not None and bool(loaded.torchcram_has_int8())


def level() -> str:
    """Returns the instruction set in use.

    It is avx512, avx2 or portable on x86, and neon_dotprod, neon or portable on ARM.
    """
    name: bytes = kernels().torchcram_level()
    return name.decode()


def use_level(name: str) -> None:
    """Uses the kernels of another instruction set than the best one of this machine.

    Args:
        name: Name of the instruction set, one of `LEVELS`.

    Raises:
        ValueError: If this machine does not have it.
    """
    if name not in LEVELS or not kernels().torchcram_use_level(LEVELS.index(name)):
        raise ValueError(f"level must be one of {LEVELS} and supported here, got {name!r}")


def _openmp_of_torch() -> int | None:
    """Returns the address of GOMP_parallel in the OpenMP runtime of torch, or None."""
    parallel = _function_of_torch("GOMP_parallel")
    return None if parallel is None else ctypes.cast(parallel, _POINTER).value


def has_openmp() -> bool:
    """Returns whether `set_openmp_threads` works: whether torch has loaded an OpenMP runtime."""
    return _omp_set_num_threads() is not None


def set_openmp_threads(count: int) -> None:
    """Sets the number of threads that torch and the kernels use when called from this thread.

    `torch.set_num_threads` also sets the number for threads that are started later.

    Raises:
        RuntimeError: If torch has not loaded an OpenMP runtime.
    """
    set_number = _omp_set_num_threads()
    if set_number is None:
        raise RuntimeError("torch has not loaded an OpenMP runtime")
    torch.get_num_threads()  # in a new thread, the first call sets the number that all begin with
    set_number(count)


@functools.cache
def _omp_set_num_threads() -> Callable[[int], None] | None:
    function: Callable[[int], None] | None = _function_of_torch("omp_set_num_threads")
    return function


def _function_of_torch(name: str) -> Any:  # noqa: ANN401
    """Returns a function of the OpenMP runtime that torch has loaded, or None."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return getattr(ctypes.CDLL(str(path)), name)
    except (OSError, AttributeError):
        return None
