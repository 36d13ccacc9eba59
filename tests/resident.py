"""A training whose batches live on the device, as captured steps need it."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class Resident:
    """A small net with batch norm, its batches on the device, and a step that finds the next.

    Args:
        make_optimizer: of the model.
        backend: compiles the model by it.
        device: of everything.
    """

    def __init__(self, make_optimizer, *, backend=None, device="cuda"):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        ).to(device)
        self.run = self.model if backend is None else torch.compile(self.model, backend=backend)
        self.optimizer = make_optimizer(self.model)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(8, 32, 16, generator=generator).to(device)
        self.labels = torch.randint(4, (8, 32), generator=generator).to(device)
        self.number = torch.zeros((), dtype=torch.int64, device=device)

    def step(self):
        inputs = self.inputs.index_select(0, self.number.view(1))[0]
        labels = self.labels.index_select(0, self.number.view(1))[0]

        def closure():
            self.optimizer.zero_grad()
            loss = cross_entropy(self.run(inputs), labels)
            loss.backward()
            return loss.detach()

        self.optimizer.step(closure)
        self.number.add_(1).remainder_(8)
