"""Fixtures of the kernels."""

import pytest

from torchcram.kernels.cpu.library import LEVELS, level, use_level
from torchcram.runtime.cpu import replace_layers


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
    monkeypatch.setattr(replace_layers, "_LEAST", 0.0)
    rules = {kind: replace_layers.Rule(0.0, 0) for kind in replace_layers.RULES}
    monkeypatch.setattr(replace_layers, "RULES", rules)
    monkeypatch.setattr(
        replace_layers, "time_in_turns", lambda work: {key: -i for i, key in enumerate(work)}
    )
