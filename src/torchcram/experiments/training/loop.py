"""The epochs of a training, one at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from torchcram import compress
from torchcram.experiments.evaluation.evaluate import score, tune_
from torchcram.experiments.training.build import build_batches, target_weights, trained_weights
from torchcram.experiments.training.data_parallel import (
    average_statistics_,
    data_parallel,
    seed_epoch,
    take_statistics_,
)
from torchcram.experiments.training.log import EpochRecord, MaskChange
from torchcram.experiments.training.schedule import lr_at, set_lr_

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.tasks.score import Score
    from torchcram.experiments.training.run import Run
    from torchcram.experiments.training.steps import MakeStep

Progress = Callable[[float, int, "EpochRecord | None"], None]
"""Called with the epochs done, fractions too, all epochs, and the record of the one just done."""

OFTEN = 0.2  # seconds, at least, between two calls within an epoch


class Loop:
    """Takes the epochs of a run.

    Args:
        run: with the state to continue from.
        data: to train and test on.
        make_step: how steps are taken.
        progress: told of every epoch, and now and then in between.
    """

    def __init__(
        self,
        run: Run,
        data: AnyData,
        make_step: MakeStep,
        progress: Progress | None,
    ) -> None:
        recipe, model, device, ranks = run.recipe, run.model, run.device, run.ranks
        self._recipe, self._model, self._device, self._ranks = recipe, model, device, ranks
        self._optimizer, self._seed, self._data = run.optimizer, run.info.seed, data
        self._batches, self._test = (
            build_batches(recipe, data, train=train, device=device, seed=run.info.seed, ranks=ranks)
            for train in (True, False)
        )
        batch_size = min(recipe.train.batch_size, len(data.train))
        self._images, self._share = len(self._batches) * batch_size, ranks.shard.share(batch_size)
        called = data_parallel(model, device, ranks, batch_size=batch_size)
        self._step = make_step(called, run.optimizer, self._batches, recipe.train, device)
        operators = recipe.cram.operators if recipe.cram is not None else ()
        self._change = MaskChange(trained_weights(recipe, model), operators)
        self._progress = progress or (lambda *_: None)
        self._told = -math.inf  # when progress was called last

    def run(self, epoch: int, *, test: bool) -> EpochRecord:
        """Trains for one epoch.

        Args:
            epoch: which, from 0.
            test: whether to measure the accuracy after it.

        Raises:
            FloatingPointError: if the loss is not finite.
        """
        recipe, begin = self._recipe, time.perf_counter()
        lr = self._train(epoch)
        loss, compressed_loss = self._losses()
        trained = time.perf_counter()
        if not math.isfinite(loss) or not math.isfinite(compressed_loss or 0):
            raise FloatingPointError(
                f"epoch {epoch + 1}: the training loss is {loss} at w, {compressed_loss} at w~; "
                "a smaller learning rate or rho may help"
            )
        average_statistics_(self._model, self._ranks)
        found = self.score() if test else None
        return EpochRecord(
            epoch=epoch + 1,
            loss=loss,
            compressed_loss=compressed_loss,
            accuracy=None if found is None else found.value,
            lr=lr,
            mask_change=self._change.update(),
            images_per_second=self._images / (trained - begin),
            seconds=time.perf_counter() - begin,
            processes=self._ranks.world_size,
            metric=recipe.metric,
            unit="images" if recipe.text is None else "sequences",
            compressed_accuracy=self._compressed() if test else None,
            others=None if found is None else found.others,
        )

    def score(self, model: nn.Module | None = None) -> Score:
        """Returns what the model as it is, or another one, comes to on the test split."""
        return score(
            self._model if model is None else model,
            self._data,
            self._test,
            device=self._device,
            precision=self._recipe.train.precision,
            ranks=self._ranks,
        )

    def _compressed(self) -> float | None:
        """Returns the same of the model compressed by the operator that the recipe watches."""
        recipe, device = self._recipe, self._device
        if recipe.compress.watch is None:
            return None
        weights = target_weights(recipe, self._model)
        small = compress(self._model, recipe.compress.watch, weights=weights)
        tune_(small, recipe, self._data, device=device, seed=self._seed)
        take_statistics_(small, self._ranks)
        return self.score(small).value

    def tell(self, done: float, record: EpochRecord | None = None) -> None:
        """Tells of the progress; within an epoch only now and then."""
        now = time.perf_counter()
        if record is not None or done == 0 or now - self._told >= OFTEN:
            self._progress(done, self._recipe.train.epochs, record)
            self._told = now

    def _losses(self) -> tuple[float, float | None]:
        """Waits for the device; returns the mean losses over all processes."""
        at_w, at_compressed = self._step.losses()
        shares = [self._share * loss for loss in (at_w, at_compressed) if loss is not None]
        at_w, *others = self._ranks.all_reduce_sum(*shares)
        return at_w, others[0] if others else None

    def _train(self, epoch: int) -> float:
        """Takes the steps of an epoch; returns the last learning rate."""
        recipe, steps, lr = self._recipe, len(self._batches), 0.0
        self._model.train()
        seed_epoch(self._ranks, self._seed, epoch)
        self._step.start_epoch(epoch)
        for number in range(steps):
            lr = lr_at(
                epoch * steps + number,
                steps,
                recipe.schedule,
                lr=recipe.optimizer.lr,
                epochs=recipe.train.epochs,
            )
            set_lr_(self._optimizer, lr)
            self._step.run()
            self.tell(epoch + (number + 1) / steps)
        return lr
