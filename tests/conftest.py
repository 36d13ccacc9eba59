"""Shared settings: kernels are interpreted where there is no GPU, random numbers start anew."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # small nets, several processes at a time

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
