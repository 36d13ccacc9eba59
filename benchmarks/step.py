"""The cost of one training step: SAM, CrAM and CrAM+ as multiples of the plain step.

    python benchmarks/step.py [--device cpu|cuda] [--work resnet20 ... decoder]
                              [--methods plain SAM CrAM CrAM+ "CrAM+ 1.0x"]
                              [--rounds N] [--graphs] [--compile]

All methods see the same number of samples per step. Two forward-backward passes over the whole
batch make the floor of 2.0x, less the optimizer step that is taken only once. With half of the
batch at the compressed point the floor is 1.5x, and 1.0x with the other half at the dense point.
Inputs are random and already on the device; on CUDA, forward runs in bfloat16 (autocast) and
convolutions in channels_last. Where the plain step waits for the host, so does all that is done
beside it; `--graphs` captures all steps as CUDA graphs, which leaves the work itself; `--compile`
lets torch.compile fuse the passes, of transformers block by block. Captured steps of "CrAM+ 1.0x"
run both passes at the same time, those of "CrAM+ 1.0x, sequential" one after the other. ResNet50
needs the extra `vision`, BERT-base the extra `text`.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from decoder import Decoder
from timing import machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from torchcram import (
    CRAM,
    CRAM_PLUS,
    SAM,
    CrAM,
    GlobalTopK,
    GraphedStep,
    UpdateRule,
    split_batch,
)
from torchcram.experiments.models import resnet20

OPERATORS = [GlobalTopK(sparsity) for sparsity in (0.5, 0.7, 0.8, 0.9, 0.95)]
WHOLE, HALF = 1.0, 0.5


@dataclass(frozen=True)
class Method:
    """A way to train: a rule, and the shares of a batch that its passes take."""

    rule: UpdateRule | None = None  # None for the base optimizer alone
    dense_share: float = WHOLE
    compressed_share: float = WHOLE
    check_finite: bool = True
    concurrent_passes: bool | None = None  # of captured steps; None leaves it to GraphedStep

    def wrap(self, model: nn.Module, base: Optimizer) -> Optimizer:
        """The optimizer that trains `model`."""
        if self.rule is None:
            return base
        operators = OPERATORS if self.rule.compresses else ()
        return CrAM(model, base, operators, rule=self.rule, check_finite=self.check_finite)


METHODS = {
    "plain": Method(),
    "SAM": Method(SAM),
    "CrAM": Method(CRAM),
    "CrAM+": Method(CRAM_PLUS),
    "CrAM+ 1.5x": Method(CRAM_PLUS, WHOLE, HALF),
    "CrAM+ 1.0x": Method(CRAM_PLUS, HALF, HALF),
    "CrAM+ 1.5x, concurrent": Method(CRAM_PLUS, WHOLE, HALF, concurrent_passes=True),
    "CrAM+ 1.0x, sequential": Method(CRAM_PLUS, HALF, HALF, concurrent_passes=False),
    "CrAM+, no finite check": Method(CRAM_PLUS, check_finite=False),
}


@dataclass(frozen=True)
class Work:
    """A model with the batch it is trained on, and how many steps to time at a time."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.device], tuple[Tensor, Tensor]]
    optimizer: Callable[[nn.Module, bool], Optimizer]
    steps: int
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy


def _images(count: int, size: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    images = torch.randn(count, 3, size, size, device=device)
    return images, torch.randint(classes, (count,), device=device)


def _tokens(count: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(1000, 30000, (count, length), device=device)
    return tokens, torch.randint(length, (count, 2), device=device)


def _resnet50() -> nn.Module:
    from torchvision.models import resnet50

    model: nn.Module = resnet50()
    return model


def _text(count: int, length: int, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (count, length + 1), device=device)
    return tokens[:, :-1], tokens[:, 1:]


def _loss_of_tokens(scores: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(scores.flatten(0, 1), tokens.flatten())


def _decoder(width: int, depth: int) -> nn.Module:
    return Decoder(width, depth, heads=width // 64, vocabulary=32000)


class _SpanScores(nn.Module):
    """BERT-base for question answering: (batch, tokens, 2) scores of start and end."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertForQuestionAnswering

        super().__init__()
        self.bert = BertForQuestionAnswering(BertConfig())

    def forward(self, tokens: Tensor) -> Tensor:
        # The encoder itself, as nothing is padded: in a capture, the model around it cannot look
        # for padding and makes a mask, with which attention takes twice as long.
        hidden = self.bert.bert.encoder(self.bert.bert.embeddings(tokens)).last_hidden_state
        scores: Tensor = self.bert.qa_outputs(hidden)
        return scores


def _sgd(model: nn.Module, fused: bool) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=fused)


def _adamw(model: nn.Module, fused: bool) -> Optimizer:
    return AdamW(model.parameters(), lr=3e-5, fused=fused)


def works(device: torch.device) -> dict[str, Work]:
    """The models at sizes that suit the device."""
    cuda = device.type == "cuda"
    steps = 10 if cuda else 2
    # by name: batch, or batch and length
    small = {"resnet20": 128, "resnet20-1024": 1024} if cuda else {"resnet20": 32}
    large = {"resnet50": 128, "resnet50-256": 256} if cuda else {"resnet50": 16}
    texts = {"bert": (16, 384), "bert-32": (32, 384)} if cuda else {"bert": (2, 128)}
    images = {name: (batch, 224 if cuda else 64) for name, batch in large.items()}
    images["resnet50-64"] = (large["resnet50"], 64)
    size, shape = ("1.09 B parameters", (2048, 19)) if cuda else ("36 M parameters", (512, 1))
    text = (8, 1024) if cuda else (2, 64)
    residual = {
        name: Work(
            f"ResNet20, 32x32, batch {batch}",
            resnet20,
            partial(_images, batch, 32, 10),
            _sgd,
            3 * steps,
        )
        for name, batch in small.items()
    }
    residual |= {
        name: Work(
            f"ResNet50, {side}x{side}, batch {batch}",
            _resnet50,
            partial(_images, batch, side, 1000),
            _sgd,
            steps,
        )
        for name, (batch, side) in images.items()
    }
    encoders = {
        name: Work(
            f"BERT-base QA, batch {batch}, length {length}",
            _SpanScores,
            partial(_tokens, batch, length),
            _adamw,
            steps,
        )
        for name, (batch, length) in texts.items()
    }
    decoder = Work(
        f"decoder of {size}, batch {text[0]}, length {text[1]}",
        partial(_decoder, *shape),
        partial(_text, *text, 32000),
        _adamw,
        steps,
        _loss_of_tokens,
    )
    return {**residual, **encoders, "decoder": decoder}


class Run:
    """A model in training by one method."""

    def __init__(
        self,
        work: Work,
        method: str,
        device: torch.device,
        *,
        graphs: bool = False,
        compiled: bool = False,
    ) -> None:
        cuda = device.type == "cuda"
        torch.manual_seed(0)
        with device:  # random numbers for a billion weights are drawn where they are quick
            self.model = work.build()
        inputs, labels = work.batch(device)
        if cuda:
            self.model = self.model.to(memory_format=torch.channels_last)
            if inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.batch = (inputs, labels)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=cuda)
        self.shares = (METHODS[method].dense_share, METHODS[method].compressed_share)
        self.optimizer = METHODS[method].wrap(self.model, work.optimizer(self.model, cuda))
        self.device = device
        self.loss = work.loss
        self.scores = compile_(self.model) if compiled else self.model
        self.take: Callable[[], object] = self.step
        if graphs:
            graphed_step = GraphedStep(
                self.model,
                self.optimizer,
                self.loss_of,
                dense_share=self.shares[0],
                compressed_share=self.shares[1],
                concurrent_passes=METHODS[method].concurrent_passes,
            )
            self.take = partial(graphed_step, self.batch)

    def loss_of(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch."""
        inputs, labels = batch
        with self.autocast:
            return self.loss(self.scores(inputs), labels)

    def backward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of a batch, with gradients."""
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        """Takes a step."""
        whole = self.shares == (WHOLE, WHOLE)
        parts = (self.batch,) if whole else split_batch(self.batch, *self.shares)
        step: Callable[..., object] = self.optimizer.step
        step(*(partial(self.backward, part) for part in parts))

    def milliseconds(self, steps: int) -> float:
        """The mean time of a step, out of `steps` in a row."""
        start = time.perf_counter()
        for _ in range(steps):
            self.take()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start) / steps


def compile_(model: nn.Module) -> nn.Module:
    """Compiles the blocks that a model repeats, one for all of them; else the model as a whole."""
    repeated = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for block in (block for blocks in repeated for block in blocks):
        block.compile(dynamic=False)  # the shapes are those of the whole batch and of a half
    return model if repeated else torch.compile(model, dynamic=False)  # type: ignore[return-value]


def peak_megabytes(name: str, method: str, kind: str, graphs: bool, compiled: bool) -> float:
    """The peak of memory while one method trains alone.

    Of captured steps it is what torch has reserved: memory of tensors that are freed on one stream
    of a graph is not used again on the other.
    """
    device = torch.device(kind)
    if device.type == "cuda":
        gc.collect()  # what was measured before is not to count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    Run(works(device)[name], method, device, graphs=graphs, compiled=compiled).milliseconds(2)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved if graphs else torch.cuda.max_memory_allocated
        return peak() / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def measure(
    name: str,
    device: torch.device,
    rounds: int,
    *,
    methods: list[str],
    graphs: bool,
    compiled: bool,
) -> None:
    """Prints one table. The methods take turns, so that all see the same state of the machine."""
    work = works(device)[name]
    how = (", compiled" if compiled else "") + (", captured as CUDA graphs" if graphs else "")
    print(f"\n{work.title}{how}", flush=True)
    peaks = {}
    for method in methods:
        if device.type == "cuda":
            peaks[method] = peak_megabytes(name, method, device.type, graphs, compiled)
        else:  # a process of its own, so that its peak of memory is its own
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                alone = (name, method, device.type, graphs, compiled)
                peaks[method] = pool.apply(peak_megabytes, alone)
    runs = {
        method: Run(work, method, device, graphs=graphs, compiled=compiled) for method in methods
    }
    for run in runs.values():
        run.milliseconds(2)  # warms up
    times: dict[str, list[float]] = {method: [] for method in methods}
    gc.collect()
    gc.disable()  # the garbage of one method is not to be collected in the time of another
    for _ in range(rounds):
        for method, run in runs.items():
            times[method].append(run.milliseconds(work.steps))
    gc.enable()
    plain = statistics.median(times["plain"])
    for method, measured in times.items():
        middle = statistics.median(measured)
        spread = (max(measured) - min(measured)) / 2
        print(
            f"  {method:<24}{middle:>9.2f} ms +-{spread:>6.2f}{middle / plain:>8.3f}x"
            f"{peaks[method]:>9.0f} MB",
            flush=True,
        )


def main() -> None:
    """Prints one table per model."""
    parser = argparse.ArgumentParser(description="Times training steps against the plain one.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--work",
        nargs="+",
        default=["resnet20", "resnet50", "resnet50-64", "bert"],
        help="on CUDA also resnet20-1024, resnet50-256, bert-32; anywhere decoder",
    )
    usual = [name for name, method in METHODS.items() if method.concurrent_passes is None]
    parser.add_argument("--methods", nargs="+", default=usual, choices=list(METHODS))
    parser.add_argument("--graphs", action="store_true", help="capture steps as CUDA graphs")
    parser.add_argument("--compile", action="store_true", help="compile the model")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if arguments.graphs and device.type != "cuda":
        parser.error("--graphs needs --device cuda")
    methods = ["plain", *(method for method in arguments.methods if method != "plain")]
    print(machine(device), flush=True)
    for name in arguments.work:
        measure(
            name,
            device,
            arguments.rounds,
            methods=methods,
            graphs=arguments.graphs,
            compiled=arguments.compile,
        )


if __name__ == "__main__":
    main()
