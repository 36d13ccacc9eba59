"""Language modelling: the next token of running text, scored by perplexity."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from torchcram.experiments.data.text.blocks import (
    IGNORED,
    BlockBatches,
    Blocks,
    TokenSet,
    Windows,
)
from torchcram.experiments.data.text.running import load_running
from torchcram.experiments.io.cache import Report
from torchcram.experiments.io.dataclass_io import build_section, require
from torchcram.experiments.metrics import PERPLEXITY, perplexity
from torchcram.experiments.models.causal import CausalModel, build_causal_model
from torchcram.experiments.models.text import ALLOWED, is_text_model
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.base import ACCURACY, Score, Task, autocast
from torchcram.experiments.tasks.tokenized import TokenizedTask
from torchcram.messages import reason_of
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import nn

PROBE = 16  # tokens that a model is tried on
CLOSE = 1e-4  # relative difference of scores that rounding may cause


@dataclass(frozen=True)
class LanguageConfig:
    """Section `task.args`: how text is cut into blocks and tested.

    Attributes:
        length: Number of tokens in a training block and in a test window.
        stride: Number of tokens that the test window slides by; None for half its length.
        checkpointing: Whether activations are recomputed in the backward pass to save memory.
        test_tokens: Number of tokens of every test text that are used; None for all.
        also_test: Names of further datasets whose test texts are scored too.
    """

    length: int = 1024
    stride: int | None = None
    checkpointing: bool = False
    test_tokens: int | None = None
    also_test: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(self.length >= 2, "length", self.length, "at least 2")
        stride, tokens = self.stride, self.test_tokens
        fits = stride is None or 1 <= stride <= self.length
        require(fits, "stride", stride, f"from 1 to length, which is {self.length}, or null")
        enough = tokens is None or tokens > self.length
        require(enough, "test_tokens", tokens, f"above length, which is {self.length}, or null")
        distinct = len(set(self.also_test)) == len(self.also_test)
        require(distinct, "also_test", list(self.also_test), "every name once")


@dataclass(frozen=True)
class LanguageModelling(TokenizedTask):
    """Prediction of the next token of running text, scored by perplexity; less is better."""

    unit: ClassVar[str] = "blocks"
    batch_type: ClassVar[type[BlockBatches]] = BlockBatches
    can_generate: ClassVar[bool] = True
    has_pretrained_head: ClassVar[bool] = True
    class_dim: ClassVar[int] = -1
    # blocks of a model are numbered; embeddings and the head are not
    compressed_by_default: ClassVar[str | None] = r"\.\d+\."

    @property
    def config(self) -> LanguageConfig:
        """Settings of the task.

        Raises:
            BadValue: If one of them is not allowed.
        """
        return _config_of(self)

    @property
    def metric(self) -> str:
        """Name of the metric that counts."""
        return PERPLEXITY

    def check_recipe(self) -> None:
        """Raises `BadValue` for settings that are not allowed, and for those of images."""
        config, model = self.config, self.model.name
        super().check_recipe()
        allowed = f"a language model: {', '.join(ALLOWED)}"
        require(is_text_model(model), "model.name", model, allowed)
        own = self.data.name in config.also_test
        require(not own, "task.args.also_test", list(config.also_test), "other datasets")

    def read(
        self, folder: Path, *, tokenizer: Callable[[], Any], report: Report | None
    ) -> TokenSet:
        """Reads the text, as blocks and windows."""
        config = self.config
        running = partial(load_running, folder=folder, tokenizer=tokenizer, report=report)
        text = running(self.data.name)
        also = {name: running(name, train=False) for name in config.also_test}
        digest = hashlib.sha256(text.contents.encode())
        for name, other in also.items():
            digest.update(f"{name} {other.contents}".encode())
        return TokenSet(
            self.data.name,
            Blocks(_enough(text.train, config, f"{self.data.name}: train"), config.length),
            self._windows(text.test, self.data.name),
            digest.hexdigest()[:16],
            {name: self._windows(other.test, name) for name, other in also.items()},
        )

    def _windows(self, tokens: Tensor, name: str) -> Windows:
        config = self.config
        kept = tokens[: config.test_tokens]
        stride = config.stride or max(1, config.length // 2)
        return Windows(_enough(kept, config, f"{name}: test"), config.length, stride)

    def notes(self, data: TokenSet, batch_size: int) -> list[str]:  # noqa: ARG002
        """Returns the numbers of tokens in training and test."""
        train, test = len(data.train) * data.train.length, len(data.test.tokens)
        blocks, windows = len(data.train), len(data.test)
        trained = f"{train:,} training tokens in {blocks:,} blocks"
        return [f"{data.name}: {trained}, {test:,} test tokens in {windows:,} windows"]

    def build_model(self, *, classes: int, pretrained: bool) -> nn.Module:  # noqa: ARG002
        """Returns a model of Transformers with its own head."""
        return build_causal_model(
            self.model.name, pretrained=pretrained, checkpointing=self.config.checkpointing
        )

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Returns the mean cross-entropy of the tokens that count."""
        return F.cross_entropy(
            outputs.flatten(0, 1), labels.flatten(), label_smoothing=smoothing, ignore_index=IGNORED
        )

    def count_targets(self, labels: Tensor) -> Tensor:
        """Returns the number of tokens that count."""
        return (labels != IGNORED).sum()

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        data: TokenSet,
        batches: BlockBatches,
        *,
        device: torch.device,
        precision: str = "fp32",
        ranks: Ranks = SINGLE,
    ) -> Score:
        """Returns the perplexity, with the accuracy per token and further texts beside it."""
        measured = partial(score_windows, model, device=device, precision=precision, ranks=ranks)
        value, accuracy = measured(batches)
        others = {ACCURACY: accuracy}
        for name, windows in data.also.items():
            further = BlockBatches(
                windows, batch_size=1, device=device, seed=0, train=False, shard=ranks.shard
            )
            others[f"{name} {PERPLEXITY}"], _ = measured(further)
        return Score(value, PERPLEXITY, others)

    def check_model(self, model: nn.Module, data: TokenSet, *, device: torch.device) -> None:
        """Raises ValueError if the model cannot take the text, or sees the tokens to predict."""
        check_causal_model(model, self.model.name, data, device)

    def require_same_data(self, tasks: Sequence[Task]) -> None:
        """Raises ValueError if text would have to be tokenised or cut in more than one way."""
        super().require_same_data(tasks)
        for key in fields(LanguageConfig):
            values = {str(getattr(_config_of(task), key.name)) for task in tasks}
            if len(values) > 1 and key.name != "checkpointing":
                raise ValueError(
                    f"task.args.{key.name} is the same for all trainings on one dataset, got "
                    f"{', '.join(sorted(values))}"
                )

    def count_test(self, data: TokenSet) -> str:
        """Returns the number of test tokens in words."""
        return f"{len(data.test.tokens):,} test tokens"

    def example(self, data: TokenSet, size: int) -> Tensor:
        """Returns the first test windows."""
        self.require_size(data, size)
        windows = BlockBatches(data.test, batch_size=1, device="cpu", seed=0, train=False)
        rows: list[Tensor] = []
        for inputs, _ in windows.epoch():
            rows += inputs
            if len(rows) >= size:
                break
        return torch.stack(rows[:size])

    def prompt(self, data: TokenSet, tokens: int) -> Tensor:
        """Returns the first tokens of the test text as a prompt, (1, tokens), on the CPU."""
        text = data.test.tokens
        if not 1 <= tokens <= len(text):
            raise ValueError(
                f"a prompt of {tokens} tokens: {data.name!r} has 1 to {len(text)} test tokens"
            )
        return text[:tokens].long().unsqueeze(0).cpu()

    def shorten_test(self, data: TokenSet, tokens: int) -> tuple[TokenSet, int]:
        """Returns the dataset with the first tokens of its test text alone, and their number."""
        kept = data.test.tokens[:tokens]
        return replace(data, test=replace(data.test, tokens=kept), also={}), len(kept)

    def describe_inputs(self, data: Any) -> dict[str, Any]:  # noqa: ANN401, ARG002
        """Returns the form of tokens; the tokenizer is that of the model."""
        return {"inputs": "integers, (batch, tokens): token numbers", "length": self.config.length}

    def dynamic_dims(self) -> list[dict[int, Any]]:
        """Returns the number of tokens as a dimension that varies."""
        return [{1: torch.export.Dim("tokens", max=self.config.length)}]


def _config_of(task: Task) -> LanguageConfig:
    return build_section(LanguageConfig, task.args, "task.args")


def _enough(tokens: Tensor, config: LanguageConfig, what: str) -> Tensor:
    """Returns tokens.

    Raises:
        ValueError: If they do not make a block.
    """
    if len(tokens) <= config.length:
        raise ValueError(
            f"{what} has {len(tokens)} tokens, too few for a block: task.args.length is "
            f"{config.length}, so at least {config.length + 1} are needed"
        )
    return tokens


def score_windows(
    model: nn.Module,
    batches: BlockBatches,
    *,
    device: torch.device,
    precision: str = "fp32",
    ranks: Ranks = SINGLE,
) -> tuple[float, float]:
    """Returns the perplexity over all labels that count, and how many of them are predicted best.

    Args:
        model: Model on `device`; it is in eval mode meanwhile.
        batches: Test batches of this rank.
        device: Device of the model.
        precision: "fp32", or "bf16" for autocast on a GPU.
        ranks: Processes that share the test.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right ones, all
    with eval_mode(model), torch.no_grad():
        for inputs, labels in batches.epoch(0):
            with autocast(device, precision):
                scores = model(inputs)
            flat, expected = scores.flatten(0, 1).float(), labels.flatten()
            sums[0] += F.cross_entropy(flat, expected, ignore_index=IGNORED, reduction="sum")
            sums[1] += (flat.argmax(1) == expected).sum()
            sums[2] += (expected != IGNORED).sum()
    loss, right, count = ranks.all_reduce_sum(*sums.tolist())
    return perplexity(loss / count), right / count


@torch.no_grad()
def check_causal_model(model: nn.Module, name: str, data: TokenSet, device: torch.device) -> None:
    """Raises ValueError if a model cannot take a text, or sees the tokens that it predicts.

    Args:
        model: Model on `device`; it stays unchanged.
        name: Name of the model for error messages.
        data: Dataset with the text.
        device: Device of the model.
    """
    texts = {f"{data.name}: train": data.train.tokens, f"{data.name}: test": data.test.tokens}
    texts |= {f"{other}: test": windows.tokens for other, windows in data.also.items()}
    if isinstance(model, CausalModel):
        known = model.vocabulary
        for what, tokens in texts.items():
            if (highest := int(tokens.max())) >= known:  # on a GPU it would end the process
                raise ValueError(
                    f"model {name!r} does not fit its tokenizer: {what} has the token {highest}, "
                    f"and the model has embeddings for {known}"
                )
        positions = model.positions
        if positions is not None and positions < data.train.length:
            raise ValueError(
                f"model {name!r} does not take blocks of {data.train.length} tokens: its "
                f"max_position_embeddings is {positions}; set task.args.length"
            )
    inputs = data.test.tokens[: min(PROBE, data.test.length)].long().repeat(2, 1).to(device)
    last = int(inputs[0, -1])
    inputs[1, -1] = last - 1 if last else 1
    try:
        with eval_mode(model), torch.random.fork_rng(devices=[]):
            scores = model(inputs).float()
    except Exception as error:  # the code of a model may raise anything
        raise ValueError(
            f"model {name!r} does not take the text of {data.name!r}: {reason_of(error)}"
        ) from error
    before = scores[:, :-1]
    apart = float((before[0] - before[1]).abs().max())
    if apart > CLOSE * float(before.abs().max()):
        raise ValueError(
            f"model {name!r} does not generate: the scores of a token depend on those after it, "
            f"they differ by {apart:.2g}; allowed: causal models, such as Llama or GPT-2"
        )
