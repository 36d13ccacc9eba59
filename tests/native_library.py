"""The compiled library for tests, built anew where its sources have changed."""

import pytest

from torchcram.kernels.cpu import compiling
from torchcram.kernels.cpu.library import LIBRARY


def _stale():
    newest = max(file.stat().st_mtime for file in compiling.SOURCES.iterdir())
    return not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest


if compiling.compiler() and LIBRARY == compiling.LIBRARY and _stale():
    compiling.build()

needs_kernels = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler")
