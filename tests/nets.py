"""Small models and operators that the tests share."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import (
    C_SAM,
    CRAM,
    CRAM_PLUS,
    NM,
    SAM,
    TOPK,
    TOPK_PLUS,
    Chain,
    GlobalTopK,
    Quantize,
    UniformTopK,
)

OPERATORS = [
    GlobalTopK(0.5),
    UniformTopK(0.7),
    NM(2, 4),
    Quantize(4),
    Quantize(4, 4),
    Chain(GlobalTopK(0.5), Quantize(8)),
    Chain(NM(2, 4), GlobalTopK(0.75)),
]


RULES = [SAM, CRAM, CRAM_PLUS, C_SAM, TOPK, TOPK_PLUS]


class ConvNet(nn.Module):
    """Convolutions (one transposed), batch norm, a Linear layer, and one that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2)
        self.bn2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.up(x)))
        return self.fc(x.mean((2, 3)))


class Experts(nn.Module):
    """Fused experts, each a gated MLP that every token goes through.

    `transposed` stores them as (experts, inputs, outputs), else as (experts, outputs, inputs).
    """

    def __init__(self, count=3, hidden=8, inner=4, *, transposed=False):
        super().__init__()
        up, down = (count, 2 * inner, hidden), (count, hidden, inner)
        if transposed:
            up, down = (count, hidden, 2 * inner), (count, inner, hidden)
        self.is_transposed = transposed
        self.gate_up_proj = nn.Parameter(torch.randn(up) / hidden**0.5)
        self.down_proj = nn.Parameter(torch.randn(down) / inner**0.5)

    def forward(self, x):
        equation = "...i,eio->...eo" if self.is_transposed else "...i,eoi->...eo"
        gate, up = torch.einsum(equation, x, self.gate_up_proj).chunk(2, -1)
        equation = "...ei,eio->...o" if self.is_transposed else "...ei,eoi->...o"
        return torch.einsum(equation, torch.sigmoid(gate) * up, self.down_proj)


class SequenceNet(nn.Module):
    """Attention, an LSTM, a Conv1D of Transformers and fused experts; images are its sequences."""

    def __init__(self):
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.rnn = nn.LSTM(4, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = Conv1D(8, 8)
        self.experts = Experts()
        self.turned = nn.ModuleDict({"experts": Experts(transposed=True)})
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x, _ = self.rnn(x.mean(3).mT)
        x = self.conv(self.attention(x, x, x, need_weights=False)[0].contiguous())
        x = x + self.experts(x)
        return self.fc((x + self.turned["experts"](x)).mean(1))


def images(count=6, dtype=torch.float32):
    return torch.randn(count, 4, 6, 6, dtype=dtype), torch.randint(5, (count,))


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def closure_for(model, optimizer, batch):
    """The usual closure: clear, forward, backward."""

    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    return closure


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(a, b):
    """Whether two snapshots are equal bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
