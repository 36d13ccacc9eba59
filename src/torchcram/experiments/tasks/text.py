"""Base class of the tasks about single texts, which come in padded batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.func import functional_call
from torch.nn.functional import pad

from torchcram.experiments.data.config import TextConfig
from torchcram.experiments.data.text.batches import TextBatches, padding
from torchcram.experiments.data.text.datasets import CONTEXT
from torchcram.experiments.data.text.formats import TEXT_FORMATS
from torchcram.experiments.data.text.loading import load_text
from torchcram.experiments.io.cache import Report
from torchcram.experiments.models.text import build_text_model
from torchcram.experiments.tasks.base import FinetuneDefaults, Score, autocast
from torchcram.experiments.tasks.tokenized import TokenizedTask
from torchcram.messages import reason_of
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.data.text.datasets import Texts, TextSet
    from torchcram.experiments.data.text.formats import TextFormat

FINETUNE_LR = 5e-5
CLOSE = 1e-3  # scores in float32 differ by less if only the padding differs


@dataclass(frozen=True)
class TextTask(TokenizedTask):
    """A task about single texts: sentences, or questions and paragraphs.

    Attributes:
        text: Section `text` of the recipe.
    """

    text: TextConfig

    unit: ClassVar[str] = "sequences"
    batch_type: ClassVar[type[TextBatches]] = TextBatches

    @property
    def metric(self) -> str:
        """Name of the metric that counts, which the format of the dataset defines."""
        return TEXT_FORMATS[self.text.task].metric

    def read(self, folder: Path, *, tokenizer: Callable[[], Any], report: Report | None) -> TextSet:
        """Reads the texts, cut into sequences."""
        return load_text(
            self.data.name,
            folder,
            task=self.text.task,
            length=self.text.length,
            stride=self.text.stride,
            tokenizer=tokenizer,
            report=report,
        )

    def notes(self, data: TextSet, batch_size: int) -> list[str]:
        """Returns how much of the training batches is padding."""
        share = padding(data.train, batch_size)
        return [f"{data.name}: {100 * share:.1f} % of the tokens in training batches is padding"]

    def build_model(self, *, classes: int, pretrained: bool) -> nn.Module:  # noqa: ARG002
        """Returns a model of Transformers with a head for the task."""
        return build_text_model(self.model.name, self.text.task, pretrained=pretrained)

    def check_model(self, model: nn.Module, data: TextSet, *, device: torch.device) -> None:  # noqa: ARG002
        """Raises ValueError if the model cannot take the texts, or not in padded batches."""
        check_text_model(model, self.model.name, data)

    def finetuning(self, epochs: int, lr: float) -> FinetuneDefaults:  # noqa: ARG002
        """Returns how to fine-tune: at most two epochs with early stopping, as the paper does."""
        return super().finetuning(epochs, FINETUNE_LR)

    def count_test(self, data: TextSet) -> str:
        """Returns the number of questions or sentences in the test split, in words."""
        return f"{data.test.count} test {data.format.unit}"

    def example(self, data: TextSet, size: int) -> Tensor:
        """Returns test sequences of medium length, padded to the longest of them."""
        self.require_size(data, size)
        lengths = data.test.lengths
        order = lengths.argsort(stable=True)
        begin = (len(order) - size) // 2
        chosen = order[begin : begin + size]
        batches = TextBatches(data.test, batch_size=size, device="cpu", seed=0, train=False)
        return batches.at(chosen, int(lengths[chosen].max()))[0]

    def describe_inputs(self, data: Any) -> dict[str, Any]:  # noqa: ANN401
        """Returns the form of tokens; the tokenizer is that of the model."""
        return {
            "inputs": "int32, (batch, 2, tokens): token numbers, and (1 + token type) * attention "
            f"mask; in question answering, plus {CONTEXT} where a token may be part of an answer",
            "length": self.text.length,
            "classes": list(data.classes),
        }

    def dynamic_dims(self) -> list[dict[int, Any]]:
        """Returns the number of tokens as a dimension that varies."""
        return [{2: torch.export.Dim("tokens", max=self.text.length)}]


def outputs_of(
    model: nn.Module, batches: TextBatches, device: torch.device, precision: str
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields the indices of the sequences of each batch, their inputs and the model's outputs."""
    batches.start_epoch(0)
    for number in range(len(batches)):
        inputs, _ = batches.batch(number)
        with autocast(device, precision):
            scores = model(inputs)
        yield batches.places(number), inputs, scores


def named_score(values: dict[str, float], kind: TextFormat) -> Score:
    """Returns metrics as the score of a format; a negative correlation counts as 0."""
    others = {name: values[name] for name in kind.others}
    value = values[kind.metric]
    if value < 0:  # worse than chance is as bad as chance
        others[kind.metric], value = value, 0.0
    return Score(value, kind.metric, others or None)


@torch.no_grad()
def check_text_model(model: nn.Module, name: str, data: TextSet) -> None:
    """Raises ValueError if a model cannot take texts, or cannot take them in padded batches.

    The model is run on two of the texts, always on the CPU: on a GPU a token without an embedding
    would end the process. Its mode and the global random state stay as they are.

    Args:
        model: Model that is called with tokens and their kinds, (n, 2, t).
        name: Name of the model for error messages.
        data: Dataset with the texts.
    """
    longest = max(int(split.lengths.max()) for split in (data.train, data.test))
    highest = max(int(split.tokens.max()) for split in (data.train, data.test))
    config = getattr(getattr(model, "model", None), "config", None)
    for key, needed in (("max_position_embeddings", longest), ("vocab_size", highest + 1)):
        known = getattr(config, key, None)
        if known is not None and 0 <= known < needed:  # -1 is no limit, as in XLNet
            raise ValueError(
                f"model {name!r} does not take the texts of {data.name!r}: its {key} "
                f"is {known}, at least {needed} is needed"
            )
    alone, batch = _short_and_long(data)
    try:
        expected, scores = _scores(model, alone, batch)
    except Exception as error:  # the code of a model may raise anything
        raise ValueError(
            f"model {name!r} does not take the texts of {data.name!r}, of up to {longest} tokens: "
            f"{reason_of(error)}"
        ) from error
    shape = (2, longest, 2) if data.format.sentences is None else (2, len(data.classes))
    if tuple(scores.shape) != shape:
        raise ValueError(
            f"model {name!r} has no head for {data.kind}: its scores are of shape "
            f"{tuple(scores.shape)}, but {shape} is needed"
        )
    padded = scores[:1] if data.format.sentences is not None else scores[:1, : alone.shape[-1]]
    if not torch.allclose(padded, expected, rtol=0, atol=CLOSE, equal_nan=True):
        apart = float((padded - expected).abs().max())
        raise ValueError(
            f"model {name!r} does not take the texts of {data.name!r} in batches: its scores "
            f"depend on padding, they differ by {apart:.2g}; at most {CLOSE:g} is allowed"
        )


def _short_and_long(data: TextSet) -> tuple[Tensor, Tensor]:
    """Returns the shortest text alone, and padded in a batch with the longest."""
    splits = (data.train, data.test)
    short = min(splits, key=lambda split: int(split.lengths.min()))
    long = max(splits, key=lambda split: int(split.lengths.max()))
    alone = _batch_of_one(short, int(short.lengths.argmin()))
    other = _batch_of_one(long, int(long.lengths.argmax()))
    padded = pad(alone, (0, other.shape[-1] - alone.shape[-1]))
    return alone, torch.cat((padded, other))


def _batch_of_one(texts: Texts, index: int) -> Tensor:
    """Returns one text as a batch, (1, 2, t)."""
    end = int(texts.ends[index])
    part = slice(end - int(texts.lengths[index]), end)
    return torch.stack((texts.tokens[part], texts.kinds[part].int())).unsqueeze(0)


def _scores(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Returns the scores of a model in eval mode, with copies of its weights on the CPU."""
    named = chain(model.named_parameters(), model.named_buffers())
    here = {name: value.cpu() for name, value in named}
    with eval_mode(model), torch.random.fork_rng(devices=[]):
        return [functional_call(model, here, (batch,)) for batch in inputs]
