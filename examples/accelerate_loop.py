"""CrAM+ in a loop with Accelerate: any device, mixed precision, accumulation, clipping, DDP.

accelerate launch examples/accelerate_loop.py [EPOCHS]    # or python; scikit-learn's digits
"""

import sys
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from torchcram import CrAM, tune_batchnorm_

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 15
accelerator = Accelerator(gradient_accumulation_steps=2)  # mixed_precision="fp16", "bf16"

images, labels = map(torch.tensor, load_digits(return_X_y=True))
images = images.float().div(16)
test, answers = images[1440:].to(accelerator.device), labels[1440:].to(accelerator.device)
loader = DataLoader(TensorDataset(images[:1440], labels[:1440]), 48, shuffle=True)

torch.manual_seed(0)
layers = [nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU()]
layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(256, 10))
base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
cram = CrAM(model, base, ["global:0.8", "global:0.9", "nm:2:4"], rho=0.05)
model, optimizer, loader = accelerator.prepare(model, cram, loader)

for _ in range(EPOCHS):
    step = []  # the micro-batches of this step
    for batch in loader:
        step.append(batch)
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(batch[0]), batch[1]))
            if accelerator.sync_gradients:
                with cram.compressed(grad_scaler=accelerator.scaler):
                    for place, (x, y) in enumerate(step, 1):
                        last = place == len(step)
                        with nullcontext() if last else accelerator.no_sync(model):
                            accelerator.backward(cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                step = []
            optimizer.step()
            optimizer.zero_grad()

model = accelerator.unwrap_model(model)
with torch.no_grad():
    accelerator.print(f"dense: {(model.eval()(test).argmax(1) == answers).float().mean():.1%}")
    for target in map(str, cram.operators):
        small = cram.compress(target)
        tune_batchnorm_(small, images[:1440].split(96))
        found = (small.eval()(test).argmax(1) == answers).float().mean()
        accelerator.print(f"{target}: {found:.1%}")
