"""The compiled library for tests, built anew where its sources have changed."""

import pytest

from torchcram.kernels.cpu.library import LIBRARY
from torchcram.runtime import build


def _stale():
    newest = max(file.stat().st_mtime for file in build.SOURCES.iterdir())
    return not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest


if build.compiler() and LIBRARY == build.LIBRARY and _stale():
    build.build()

needs_kernels = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler")
