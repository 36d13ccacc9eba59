"""Lightning's ModelParallelStrategy, that is FSDP2, in two processes: as one process trains."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from lightning_fsdp_program import BATCH, EPOCHS, data, network, optimizer_for
from torch.nn.functional import cross_entropy

PROGRAM = Path(__file__).with_name("lightning_fsdp_program.py")
SOURCE = Path(__file__).parents[2] / "src"


def test_shards_train_as_one_process(tmp_path):
    file = tmp_path / "weights.pt"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, PROGRAM, file],
        check=True,
        capture_output=True,
        env=environment,
        cwd=tmp_path,
        timeout=200,
    )
    net = network()
    optimizer = optimizer_for(net)
    for _ in range(EPOCHS):
        # the processes take every other sample, in two micro-batches each
        for x, y in zip(*(part.split(BATCH) for part in data()), strict=True):

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = cross_entropy(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    found = torch.load(file, weights_only=True)
    for name, expected in net.named_parameters():
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-5)
