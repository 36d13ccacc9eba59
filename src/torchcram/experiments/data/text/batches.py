"""Batches of texts that are kept on the device as a whole, padded to a few lengths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchcram.experiments.data.text.datasets import Texts
from torchcram.experiments.ranks import WHOLE, Shard
from torchcram.experiments.seeds import seeded

# lengths that sequences are padded to: few, so that there are few shapes
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, *range(256, 1 << 14, 64))
TEST_TOKENS = 1 << 15  # approximate number of tokens in a test batch


class TextBatches:
    """Batches of sequences of similar length, put together on the device.

    Sequences are grouped by their length, rounded up to one of `LENGTHS`; those that do not fill a
    batch join the next longer group, so that an epoch has as many batches as without groups. The
    order depends on the seed and the epoch only.

    If `Texts.parts` is more than 1, an epoch here is a part of an epoch: with four parts, epoch 5
    is the second quarter of epoch 1. All parts have the same number of batches; a few batches may
    be left out.

    Training batches can be read in CUDA graphs, see `CapturableBatches`: a graph per length.
    """

    has_one_shape = False

    def __init__(
        self,
        texts: Texts,
        *,
        batch_size: int,
        device: torch.device | str,
        seed: int,
        train: bool,
        shard: Shard = WHOLE,
    ) -> None:
        """Copies the tokens to the device.

        Args:
            texts: Sequences of one split.
            batch_size: Number of sequences in a training batch; fewer sequences are one batch.
            device: Device that the tokens are kept on and batches are made on.
            seed: Seed of the order.
            train: Whether the order is random, and the last few sequences are left out if they do
                not fill a batch; otherwise all come, short ones first, in batches of a size that
                suits their length.
            shard: Rows of every training batch, or whole test batches, that this rank takes.
        """
        count = len(texts)
        if batch_size < 1 or not count:
            raise ValueError(
                f"batch size {batch_size} of {count} sequences: both must be at least 1"
            )
        self.texts, self.train = texts, train
        self.batch_size = min(batch_size, count)
        self._seed, self._shard = seed, shard
        self._lengths = texts.lengths
        self._rounded = rounded(self._lengths)
        if train:
            shard.within(self.batch_size)  # raises an error if it cannot be divided
        parts = texts.parts if train else 1
        if count // self.batch_size < parts:
            raise ValueError(f"{count // self.batch_size} batches do not make {parts} parts")
        self._parts = parts
        self._tokens, self._kinds = texts.tokens.to(device), texts.kinds.to(device)
        self._starts = (texts.ends - self._lengths).to(device)
        self._counts, self._labels = self._lengths.to(device), texts.labels.to(device)
        self._places: list[Tensor] = []
        self.lengths: list[int] = []  # padded lengths of the batches of the epoch
        self._next = 0  # number of the next batch
        self.start_epoch(0)
        # where every graph reads which sequences are in its batch
        self._staged = torch.empty_like(self._places[0]) if train else torch.empty(0)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self.lengths)

    def start_epoch(self, epoch: int) -> None:
        """Draws the order of an epoch and copies it to the device."""
        device = self._tokens.device
        self._next = 0
        if self.train:
            epoch, section = divmod(epoch, self._parts)
            batches = self._drawn(seeded(self._seed, epoch))
            count = len(batches) // self._parts
            batches = batches[section * count : (section + 1) * count]
        elif self._places:
            return  # test batches are always the same
        else:
            batches = self._in_order()
        self.lengths = [int(self._rounded[places].max()) for places in batches]
        if self.train:
            kept = self._shard.within(self.batch_size)
            self._places = list(torch.stack(batches)[:, kept].to(device))
        else:
            self._places = [places.to(device) for places in batches]

    def of_every_length(self) -> dict[int, Tensor]:
        """Returns indices of a training batch of every padded length that occurs."""
        device, kept = self._tokens.device, self._shard.within(self.batch_size)
        batches = self._drawn(seeded(self._seed, 0))
        return {int(self._rounded[batch].max()): batch[kept].to(device) for batch in batches}

    def places(self, number: int) -> Tensor:
        """Returns the indices of the sequences of a batch, on the device."""
        return self._places[number]

    def stage_each_shape(self) -> Iterator[int]:
        """Stages a training batch of every length in turn, the longest first; yields the length."""
        for length, places in sorted(self.of_every_length().items(), reverse=True):
            self._staged.copy_(places)
            yield length

    def stage_next(self) -> int:
        """Stages the next training batch; returns its length."""
        self._staged.copy_(self._places[self._next])
        self._next += 1
        return self.lengths[self._next - 1]

    def staged_batch(self, key: int) -> tuple[Tensor, Tensor]:
        """Returns the staged batch, padded to the length `key`; runs on the device alone."""
        return self.at(self._staged, key)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns (b, 2, t) tokens and their kinds as int32, 0 at padding, and the labels.

        Args:
            number: Number of the batch in the epoch, from 0.
        """
        return self.at(self._places[number], self.lengths[number])

    def at(self, places: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns a batch of the sequences at the indices `places`; runs on the device alone.

        Args:
            places: Indices of sequences, int64, (b,), on the device.
            length: Length that all are padded to; none may be longer.
        """
        steps = torch.arange(length, device=places.device)
        present = steps < self._counts[places].unsqueeze(1)  # (b, t)
        read = (self._starts[places].unsqueeze(1) + steps).clamp_(max=len(self._tokens) - 1)
        tokens, kinds = self._tokens[read], self._kinds[read].int()
        inputs = torch.stack((tokens, kinds), dim=1) * present.unsqueeze(1)
        return inputs, self._labels[places]

    def epoch(self, epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of an epoch."""
        self.start_epoch(epoch)
        for number in range(len(self)):
            yield self.batch(number)

    @property
    def padding(self) -> float:
        """Fraction of the tokens of the epoch that is padding."""
        real = sum(int(self._counts[places].sum()) for places in self._places)
        return 1 - real / sum(
            len(places) * length for places, length in zip(self._places, self.lengths, strict=True)
        )

    def _drawn(self, generator: torch.Generator) -> list[Tensor]:
        """Returns the indices of every batch, batches and sequences in random order."""
        order = torch.randperm(len(self._lengths), generator=generator)
        batches: list[Tensor] = []
        left = order[:0]
        for length in self._rounded.unique(sorted=True):
            alike = torch.cat((left, order[self._rounded[order] == length]))
            whole = len(alike) // self.batch_size * self.batch_size
            batches += alike[:whole].split(self.batch_size) if whole else ()
            left = alike[whole:]
        return [batches[index] for index in torch.randperm(len(batches), generator=generator)]

    def _in_order(self) -> list[Tensor]:
        order = self._lengths.argsort(stable=True)
        batches: list[Tensor] = []
        for length in self._rounded.unique(sorted=True):
            alike = order[self._rounded[order] == length]
            batches += alike.split(max(1, TEST_TOKENS // int(length)))
        return [batches[number] for number in self._shard.among(len(batches))]


def rounded(lengths: Tensor) -> Tensor:
    """Returns lengths rounded up to one of `LENGTHS`, but not beyond the greatest length."""
    steps = torch.tensor(LENGTHS)
    index = torch.searchsorted(steps, lengths).clamp_(max=len(steps) - 1)
    return torch.maximum(steps[index], lengths).clamp_(max=int(lengths.max()))


def padding(texts: Texts, batch_size: int) -> float:
    """Returns the fraction of the tokens in training batches that is padding."""
    return TextBatches(texts, batch_size=batch_size, device="cpu", seed=0, train=True).padding
