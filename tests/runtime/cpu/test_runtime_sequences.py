"""Models with attention, recurrent layers and experts: what has no kernel runs as it is."""

import copy

import pytest
import torch
from nets import Experts, SequenceNet
from torch import nn

from torchcram import compress, compress_, compressible_weights, runtime
from torchcram.runtime import prepare
from torchcram.runtime.onnx import export_onnx


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn = kind(8, 16, batch_first=True)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.rnn(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.encoder(x).mean(1))


class Projections(nn.Module):
    """The feed-forward layers of GPT-2."""

    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.up, self.down = Conv1D(32, 16), Conv1D(16, 32)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Mixture(nn.Module):
    def __init__(self, *, transposed):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.experts = Experts(3, 16, 8, transposed=transposed)

    def forward(self, x):
        return self.experts(torch.relu(self.fc(x)))


NETS = {
    "attention": (Attention, (2, 5, 16)),
    "LSTM": (Recurrent, (2, 5, 8)),
    "GRU": (lambda: Recurrent(nn.GRU), (2, 5, 8)),
    "Conv1D": (Projections, (2, 5, 16)),
    "experts": (lambda: Mixture(transposed=False), (2, 5, 16)),
    "transposed experts": (lambda: Mixture(transposed=True), (2, 5, 16)),
    "all": (SequenceNet, (2, 4, 6, 6)),
}


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_prepared_models_give_the_same_outputs(name, measured):
    build, shape = NETS[name]
    model, x = compress(build(), "uniform:0.9").eval(), torch.randn(shape)
    with torch.no_grad():
        expected = model(x)
        fast = prepare(model, x if measured else None)
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)


def test_the_report_names_what_no_kernel_is_for():
    for example in (None, torch.randn(2, 4, 6, 6)):
        said = {c.name: c for c in runtime.report(prepare(SequenceNet(), example))}
        assert said["rnn.weight_hh_l0"].reason == "there is no kernel for LSTM layers"
        assert said["attention.in_proj_weight"].kind == "MultiheadAttention"
        assert said["attention.out_proj"].kind == "NonDynamicallyQuantizableLinear"
        assert said["conv"].kind == "Conv1D"
        assert said["turned.experts.down_proj"].kind == "Experts"
        assert said["fc"].kind == "Linear"
        assert len(said) == len(compressible_weights(SequenceNet()))
        assert not any(choice.sparse for choice in said.values())


def test_the_report_names_zeros():
    model = compress(nn.Sequential(nn.LSTM(8, 8)), "uniform:0.75")
    said = [str(choice) for choice in runtime.report(prepare(model))]
    assert (
        said[0] == "0.weight_ih_l0 (LSTM, 75.0% zeros): dense, there is no kernel for LSTM layers"
    )


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("attention", "int8"),
        ("LSTM", "int8"),
        ("Conv1D", "int4"),
        ("Conv1D", "int4:g4"),
        ("experts", "int4:g4"),
        ("transposed experts", "int8"),
    ],
)
def test_onnx_files_give_the_same_outputs(name, operator, tmp_path):
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    build, shape = NETS[name]
    model = build().eval()
    compress_(model, operator)
    before = copy.deepcopy(model.state_dict())
    example = (torch.randn(shape),)
    path = tmp_path / "model.onnx"
    export_onnx(model, path, example, operator=operator)  # compares the outputs itself
    assert path.stat().st_size > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_onnx_files_hold_the_integers_of_all_layers(tmp_path):
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = SequenceNet().eval()
    del model.rnn  # whose weights may be taken apart
    model.rnn = lambda x: (torch.cat([x, x], -1), None)
    compress_(model, "int8")
    export_onnx(model, tmp_path / "m.onnx", torch.randn(2, 4, 6, 6), operator="int8")
    stored = {i.name: i.data_type for i in onnx.load(tmp_path / "m.onnx").graph.initializer}
    integers = [name for name, kind in stored.items() if kind == onnx.TensorProto.INT8]
    assert len([name for name in integers if "in_proj" in name]) == 1
    assert len(integers) == len(compressible_weights(model))
