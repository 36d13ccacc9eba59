"""Methods that hold their mask: pruned weights and their moments stay zero."""

import pytest
import torch
from problems import adamw, batches, build, sgd, train
from test_protocol import METHODS

from torchcram.baselines import HeldMask

HOLDING = {
    name: method
    for name, method in METHODS.items()
    if isinstance(method(model := build(), sgd(model)), HeldMask)
}


class Drifting(torch.optim.SGD):
    """Moves all weights, also those without a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01)


def drifting(model):
    return Drifting(model.parameters(), 0.1)


def test_they_are_known():
    assert list(HOLDING) == ["gradual magnitude", "AC/DC", "lottery tickets", "gradual OBS"]


@pytest.mark.parametrize("name", HOLDING)
@pytest.mark.parametrize("base_of", [sgd, adamw, drifting])
def test_pruned_weights_and_their_moments_are_zero_after_every_step(name, base_of):
    model = build()
    optimizer = HOLDING[name](model, base_of(model))
    pruned = 0
    for batch in batches():
        train(model, optimizer, [batch])
        for weight_name, mask in optimizer.masks.items():
            weight = optimizer.weights[weight_name]
            pruned += int((~mask).sum())
            values = [weight, *optimizer.state[weight].values()]
            for value in values:
                if torch.is_tensor(value) and value.shape == weight.shape:
                    assert not value[~mask].count_nonzero()
    assert pruned
