"""LoRA with CrAM+: adapt a trained net to new data, then merge, prune in one shot, keep the zeros.

An MLP learns the digits 0 to 4; its adapters then learn all ten, and the merged net is pruned.
"""

import torch
from peft import LoraConfig, get_peft_model
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from torchcram import compressible_weights, sparsity
from torchcram.integrations.peft import LoraCrAM

LEVELS = ("global:0.5", "global:0.7", "global:0.8")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Trains for one epoch; any optimizer takes a closure."""
    for rows in torch.randperm(len(x)).split(64):

        def closure(rows: Tensor = rows) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            return loss

        optimizer.step(closure)


def main(epochs: int = 20) -> dict[str, float]:
    """Trains, merges, prunes; returns the test accuracy at every level."""
    torch.manual_seed(0)
    pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    (x, test_x), (y, test_y) = (pixels.float() / 16).split((1400, 397)), digits.split((1400, 397))
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    model = nn.Sequential(*layers)
    base = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        train(model, base, x[y < 5], y[y < 5])
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["0", "2"], modules_to_save=["4"])
    model = get_peft_model(model, config)
    base = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    optimizer = LoraCrAM(model, base, LEVELS, rho=0.05)
    for _ in range(epochs):
        train(model, optimizer, x, y)
    accuracy = {}
    for level in ("global:0.0", *LEVELS):
        small = optimizer.compress(level)
        accuracy[level] = (small(test_x).argmax(1) == test_y).float().mean().item()
        zeros = sparsity(compressible_weights(small))
        print(f"{level}: {zeros:.0%} zeros, {accuracy[level]:.1%} right")
    return accuracy


if __name__ == "__main__":
    main()
