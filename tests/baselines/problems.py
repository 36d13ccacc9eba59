"""A small problem that every method trains on, and its loop."""

import torch
from torch import nn

BATCHES = 12


def build(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


def batches(count=BATCHES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 16, 8, generator=generator, dtype=dtype)
    return [(x, torch.randint(4, (16,), generator=generator)) for x in inputs]


def sgd(model, momentum=0.9, weight_decay=1e-2):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=momentum, weight_decay=weight_decay)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def loss_on(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model, optimizer, data):
    """Takes a step on every batch; returns the losses."""
    losses = []
    for batch in data:

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = loss_on(model, batch)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses


def weights_of(model):
    return {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}


def top_k(scores, sparsity):
    """Returns masks of the largest scores of all tensors together; without ties."""
    joined = torch.cat([score.flatten() for score in scores.values()])
    keep = joined.numel() - round(sparsity * joined.numel())
    if keep == 0:
        return {name: torch.zeros_like(score, dtype=torch.bool) for name, score in scores.items()}
    threshold = joined.topk(keep).values[-1]
    return {name: score >= threshold for name, score in scores.items()}
