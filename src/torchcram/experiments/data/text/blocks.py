"""Blocks of running text to train on and windows to test on, kept on the device as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchcram.experiments.ranks import WHOLE, Shard
from torchcram.experiments.seeds import seeded

IGNORED = -100  # label of a token that does not count, as in torch's cross-entropy
TEST_TOKENS = 1 << 12  # approximate number of tokens in a test batch: each has a score per word


@dataclass(frozen=True, eq=False)
class Blocks:
    """A split to train on: blocks of a fixed length, one after another.

    Attributes:
        tokens: Tokens of the text, int32, (t,).
        length: Number of tokens of a block; each is followed by the token to predict last.
        parts: Number of parts that training batches divide an epoch into, each of which they count
            as an epoch.
    """

    tokens: Tensor
    length: int
    parts: int = 1

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.length

    def spans(self) -> Tensor:
        """Returns where blocks start in the text, and which labels count in each, (n, 3).

        Returns:
            Index of the first token, number of the first label that counts, and number after the
            last.
        """
        starts = torch.arange(len(self)) * self.length
        return torch.stack(
            (starts, torch.zeros_like(starts), torch.full_like(starts, self.length)), dim=1
        )


@dataclass(frozen=True, eq=False)
class Windows:
    """A split to test on: a window of a fixed length that slides over the text.

    Every token but the first of the text is predicted once, in the first window that has it; the
    tokens before it in this window are its context. With a stride of the length, windows do not
    overlap.

    Attributes:
        tokens: Tokens of the text, int32, (t,).
        length: Number of tokens of a window.
        stride: Number of tokens that the window slides by.
    """

    tokens: Tensor
    length: int
    stride: int

    def __len__(self) -> int:
        return 1 + -(-max(0, len(self.tokens) - 1 - self.length) // self.stride)

    def spans(self) -> Tensor:
        """Returns where windows start, and which labels count in each; see `Blocks.spans`."""
        starts = torch.arange(len(self)) * self.stride
        ends = (starts + self.length).clamp(max=len(self.tokens) - 1)
        first = torch.cat((starts[:1], ends[:-1])) - starts
        return torch.stack((starts, first, ends - starts), dim=1)


@dataclass(frozen=True, eq=False)
class TokenSet:
    """A dataset of running text.

    Attributes:
        name: Name of the dataset.
        train: Training split.
        test: Test split.
        contents: Digest of the tokens, block lengths and stride.
        also: Further texts to test on, by name.
        classes: Empty tuple; the outputs are the tokens of the vocabulary.
        mean: Empty tuple; images have a mean per channel.
    """

    name: str
    train: Blocks
    test: Windows
    contents: str
    also: Mapping[str, Windows] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()

    def in_parts(self, parts: int) -> TokenSet:
        """Returns the dataset with training epochs divided into so many parts."""
        return replace(self, train=replace(self.train, parts=parts))

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> TokenSet:
        """Returns the dataset with blocks of its training split in place of all test splits.

        The blocks are a contiguous piece of the text, so that windows can slide over it.

        Args:
            fraction: Fraction of the blocks to test on; at least one is taken, and at least one is
                left.
            seed: Seed of the choice.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction!r}")
        count, length, tokens = len(self.train), self.train.length, self.train.tokens
        if count < 2:
            raise ValueError(f"dataset {self.name!r} is too small to hold a part of it out")
        held = min(max(1, round(fraction * count)), count - 1)
        generator = seeded(seed, "hold out")
        begin = int(torch.randint(count - held + 1, (1,), generator=generator)) * length
        end = begin + held * length
        left = torch.cat((tokens[:begin], tokens[end:]))
        return replace(
            self,
            train=replace(self.train, tokens=left),
            test=replace(self.test, tokens=tokens[begin : end + 1]),
            also={},
        )


class BlockBatches:
    """Batches of blocks or windows, put together on the device.

    Training batches hold blocks in random order, which depends on the seed and the epoch only; the
    last few that do not fill a batch are left out. If `Blocks.parts` is more than 1, an epoch here
    is a part of an epoch, as in `TextBatches`. Test batches hold all windows in their order.

    Training batches can be read in a CUDA graph, see `CapturableBatches`: all have one shape.

    Args:
        split: Blocks to train on, or windows to test on.
        batch_size: Number of blocks in a training batch; fewer blocks are one batch. The size of
            test batches suits the length of the windows.
        device: Device that the tokens are kept on and batches are made on.
        seed: Seed of the order.
        train: Whether the blocks come in random order.
        shard: Rows of every training batch, or whole test batches, that this rank takes.
    """

    has_one_shape = True

    def __init__(
        self,
        split: Blocks | Windows,
        *,
        batch_size: int,
        device: torch.device | str,
        seed: int,
        train: bool,
        shard: Shard = WHOLE,
    ) -> None:
        count = len(split)
        if batch_size < 1 or not count:
            raise ValueError(f"batch size {batch_size} of {count} blocks: both must be at least 1")
        self.train, self._count = train, count
        self.batch_size = min(batch_size, count)
        if not train:
            self.batch_size = max(1, TEST_TOKENS // split.length)
        self._parts = split.parts if train and isinstance(split, Blocks) else 1
        if train and count // self.batch_size < self._parts:
            raise ValueError(f"{count // self.batch_size} batches do not make {self._parts} parts")
        self._seed, self._shard, self._length = seed, shard, split.length
        if train:
            shard.within(self.batch_size)  # raises an error if it cannot be divided
        self._tokens, self._spans = split.tokens.to(device), split.spans().to(device)
        self._places: list[Tensor] = []  # indices of the blocks of every batch of the epoch
        self._next = 0  # number of the next batch
        self.start_epoch(0)
        # where a graph reads which blocks are in its batch
        self._staged = self._places[0].clone() if train else torch.empty(0)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._places)

    def start_epoch(self, epoch: int) -> None:
        """Draws the order of an epoch and copies it to the device."""
        device = self._tokens.device
        self._next = 0
        if self.train:
            epoch, section = divmod(epoch, self._parts)
            order = torch.randperm(self._count, generator=seeded(self._seed, epoch))
            whole = self._count // self.batch_size * self.batch_size
            batches = order[:whole].view(-1, self.batch_size)
            count = len(batches) // self._parts
            batches = batches[section * count : (section + 1) * count]
            self._places = list(batches[:, self._shard.within(self.batch_size)].to(device))
        elif not self._places:  # test batches are always the same
            tested = torch.arange(self._count).split(self.batch_size)
            self._places = [tested[i].to(device) for i in self._shard.among(len(tested))]

    def stage_each_shape(self) -> Iterator[int]:
        """Stages a training batch; there is one shape."""
        self._staged.copy_(self._places[0])
        yield 0

    def stage_next(self) -> int:
        """Stages the next training batch of the epoch."""
        self._staged.copy_(self._places[self._next])
        self._next += 1
        return 0

    def staged_batch(self, key: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Returns the staged batch; runs on the device alone."""
        return self._at(self._staged)

    def epoch(self, epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (b, t) tokens and, as labels, the token after each, int64, on the device.

        Labels that do not count are -100: those that an earlier window has, and those after the
        end of the text, where the tokens are 0.
        """
        self.start_epoch(epoch)
        for places in self._places:
            yield self._at(places)

    def _at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        starts, first, end = self._spans[places].unbind(1)
        steps = torch.arange(self._length, device=places.device)
        read = starts.unsqueeze(1) + steps  # (b, t)
        last = len(self._tokens) - 1
        present = steps < end.unsqueeze(1)
        counts = present & (steps >= first.unsqueeze(1))
        inputs = self._tokens[read.clamp(max=last)].long() * present
        labels = self._tokens[(read + 1).clamp(max=last)].long()
        return inputs, labels.masked_fill(counts.logical_not(), IGNORED)
