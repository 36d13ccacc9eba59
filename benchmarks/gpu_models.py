"""Whole models in 2:4 on the GPU, in every way that `prepare_gpu` tries.

    python benchmarks/gpu_models.py [--work resnet50-64 resnet50-256 bert-32] [--operator nm:2:4]

Prints a Markdown table with the milliseconds of a call in every mode: eager, compiled, captured as
a CUDA graph, and both, with replaced layers and with all layers dense. Then come the layers that
were replaced. Weights are random.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import machine
from torch import Tensor, nn

from torchcram import compress
from torchcram.runtime.gpu import prepare_gpu

Work = tuple[nn.Module, Tensor]


def resnet50(images: int) -> Work:
    """Returns ResNet50 and a batch of images, in channels_last."""
    from torchvision.models import resnet50 as build

    x = torch.randn(images, 3, 224, 224)
    return build().to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)


class Encoder(nn.Module):
    """BERT-base with a tensor as its output."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(), add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps (n, t) tokens to (n, t, 768) states."""
        states: Tensor = self.bert(tokens).last_hidden_state
        return states


def bert(sequences: int) -> Work:
    """Returns BERT-base and a batch of tokens."""
    return Encoder(), torch.randint(30000, (sequences, 384))


WORK: dict[str, Callable[[], Work]] = {
    "resnet50-64": lambda: resnet50(64),
    "resnet50-256": lambda: resnet50(256),
    "bert-32": lambda: bert(32),
}


def main() -> None:
    """Prepares the models and prints the tables."""
    parser = argparse.ArgumentParser(description="Times compressed models on the GPU.")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--operator", default="nm:2:4")
    options = parser.parse_args()
    print(machine(torch.device("cuda")))
    for name in options.work:
        torch.manual_seed(0)
        model, x = WORK[name]()
        model = compress(model.eval(), options.operator)
        _, layers, mode = prepare_gpu(model, (x,), operator=options.operator, compile_model=True)
        print(f"\n{name}, {options.operator}: the fastest mode is {mode.name}\n")
        print("| mode | ms |\n|---|--:|")
        for each, milliseconds in mode.milliseconds.items():
            print(f"| {each} | {milliseconds:.2f} |")
        for each, reason in mode.failed.items():
            print(f"| {each} | {reason} |")
        print()
        for layer in layers:
            if layer.speedup is not None:
                print(f"- {layer.name}: {layer.kernel}, {layer.reason}", flush=True)


if __name__ == "__main__":
    main()
