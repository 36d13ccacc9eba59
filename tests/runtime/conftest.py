"""The kernels, built anew where their sources have changed."""

import pytest

from torchcram.runtime import layers
from torchcram.runtime.compiling import LIBRARY, SOURCES, build, compiler
from torchcram.runtime.library import LEVELS, level, use_level


def _stale():
    newest = max(file.stat().st_mtime for file in SOURCES.iterdir())
    return not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest


if compiler() and _stale():
    build()


@pytest.fixture(params=LEVELS)
def each_level(request):
    """Runs a test with the kernels of each instruction set of this machine."""
    best = level()
    try:
        use_level(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    yield request.param
    use_level(best)


@pytest.fixture
def sparse_wins(monkeypatch):
    """Every race is won by the sparse kernels, by the last of them that takes part."""
    monkeypatch.setattr(layers, "_LEAST", 0.0)
    monkeypatch.setattr(layers, "_race", lambda work: {key: -i for i, key in enumerate(work)})
