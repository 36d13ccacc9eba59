"""CrAM+ on several processes with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/ddp.py [EPOCHS]    # scikit-learn's digits; seconds
"""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from torchcram import CrAM, tune_batchnorm_

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
distributed.init_process_group("nccl" if cuda else "gloo")

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images, labels = images.float().div(16).to(device), labels.to(device)
data = TensorDataset(images[:1440], labels[:1440])  # other people wrote the rest
sampler = DistributedSampler(data)
loader = DataLoader(data, 96 // distributed.get_world_size(), sampler=sampler)

torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU()]
layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
module = nn.Sequential(*layers, nn.Linear(256, 10)).to(device)
model = DistributedDataParallel(module, device_ids=[device] if cuda else None)
base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
optimizer = CrAM(model, base, ["global:0.8", "global:0.9", "nm:2:4"], rho=0.05)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)  # all processes draw the same operator and find the same masks

if distributed.get_rank() == 0:
    right = (module.eval()(images[1440:]).argmax(1) == labels[1440:]).float()
    print(f"dense: {right.mean():.1%}")
    for target in map(str, optimizer.operators):
        small = optimizer.compress(target)
        tune_batchnorm_(small, images[:1440].split(96))
        right = (small.eval()(images[1440:]).argmax(1) == labels[1440:]).float()
        print(f"{target}: {right.mean():.1%}")
distributed.destroy_process_group()
