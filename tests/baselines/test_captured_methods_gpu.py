"""Steps of the methods as CUDA graphs."""

import pytest
import torch
from problems import batches, build
from test_protocol import METHODS
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import GraphedStep

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_captured_steps_are_those_without_a_graph(name, kind):
    def trained(captured):
        model = build().cuda()
        base = kind(model.parameters(), lr=0.05, fused=True)
        optimizer = METHODS[name](model, base)
        if not optimizer.capturable_steps:
            with pytest.raises(ValueError, match="differ from one another"):
                GraphedStep(model, optimizer, lambda _: None)
            pytest.skip("its steps differ from one another")

        def loss_of(batch):
            return cross_entropy(model(batch[0]), batch[1])

        if captured:
            step = GraphedStep(model, optimizer, loss_of)
            losses = [step(batch) for batch in batches()]
            step.check()
        else:

            def closure(batch):
                optimizer.zero_grad()
                loss = loss_of(batch)
                loss.backward()
                return loss

            losses = [
                optimizer.step(lambda batch=batch: closure(batch))
                for batch in ((x.cuda(), y.cuda()) for x, y in batches())
            ]
        return model, torch.stack([loss.detach() for loss in losses]), optimizer

    model, losses, optimizer = trained(captured=True)
    twin, expected, other = trained(captured=False)
    torch.testing.assert_close(losses, expected)
    assert optimizer.steps == other.steps
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
