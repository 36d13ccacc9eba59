"""The compiled library for tests, built anew where its sources have changed."""

import pytest

from torchcram.native.compiling import LIBRARY, SOURCES, build, compiler


def _stale():
    newest = max(file.stat().st_mtime for file in SOURCES.iterdir())
    return not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest


if compiler() and _stale():
    build()

needs_kernels = pytest.mark.skipif(not LIBRARY.exists(), reason="no C++ compiler")
