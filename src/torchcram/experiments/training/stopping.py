"""Training that ends once it does not get better on a part of the training set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.data.text.datasets import TextSet
from torchcram.experiments.evaluation.evaluate import score_on_test
from torchcram.experiments.training.log import LOG, read_log
from torchcram.experiments.training.loop import Loop, Progress
from torchcram.experiments.training.run import Run
from torchcram.experiments.training.run_folder import (
    MODEL,
    Finished,
    load_model_,
    save_model,
    write_info,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.training.steps import MakeStep

BEST = "best-{:04d}.safetensors"  # the model after so many rounds


class StoppingRun(Run):
    """A training in rounds, parts of an epoch with a test after each, that keeps the best model.

    The log has a record per round, with the metric on what is held out; `run.json` has that of the
    best model on the test split. Which round was best, and whether it is over, the log says: an
    interrupted training continues as if it had not been.
    """

    def finish_early(self, data: AnyData, make_step: MakeStep, progress: Progress | None) -> None:
        """Runs what is left of the rounds; leaves the best model and what it came to.

        Args:
            data: to train and test on; texts.
            make_step: how steps are taken.
            progress: told of every round.

        Raises:
            ValueError: for images, and if the log does not reach as far as the checkpoint.
        """
        stop = self.recipe.train.early_stopping
        if stop is None or not isinstance(data, TextSet):
            raise ValueError(
                f"{self.recipe.name}: train.early_stopping is for texts; allowed for images: null"
            )
        held = data.hold_out(stop.held_out)
        batches = max(1, len(held.train) // self.recipe.train.batch_size)
        recipe = _in_rounds(self.recipe, min(stop.tests, batches))
        held = held.in_parts(min(stop.tests, batches))
        rounds = recipe.train.epochs
        loop = Loop(replace(self, recipe=recipe), held, make_step, progress)
        values = self.ranks.broadcast_from_rank0(lambda: held_out_values(self.folder, self.done))
        loop.tell(self.done)
        with self._log() as log:
            while self.done < rounds and self.done - _best(values) < stop.patience:
                record = loop.run(self.done, test=True)
                assert record.accuracy is not None  # noqa: S101
                if log is not None:
                    log.write(record)
                values.append(record.accuracy)
                self.done, self.seconds = record.epoch, self.seconds + record.seconds
                if self.ranks.is_first and _best(values) == self.done:
                    save_model(self.model, self.folder / BEST.format(self.done))
                self._save_after(log)
                if self.ranks.is_first:
                    # the one of the checkpoint before this stays: that may have to be gone back to
                    _remove_all_but(self.folder, {_best(values), _best(values[:-1])})
                loop.tell(record.epoch, record)
        self._leave(_best(values), data)

    def _leave(self, best: int, data: AnyData) -> None:
        path = self.folder / BEST.format(best)
        if self.ranks.is_first:
            load_model_(self.model, path)
        if self.ranks.world_size > 1:  # the others need not see the same disk
            self.model.load_state_dict(self.ranks.broadcast_from_rank0(lambda: _on_cpu(self.model)))
        found = score_on_test(self.model, self.recipe, data, device=self.device)
        if self.ranks.is_first:
            save_model(self.model, self.folder / MODEL)
            finished = Finished(found.value, self.seconds, self.ranks.world_size, found.others)
            write_info(self.folder, replace(self.info, finished=finished))
            _remove_all_but(self.folder, set())


def held_out_values(folder: Path, rounds: int | None = None) -> list[float]:
    """Returns the metric on what is held out, after each of the rounds that a log has.

    Args:
        folder: of the run.
        rounds: how many there must be, later ones not counting; None for all.

    Raises:
        ValueError: if there are fewer.
    """
    found = {record.epoch: record.accuracy for record in read_log(folder)}
    wanted = range(1, (max(found, default=0) if rounds is None else rounds) + 1)
    values = [value for one in wanted if (value := found.get(one)) is not None]
    if len(values) < len(wanted):
        raise ValueError(f"{folder / LOG} does not have the {len(wanted)} rounds that were done")
    return values


def _best(values: list[float]) -> int:
    """Returns after how many rounds it was best, the first of several; 0 before the first."""
    return values.index(max(values)) + 1 if values else 0


def _in_rounds(recipe: Recipe, tests: int) -> Recipe:
    """Returns the recipe with rounds, so many of an epoch, in place of epochs."""
    warmup = recipe.schedule.warmup_epochs
    return replace(
        recipe,
        train=replace(recipe.train, epochs=recipe.train.epochs * tests),
        schedule=replace(recipe.schedule, warmup_epochs=warmup * tests),
    )


def _on_cpu(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def _remove_all_but(folder: Path, kept: set[int]) -> None:
    for path in folder.glob(BEST.format(0).replace("0000", "*")):
        if path.name not in map(BEST.format, kept):
            path.unlink(missing_ok=True)
