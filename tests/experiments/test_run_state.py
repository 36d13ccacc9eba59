import torch
from runs import CPU
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from torchcram.experiments.state import load_state_, own_randomness, state_of


def stepped(form):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).to(memory_format=form)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    cross_entropy(model(torch.randn(2, 3, 3, 3)), torch.tensor([0, 1])).backward()
    optimizer.step()
    return model, optimizer


def test_groups_are_not_saved():
    state = state_of(*stepped(torch.contiguous_format), CPU)
    assert state.keys() == {"model", "optimizer", "random"}
    assert state["optimizer"].keys() == {"state"}
    assert state["random"].keys() == {"cpu"}


def test_state_takes_the_layout_of_the_parameters_it_is_for():
    model, optimizer = stepped(torch.contiguous_format)
    other, twin = stepped(torch.channels_last)
    load_state_(other, twin, CPU, state=state_of(model, optimizer, CPU))
    weight, moment = other[0].weight, twin.state[other[0].weight]["momentum_buffer"]
    assert moment.stride() == weight.stride() != model[0].weight.stride()
    assert torch.equal(moment, optimizer.state[model[0].weight]["momentum_buffer"])
    assert torch.equal(weight, model[0].weight)


def test_random_numbers_go_on_where_they_were():
    pair = stepped(torch.contiguous_format)
    before = torch.get_rng_state()
    with own_randomness(CPU, 5):
        first = torch.rand(3)
        state = state_of(*pair, CPU)
        expected = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with own_randomness(CPU, 5):
        assert torch.equal(torch.rand(3), first)
        torch.rand(10)
        load_state_(*pair, CPU, state=state)
        assert torch.equal(torch.rand(3), expected)
