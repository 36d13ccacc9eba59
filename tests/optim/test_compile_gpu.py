"""Compiled models on CUDA, also inside a captured step."""

import copy

import pytest
import torch
from resident import Resident
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import SGD

from torchcram import C_SAM, CRAM_PLUS, CrAM
from torchcram.optim.graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    # what inductor itself imports and advises
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

OPERATORS = ("global:0.5", "nm:2:4")


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def training(rule, *, backend=None):
    def make(model):
        base = SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
        return CrAM(model, base, OPERATORS, rule=rule)

    return Resident(make, backend=backend)


def assert_alike(one, two):
    """To what rounding becomes where it decides which of two weights is kept."""
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM], ids=lambda rule: rule.name)
def test_a_compiled_model_trains_as_an_eager_one(rule):
    counter = CompileCounterWithBackend("inductor")
    eager, compiled = training(rule), training(rule, backend=counter)
    for _ in range(4):
        eager.step()
        compiled.step()
    assert counter.frame_count == 2
    assert_alike(eager.model, compiled.model)


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM], ids=lambda rule: rule.name)
def test_a_captured_step_of_a_compiled_model(rule):
    counter = CompileCounterWithBackend("inductor")
    compiled, graphed = training(rule, backend="inductor"), training(rule, backend=counter)
    before = copy.deepcopy(graphed.model.state_dict())
    take = StepGraphs(graphed.model, graphed.optimizer, graphed.step)
    assert counter.frame_count == 2  # compiled while warming up, not while capturing
    for name, value in graphed.model.state_dict().items():
        assert torch.equal(value, before[name]), name
    graphed.number.zero_()
    for _ in range(8):
        compiled.step()
        take()
    take.check()
    assert counter.frame_count == 2
    assert_alike(compiled.model, graphed.model)


def test_addresses_never_change():
    given = training(CRAM_PLUS)
    given.step()

    def addresses():
        held = [*given.model.parameters(), *given.model.buffers()]
        held += [entry["momentum_buffer"] for entry in given.optimizer.state.values()]
        return [tensor.data_ptr() for tensor in held]

    before = addresses()
    for _ in range(4):
        given.step()
        assert addresses() == before
