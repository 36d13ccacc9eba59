"""CrAM+ in a bare PyTorch loop, with mixed precision, gradient accumulation and clipping.

python examples/plain_loop.py [EPOCHS]    # scikit-learn's digits; seconds on one core
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import CrAM, tune_batchnorm_

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
device = "cuda" if torch.cuda.is_available() else "cpu"
precision = torch.bfloat16 if device == "cuda" else torch.float16  # which needs the scaler

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float().div(16).to(device)
train, test = images[:1440], images[1440:]  # other people wrote the latter
labels, answers = labels[:1440].to(device), labels[1440:].to(device)

torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU()]
layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(256, 10)).to(device)
base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
optimizer = CrAM(model, base, ["global:0.8", "global:0.9", "nm:2:4"], rho=0.05)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
scaler = torch.amp.GradScaler(device, enabled=precision is torch.float16)


def backward(step):
    for batch in step:
        with torch.autocast(device, precision):
            loss = cross_entropy(model(train[batch]), labels[batch])
        scaler.scale(loss / len(step)).backward()


for _ in range(EPOCHS):
    for samples in torch.randperm(len(train), device=device).split(96):
        step = samples.chunk(2)  # two micro-batches
        optimizer.zero_grad()
        backward(step)
        with optimizer.compressed(grad_scaler=scaler):  # the same data, at the compressed point
            backward(step)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    schedule.step()

print(f"dense: {(model.eval()(test).argmax(1) == answers).float().mean():.1%}")
for target in map(str, optimizer.operators):
    small = optimizer.compress(target)
    tune_batchnorm_(small, train.split(96))
    print(f"{target}: {(small.eval()(test).argmax(1) == answers).float().mean():.1%}")
