"""When a training ends, and which of its models counts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from torchcram.experiments.evaluation.compressed_models import score_on_test
from torchcram.experiments.io.weights import load_model_, save_model, state_on_cpu
from torchcram.experiments.metrics import best_index
from torchcram.experiments.tasks import Score
from torchcram.experiments.training.log import LOG, EpochRecord, read_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn

    from torchcram.experiments.ranks import Ranks
    from torchcram.experiments.recipe.schema import Recipe

BEST = "best-{:04d}.safetensors"  # best model of early stopping, with its round


class Training(Protocol):
    """What a policy needs to know of a training; a `Trainer` has all of it."""

    recipe: Recipe
    data: Any
    folder: Path
    device: torch.device
    ranks: Ranks
    done: int

    @property
    def eval_model(self) -> nn.Module:
        """Model to test and save, on this rank."""

    def whole_model(self) -> AbstractContextManager[nn.Module]:
        """Gives the model to test for a `with` block, that all ranks enter together."""


class StopPolicy:
    """When a training ends and which model counts: after all epochs, and the last one."""

    def __init__(self, eval_interval: int, checkpoint_interval: int) -> None:
        self._eval_interval, self._checkpoint_interval = eval_interval, checkpoint_interval
        self._epochs = 0
        self._last: EpochRecord | None = None

    def begin(self, trainer: Training) -> tuple[Recipe, Any]:
        """Returns the recipe and the dataset of the epochs."""
        self._epochs = trainer.recipe.train.epochs
        return trainer.recipe, trainer.data

    def is_over(self, done: int) -> bool:
        """Whether the training is over after `done` epochs."""
        return done >= self._epochs

    def tests_after(self, epoch: int) -> bool:
        """Whether the model is tested after an epoch, counted from 1."""
        return epoch == self._epochs or epoch % self._eval_interval == 0

    def saves_after(self, epoch: int) -> bool:
        """Whether a checkpoint is written after an epoch, counted from 1."""
        return epoch == self._epochs or epoch % self._checkpoint_interval == 0

    def note(self, record: EpochRecord) -> None:
        """Records an epoch, before its checkpoint is written."""
        self._last = record

    def note_checkpoint(self) -> None:
        """Does what has to follow a checkpoint."""

    def stopped_after(self, done: int) -> float | None:  # noqa: ARG002
        """Returns the number of epochs where it is not that of the recipe, otherwise None."""
        return None

    def finish(self, score: Callable[[], Score]) -> Score:
        """Returns the score of the model, if necessary by calling `score`."""
        last = self._last
        if last is None or last.accuracy is None:  # it was killed after the last checkpoint
            return score()
        return Score(last.accuracy, last.metric, last.others)

    def clean_up(self) -> None:
        """Removes files that only an unfinished training needs."""


class EarlyStopping(StopPolicy):
    """Trains in rounds, parts of an epoch with a test after each; the best model counts.

    The log has one record per round, with the metric on the held-out part of the training split;
    `run.json` has the metric of the best model on the test split. The best round and the end of
    the training follow from the log, so that an interrupted training continues exactly.
    """

    def __init__(self) -> None:
        super().__init__(1, 1)

    def begin(self, trainer: Training) -> tuple[Recipe, Any]:
        """Returns the recipe in rounds instead of epochs, and the dataset with a held-out part."""
        recipe, stop = trainer.recipe, trainer.recipe.train.early_stopping
        if stop is None:
            raise ValueError(f"{recipe.name} has no train.early_stopping")
        task = recipe.build_task()
        try:
            divided = task.hold_out(task.divide_epochs(trainer.data, 1), stop.held_out)
        except ValueError as error:
            raise ValueError(f"{recipe.name}: {error}") from None
        batches = max(1, len(divided.train) // recipe.train.batch_size)
        tests = min(stop.tests, batches)
        in_rounds = _in_rounds(recipe, tests)
        self._trainer, self._patience, self._tests = trainer, stop.patience, tests
        self._epochs = in_rounds.train.epochs
        self._values = trainer.ranks.broadcast_from_rank0(
            lambda: held_out_values(trainer.folder, trainer.done)
        )
        return in_rounds, task.divide_epochs(divided, tests)

    def is_over(self, done: int) -> bool:
        """Whether all rounds are done, or `patience` rounds brought no improvement."""
        return done >= self._epochs or done - self._best_round() >= self._patience

    def note(self, record: EpochRecord) -> None:
        """Saves the model if it is the best so far."""
        super().note(record)
        if record.accuracy is None:
            raise ValueError(f"round {record.epoch} was not tested")
        self._values.append(record.accuracy)
        trainer = self._trainer
        if trainer.ranks.is_first and self._best_round() == record.epoch:
            save_model(trainer.eval_model, trainer.folder / BEST.format(record.epoch))

    def note_checkpoint(self) -> None:
        """Removes saved models that are no longer the best."""
        if self._trainer.ranks.is_first:
            # the best one at the checkpoint before stays: training may resume from there
            kept = {self._best_round(), self._best_round(but_last=True)}
            _remove_all_but(self._trainer.folder, kept)

    def _best_round(self, *, but_last: bool = False) -> int:
        """Returns the number of the best round, the first of several; 0 before the first."""
        values = self._values[:-1] if but_last else self._values
        return best_index(values, self._trainer.recipe.metric) + 1 if values else 0

    def stopped_after(self, done: int) -> float:
        """Returns the number of epochs that `done` rounds are."""
        return done / self._tests

    def finish(self, score: Callable[[], Score]) -> Score:  # noqa: ARG002
        """Loads the best model; returns its score on the test split."""
        trainer, model = self._trainer, self._trainer.eval_model
        path = trainer.folder / BEST.format(self._best_round())
        if trainer.ranks.is_first:
            load_model_(model, path)
        if trainer.ranks.world_size > 1:  # the other ranks need not share a disk
            model.load_state_dict(trainer.ranks.broadcast_from_rank0(lambda: state_on_cpu(model)))
        with trainer.whole_model() as whole:
            return score_on_test(whole, trainer.recipe, trainer.data, device=trainer.device)

    def clean_up(self) -> None:
        """Removes the copy of the best model, which is the model of the run now."""
        if self._trainer.ranks.is_first:
            _remove_all_but(self._trainer.folder, set())


def held_out_values(folder: Path, rounds: int | None = None) -> list[float]:
    """Returns the metric on the held-out part after each round in the log of a run.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds to return, which must be in the log; None returns all.

    Raises:
        ValueError: If the log has fewer rounds.
    """
    values = {record.epoch: record.accuracy for record in read_log(folder)}
    count = max(values, default=0) if rounds is None else rounds
    kept = [value for number in range(1, count + 1) if (value := values.get(number)) is not None]
    if len(kept) < count:
        raise ValueError(f"{folder / LOG} does not have the {count} rounds that were done")
    return kept


def _in_rounds(recipe: Recipe, tests: int) -> Recipe:
    """Returns a recipe whose epochs are rounds, `tests` of them for every epoch."""
    warmup = recipe.schedule.warmup_epochs
    return replace(
        recipe,
        train=replace(recipe.train, epochs=recipe.train.epochs * tests),
        schedule=replace(recipe.schedule, warmup_epochs=warmup * tests),
    )


def _remove_all_but(folder: Path, kept: set[int]) -> None:
    for path in folder.glob(BEST.format(0).replace("0000", "*")):
        if path.name not in map(BEST.format, kept):
            path.unlink(missing_ok=True)
