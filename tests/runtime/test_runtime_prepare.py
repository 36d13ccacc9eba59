"""prepare(): which layers are exchanged, what is fused, and that outputs stay what they were."""

import copy
import warnings

import pytest
import torch
from sparse_cases import needs_kernels, relative_error
from torch import nn

import torchcram
from torchcram import runtime
from torchcram.experiments.models.small import BasicBlock
from torchcram.runtime import layers, library, prepare
from torchcram.runtime.modules import SparseConv2d, SparseFeedForward, SparseLinear


@pytest.fixture
def sparse_wins(monkeypatch):
    """Every race is won by the sparse kernels, by those of images where they take part."""
    monkeypatch.setattr(layers, "_race", lambda work: {key: -i for i, key in enumerate(work)})


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


class Mixed(nn.Module):
    """Layers of which only one can get sparse kernels."""

    def __init__(self):
        super().__init__()
        self.short = nn.Linear(8, 8).to(torch.bfloat16)
        self.unused = nn.Linear(8, 8)
        self.used = nn.Linear(8, 8)
        self.grouped = nn.Conv2d(4, 4, 3, groups=2)
        self.same = nn.Conv2d(4, 4, 3, padding="same")

    def forward(self, x):
        return self.used(x)


def sparse(model, operator="uniform:0.8"):
    return torchcram.compress(model, operator)


@needs_kernels
@pytest.mark.parametrize("batch", [1, 5, 17, 40])
@pytest.mark.usefixtures("sparse_wins")
def test_a_network_is_fused_and_computes_the_same(batch):
    model, x = sparse(Blocks()), torch.randn(batch, 3, 8, 8)
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


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_large_batches_run_in_parts():
    fast = prepare(sparse(Blocks()), torch.randn(40, 3, 8, 8))
    assert type(fast).__name__ == "InParts"
    assert all(m.by_images for m in fast.modules() if isinstance(m, SparseConv2d))


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_the_report_says_what_was_done_and_why():
    model = Mixed()
    done = {
        choice.name: choice
        for choice in runtime.report(prepare(model, torch.randn(3, 8), fuse=False))
    }
    assert done["used"].sparse
    assert "times as fast as dense on 3x8" in done["used"].reason
    assert "torch.bfloat16, not float32" in done["short"].reason
    assert "does not reach it" in done["unused"].reason
    assert "2 groups" in done["grouped"].reason
    assert "padding is 'same'" in done["same"].reason
    assert sum(choice.sparse for choice in done.values()) == 1
    assert str(done["used"]).startswith("used (Linear, 0.0% zeros): sparse, ")
    with pytest.raises(ValueError, match="does not come from"):
        runtime.report(nn.Linear(2, 2))


@needs_kernels
def test_a_layer_that_gets_slower_stays_dense(monkeypatch):
    monkeypatch.setattr(layers, "_race", lambda work: dict.fromkeys(work, 2.0) | {"dense": 1.0})
    fast = prepare(nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8))
    assert not any(isinstance(m, SparseLinear) for m in fast.modules())
    (choice,) = runtime.report(fast)
    assert not choice.sparse
    assert "0.50 times as fast" in choice.reason


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("example", [None, torch.ones(3, 8)])
def test_a_model_of_one_layer(example):
    layer = sparse(nn.Sequential(nn.Linear(8, 8)))[0]
    fast = prepare(layer, example)
    assert any(isinstance(m, SparseLinear) for m in fast.modules())
    assert relative_error(fast(torch.ones(3, 8)), layer(torch.ones(3, 8))) < 1e-6


@needs_kernels
def test_measuring_finds_the_faster_one():
    big = nn.Linear(512, 512)
    times = layers._measure(sparse(nn.Sequential(big), "uniform:0.98")[0], (256, 512))
    assert times["sparse"] < times["dense"]


@needs_kernels
def test_without_an_example_sparsity_decides():
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Linear(20, 20))
    torchcram.compress_(model[0], "uniform:0.9")
    torchcram.compress_(model[2], "uniform:0.9")
    fast = prepare(model)
    assert [type(m) for m in fast] == [SparseLinear, nn.ReLU, SparseConv2d, nn.Linear]
    assert [choice.sparse for choice in runtime.report(fast)] == [True, True, False]
    assert not fast.training


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_a_shared_layer_stays_shared():
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    fast, x = prepare(model, torch.randn(3, 8)), torch.randn(3, 8)
    assert sum(isinstance(m, SparseLinear) for m in fast.modules()) == 1
    assert relative_error(fast(x), model(x)) < 1e-6


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
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


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_layers_of_torch_with_shortcuts_use_the_kernels():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 16)
    fast = prepare(model, x)
    assert sum(isinstance(m, SparseLinear) for m in fast.modules()) == 4
    with torch.no_grad():
        assert relative_error(fast(x), model(x)) < 1e-5


@needs_kernels
@pytest.mark.usefixtures("sparse_wins")
def test_bert_is_fused():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
    )
    model = sparse(transformers.BertModel(config).eval())
    inputs = {"input_ids": torch.randint(0, 50, (2, 9)), "attention_mask": torch.ones(2, 9).long()}
    fast = prepare(model, inputs)
    assert sum(isinstance(m, SparseFeedForward) for m in fast.modules()) == 2
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        assert relative_error(fast(**inputs).last_hidden_state, expected) < 1e-5
    plain = prepare(model, inputs, fuse=False)
    assert not any(isinstance(m, SparseFeedForward) for m in plain.modules())


def test_without_the_library_everything_is_dense_and_said_once(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    library.library.cache_clear()
    try:
        model, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(3, 8)
        with pytest.warns(UserWarning, match="python -m torchcram.runtime.build"):
            fast = prepare(model, x)
        assert torch.equal(fast(x), model(x))
        assert [choice.reason for choice in runtime.report(fast)] == ["no kernels"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(model, x)
            assert not runtime.available()
        with pytest.raises(RuntimeError, match="have not been built"):
            library.kernels()
    finally:
        library.library.cache_clear()
