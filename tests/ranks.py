"""Runs a function in several processes that talk to one another, as torchrun would."""

import os
import socket

import torch
from torch import distributed as dist
from torch import multiprocessing


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(count, function, *arguments):
    """Calls `function(rank, *arguments)` in `count` processes; an error in any is raised here."""
    port = free_port()
    multiprocessing.spawn(_begin, (count, port, function, arguments), nprocs=count)


def _begin(rank, count, port, function, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=count)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()


def assert_same_on_all_ranks(tensors):
    """Every rank holds the same bits."""
    for name, tensor in tensors.items():
        first = tensor.detach().clone()
        dist.broadcast(first, src=0)
        assert torch.equal(first, tensor), name
