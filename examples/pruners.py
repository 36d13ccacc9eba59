"""Pruning a trained net by gradients or activations, against pruning by magnitude.

python examples/pruners.py [EPOCHS]    # scikit-learn's digits; seconds on one core
"""

import copy
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram.pruners import prune_

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
TARGETS = ["uniform:0.8", "wanda@uniform:0.8", "sparsegpt@uniform:0.8", "obs@uniform:0.8"]
device = "cuda" if torch.cuda.is_available() else "cpu"

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float().div(16).to(device)
train, test = images[:1440], images[1440:]  # other people wrote the latter
labels, answers = labels[:1440].to(device), labels[1440:].to(device)

torch.manual_seed(0)
layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
model = nn.Sequential(*layers).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)


def loss(model, batch):
    return cross_entropy(model(train[batch]), labels[batch])


for _ in range(EPOCHS):
    for batch in torch.randperm(len(train), device=device).split(48):
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

samples = torch.arange(1024, device=device).split(1)  # a gradient of each is what obs needs
print(f"dense: {(model(test).argmax(1) == answers).float().mean():.1%}")
for target in TARGETS:
    small = copy.deepcopy(model)
    prune_(small, target, samples, loss=loss)
    print(f"{target}: {(small(test).argmax(1) == answers).float().mean():.1%}")
