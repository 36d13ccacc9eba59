"""Shared settings: kernels are interpreted where there is no GPU, random numbers start anew.

Property tests try the same examples in every run, so that a run can be repeated; `make properties`
looks for new ones.
"""

import os
import pkgutil

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small nets, several processes at a time

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("repeatable")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _registries(monkeypatch):
    """Operators, pruners and methods that a test registers are gone after it."""
    for name in (
        "torchcram.operators.parse.OPERATORS",
        "torchcram.pruners.parse.PRUNERS",
        "torchcram.baselines.registry.REGISTERED",
    ):
        registry = pkgutil.resolve_name(name)
        monkeypatch.setattr(registry, "kinds", dict(registry.kinds))
