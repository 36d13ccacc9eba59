"""Runs a function in several processes that talk to one another, as torchrun would."""

import tempfile
from pathlib import Path

import torch
from torch import distributed as dist
from torch import multiprocessing


def run_ranks(count, function, *arguments):
    """Calls `function(rank, *arguments)` in `count` processes; an error in any is raised here.

    Returns:
        How many of them came to the end of it.
    """
    ended = multiprocessing.get_context("spawn").Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        meet = (Path(folder) / "meet").as_uri()  # a file: no port that others may take
        multiprocessing.spawn(_begin, (count, meet, ended, function, arguments), nprocs=count)
    return ended.value


def _begin(rank, count, meet, ended, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=count)
    try:
        function(rank, *arguments)
        dist.barrier()  # none goes while another still needs it
        with ended.get_lock():
            ended.value += 1
    finally:
        dist.destroy_process_group()


def assert_same_on_all_ranks(tensors):
    """Every rank holds the same bits."""
    for name, tensor in tensors.items():
        first = tensor.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, tensor), name
