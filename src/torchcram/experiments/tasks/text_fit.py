"""Whether a language model goes with the texts that it is to be trained on."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch.func import functional_call
from torch.nn.functional import pad

from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.data.text.datasets import Texts, TextSet

CLOSE = 1e-3  # scores in float32 differ by less where only the padding does


@torch.no_grad()
def require_fit_of_texts(model: nn.Module, name: str, data: TextSet) -> None:
    """Raises ValueError if a model cannot take texts, or cannot take them in padded batches.

    It is run on two of the texts, on the CPU wherever it is: on a GPU an embedding that is not
    there would end the process. Its mode and the random numbers stay as they were.

    Args:
        model: that is called with (n, 2, t) tokens and kinds.
        name: of it, for messages.
        data: the texts.
    """
    longest = max(int(split.lengths.max()) for split in (data.train, data.test))
    highest = max(int(split.tokens.max()) for split in (data.train, data.test))
    config = getattr(getattr(model, "model", None), "config", None)
    for key, needed in (("max_position_embeddings", longest), ("vocab_size", highest + 1)):
        known = getattr(config, key, None)
        if known is not None and 0 <= known < needed:  # XLNet says -1, there is no limit
            raise ValueError(
                f"model {name!r} does not take the texts of {data.name!r}: its {key} "
                f"is {known}, needed is {needed}"
            )
    alone, batch = _short_and_long(data)
    try:
        expected, scores = _scores(model, alone, batch)
    except Exception as error:  # whatever the code of a model raises
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(
            f"model {name!r} does not take the texts of {data.name!r}, of up to {longest} tokens: "
            f"{said}"
        ) from error
    wanted = (2, longest, 2) if data.task.sentences is None else (2, len(data.classes))
    if tuple(scores.shape) != wanted:
        raise ValueError(
            f"model {name!r} has no head for {data.kind}: its scores are of shape "
            f"{tuple(scores.shape)}, needed is {wanted}"
        )
    padded = scores[:1] if data.task.sentences is not None else scores[:1, : alone.shape[-1]]
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
    alone = _one(short, int(short.lengths.argmin()))
    other = _one(long, int(long.lengths.argmax()))
    padded = pad(alone, (0, other.shape[-1] - alone.shape[-1]))
    return alone, torch.cat((padded, other))


def _one(texts: Texts, place: int) -> Tensor:
    """Returns one text as a batch, (1, 2, t)."""
    end = int(texts.ends[place])
    part = slice(end - int(texts.lengths[place]), end)
    return torch.stack((texts.tokens[part], texts.kinds[part].int())).unsqueeze(0)


def _scores(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Returns the scores of a model in eval mode, with copies of its weights on the CPU."""
    named = chain(model.named_parameters(), model.named_buffers())
    here = {name: value.cpu() for name, value in named}
    with eval_mode(model), torch.random.fork_rng(devices=[]):
        return [functional_call(model, here, (one,)) for one in inputs]
