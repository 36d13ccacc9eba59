"""torch.compile: one more graph for the compressed pass, and none after the first step."""

import copy
import shutil

import pytest
import torch
from nets import RULES, ConvNet, closure_for, images, same, snapshot
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import CRAM_PLUS, CrAM

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
OPERATORS = ["global:0.5", "uniform:0.7", "nm:2:4", "int4", "global:0.5+int8"]
BASES = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
}


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def build(rule=CRAM_PLUS, base="SGD", model=None, **options):
    torch.manual_seed(0)
    model = model or ConvNet()
    return model, CrAM(model, BASES[base](model.parameters()), OPERATORS, rule=rule, **options)


def graphs_after_each_step(model, optimizer, counter, steps=6):
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    counts = []
    for _ in range(steps):
        optimizer.step(closure_for(compiled, optimizer, images()))
        counts.append(counter.frame_count)
    return counts


@rules
def test_two_graphs_whatever_the_number_of_steps(rule):
    model, optimizer = build(rule, mask_interval=2, base_step_probability=0.2, seed=1)
    counter = CompileCounterWithBackend("aot_eager")
    assert graphs_after_each_step(model, optimizer, counter) == [2] * 6


def test_a_model_without_running_statistics_needs_one():
    model, optimizer = build(
        model=nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))
    )
    counter = CompileCounterWithBackend("eager")
    assert graphs_after_each_step(model, optimizer, counter) == [1] * 6


def test_instance_norm_needs_two():
    norm = nn.InstanceNorm2d(8, track_running_stats=True)
    model = nn.Sequential(nn.Conv2d(4, 8, 3), norm, nn.Flatten(), nn.Linear(128, 5))
    model, optimizer = build(model=model)
    counter = CompileCounterWithBackend("eager")
    assert graphs_after_each_step(model, optimizer, counter) == [2] * 6


@pytest.mark.parametrize("given", ["model", "compiled"])
@rules
def test_a_compiled_model_trains_as_an_eager_one(rule, given):
    eager, first = build(rule)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="eager")
    base = BASES["SGD"](model.parameters())
    second = CrAM(compiled if given == "compiled" else model, base, OPERATORS, rule=rule)
    for _ in range(4):
        batch = images()
        first.step(closure_for(eager, first, batch))
        second.step(closure_for(compiled, second, batch))
    assert same(snapshot(eager), snapshot(model))  # buffers of batch norm, too


def test_micro_batches_and_compiling_in_place():
    model, optimizer = build()
    counter = CompileCounterWithBackend("aot_eager")
    model.compile(backend=counter)
    for _ in range(4):
        parts = [images(), images()]
        optimizer.zero_grad()
        for x, y in parts:
            cross_entropy(model(x), y).backward()
        with optimizer.compressed():
            for x, y in parts:
                cross_entropy(model(x), y).backward()
        optimizer.step()
    assert counter.frame_count == 2


@rules
@pytest.mark.parametrize("base", BASES)
def test_addresses_never_change(rule, base):
    model, optimizer = build(rule, base, mask_interval=2)

    def addresses():
        state = [v for entries in optimizer.state.values() for v in entries.values()]
        held = [*model.parameters(), *model.buffers(), *filter(torch.is_tensor, state)]
        return [tensor.data_ptr() for tensor in held]

    before = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    inside = []
    optimizer.step(closure_for(model, optimizer, images()))
    first = addresses()
    for _ in range(4):
        usual = closure_for(model, optimizer, images())
        optimizer.step(lambda usual=usual: (inside.append(addresses()), usual())[1])
        assert addresses() == first
    assert first[: len(before)] == before
    assert all(one == first for one in inside)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_trains_as_eager_does():
    eager, first = build()
    model, second = build()
    compiled = torch.compile(model)
    for _ in range(4):
        batch = images()
        first.step(closure_for(eager, first, batch))
        second.step(closure_for(compiled, second, batch))
    for name, value in snapshot(eager).items():
        torch.testing.assert_close(snapshot(model)[name], value, rtol=1e-4, atol=1e-5)
