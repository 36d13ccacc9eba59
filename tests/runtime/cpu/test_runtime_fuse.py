"""prepare(): what is fused, and that outputs stay what they were."""

import copy

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model
from torch import nn

from torchcram.experiments.models.small import BasicBlock
from torchcram.runtime import prepare
from torchcram.runtime.cpu.modules import SparseConv2d, SparseFeedForward, SparseLinear

pytestmark = [needs_kernels, pytest.mark.usefixtures("sparse_wins")]


class Blocks(nn.Module):
    """Convolutions with batch norms that have seen data, residuals and a Linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.fc = nn.Linear(16, 5)
        self.train()
        self(torch.randn(20, 3, 8, 8))
        self.eval()

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc(self.blocks(x).mean((2, 3)))


@pytest.mark.parametrize("batch", [1, 5, 17, 40])
def test_a_network_is_fused_and_computes_the_same(batch):
    model, x = sparse_model(Blocks()), torch.randn(batch, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    fast = prepare(model, x)
    assert relative_error(fast(x), model.double()(x.double())) < 1e-5
    kinds = [type(module) for module in fast.modules()]
    assert nn.BatchNorm2d not in kinds
    assert kinds.count(SparseConv2d) == 5
    assert sum(m.relu for m in fast.modules() if isinstance(m, SparseConv2d)) == 5
    assert all(torch.equal(v.float(), before[k].float()) for k, v in model.state_dict().items())
    for other in (1, 3, 33):  # other batches than that of the example
        y = torch.randn(other, 3, 8, 8)
        assert relative_error(fast(y), model(y.double())) < 1e-5


def test_a_convolution_in_the_shortcut_is_fused_once():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.short = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(4, 6, 1)

        def forward(self, x):
            return torch.relu(self.short(x) + self.main(x))

    model, x = Block().eval(), torch.randn(2, 4, 5, 5)
    fast = prepare(model, x)
    assert relative_error(fast(x), model(x)) < 1e-6
    assert sorted(m.relu for m in fast.modules() if isinstance(m, SparseConv2d)) == [False, True]


def test_a_model_that_reads_a_weight_still_can():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 6, 3)

        def forward(self, x):
            return self.conv(x) * self.conv.weight.sum()

    model, x = Reads().eval(), torch.randn(2, 4, 5, 5)
    fast = prepare(model, x)
    assert isinstance(fast.conv, SparseConv2d)
    assert relative_error(fast(x), model(x)) < 1e-5


def test_large_batches_run_in_parts():
    fast = prepare(sparse_model(Blocks()), torch.randn(40, 3, 8, 8))
    assert type(fast).__name__ == "BatchSplitter"
    assert all(m.by_images for m in fast.modules() if isinstance(m, SparseConv2d))


def test_a_model_that_cannot_be_traced():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return self.fc(x) if x.sum() > 0 else self.fc(-x)

    model = Branches()
    for x in (torch.ones(3, 8), -torch.ones(3, 8)):
        fast = prepare(model, x)
        assert isinstance(fast.fc, SparseLinear)
        assert relative_error(fast(x), model(x)) < 1e-6


def test_layers_of_torch_with_shortcuts_use_the_kernels(monkeypatch):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    fast = prepare(model, x)
    assert sum(isinstance(m, SparseLinear) for m in fast.modules()) == 4
    calls, forward = [], SparseLinear.forward
    monkeypatch.setattr(SparseLinear, "forward", lambda *a: calls.append(1) or forward(*a))
    with torch.no_grad():
        assert relative_error(fast(x), model(x)) < 1e-5
    assert len(calls) == 4


def test_bert_is_fused(monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
    )
    model = sparse_model(transformers.BertModel(config).eval())
    inputs = {"input_ids": torch.randint(0, 50, (2, 9)), "attention_mask": torch.ones(2, 9).long()}
    fast = prepare(model, inputs)
    assert sum(isinstance(m, SparseFeedForward) for m in fast.modules()) == 2
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        assert relative_error(fast(**inputs).last_hidden_state, expected) < 1e-5
    plain = prepare(model, inputs, fuse=False)
    assert not any(isinstance(m, SparseFeedForward) for m in plain.modules())
    monkeypatch.setattr(SparseFeedForward, "forward", lambda self, x, residual=None: x)  # noqa: ARG005
    other = prepare(model, inputs)  # what gives something else is left out
    assert not any(isinstance(m, SparseFeedForward) for m in other.modules())
