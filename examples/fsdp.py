"""CrAM+ with weights sharded over processes (FSDP2), and a checkpoint that any number can load.

torchrun --nproc-per-node 2 examples/fsdp.py [EPOCHS]    # scikit-learn's digits; seconds
"""

import os
import sys
import tempfile

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from torchcram import CrAM
from torchcram.optim.checkpoint import TrainingState

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
rank, count = distributed.get_rank(), distributed.get_world_size()
images, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = images.float().div(16).to(device), labels.to(device)  # the last 357 are a test


def build(*, sharded):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    if sharded:
        fully_shard(net)  # of a large model, its blocks first
    base = torch.optim.AdamW(net.parameters(), lr=2e-3)
    return net, CrAM(net, base, ["global:0.8", "global:0.9", "nm:2:4"], rho=0.05)


model, optimizer = build(sharded=True)
for _ in range(EPOCHS):
    for batch in torch.arange(1440, device=device).split(96):

        def closure(mine=batch[rank::count]):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            return loss

        optimizer.step(closure)  # the largest weights of all shards, and none of them is sent

folder = [tempfile.mkdtemp()]
distributed.broadcast_object_list(folder, src=0)
checkpoint.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder[0])
distributed.destroy_process_group()
if rank == 0:  # and here goes on alone
    model, optimizer = build(sharded=False)
    checkpoint.load({"training": TrainingState(model, optimizer)}, checkpoint_id=folder[0])
    for target in ("global:0.0", *map(str, optimizer.operators)):
        right = optimizer.compress(target)(images[1440:]).argmax(1) == labels[1440:]
        print(f"{target.replace('global:0.0', 'dense')}: {right.float().mean():.1%}")
