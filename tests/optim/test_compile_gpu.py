"""Compiled models on CUDA, also inside a captured step."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from torchcram import C_SAM, CRAM_PLUS, CrAM
from torchcram.optim.graphs import GraphedStep

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


class Training:
    """A small net with batch norm, its batches on the device, and a step that finds the next."""

    def __init__(self, rule, *, backend=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        ).cuda()
        self.run = self.model if backend is None else torch.compile(self.model, backend=backend)
        base = SGD(self.model.parameters(), lr=0.05, momentum=0.9, fused=True)
        self.optimizer = CrAM(self.model, base, OPERATORS, rule=rule)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(8, 32, 16, generator=generator).cuda()
        self.labels = torch.randint(4, (8, 32), generator=generator).cuda()
        self.number = torch.zeros((), dtype=torch.int64, device="cuda")

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


def assert_alike(one, two):
    """To what rounding becomes where it decides which of two weights is kept."""
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM], ids=lambda rule: rule.name)
def test_a_compiled_model_trains_as_an_eager_one(rule):
    counter = CompileCounterWithBackend("inductor")
    eager, compiled = Training(rule), Training(rule, backend=counter)
    for _ in range(4):
        eager.step()
        compiled.step()
    assert counter.frame_count == 2
    assert_alike(eager.model, compiled.model)


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM], ids=lambda rule: rule.name)
def test_a_captured_step_of_a_compiled_model(rule):
    counter = CompileCounterWithBackend("inductor")
    compiled, graphed = Training(rule, backend="inductor"), Training(rule, backend=counter)
    before = copy.deepcopy(graphed.model.state_dict())
    take = GraphedStep(graphed.model, graphed.optimizer, graphed.step)
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
    training = Training(CRAM_PLUS)
    training.step()

    def addresses():
        held = [*training.model.parameters(), *training.model.buffers()]
        held += [entry["momentum_buffer"] for entry in training.optimizer.state.values()]
        return [tensor.data_ptr() for tensor in held]

    before = addresses()
    for _ in range(4):
        training.step()
        assert addresses() == before
