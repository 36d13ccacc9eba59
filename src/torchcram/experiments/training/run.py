"""A training in its folder: from the latest checkpoint to the end."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram import hold_masks
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.score import Score
from torchcram.experiments.training.build import build_initial_model, build_optimizer, place
from torchcram.experiments.training.checkpoint import (
    checkpoint_path,
    load_latest,
    load_state_,
    save_checkpoint,
    state_of,
)
from torchcram.experiments.training.data_parallel import with_shared_statistics
from torchcram.experiments.training.log import RunLog
from torchcram.experiments.training.run_folder import (
    CHECKPOINTS,
    MODEL,
    Finished,
    RunInfo,
    digest,
    identity,
    save_model,
    write_info,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer

    from torchcram import Masks
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.training.loop import Loop


@dataclass(frozen=True, eq=False)
class Start:
    """Where a training starts, instead of the initial weights of its seed.

    Attributes:
        model: whose copy is trained.
        masks: that every step holds, by parameter name; None for none.
        teacher: whose scores count beside the labels, where the recipe has `train.distillation`.
    """

    model: nn.Module
    masks: Masks | None = None
    teacher: nn.Module | None = None

    @property
    def digest(self) -> str:
        """A short text that differs for other weights, masks or another teacher."""
        masks = {f"mask of {name}": mask for name, mask in (self.masks or {}).items()}
        taught = {} if self.teacher is None else self.teacher.state_dict()
        teacher = {f"teacher's {name}": value for name, value in taught.items()}
        return digest({**self.model.state_dict(), **masks, **teacher})


@dataclass(eq=False)
class Run:
    """A training between two epochs."""

    recipe: Recipe
    folder: Path
    info: RunInfo
    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    ranks: Ranks = SINGLE
    done: int = 0
    seconds: float = 0.0

    @classmethod
    def resume(
        cls,
        recipe: Recipe,
        folder: Path,
        info: RunInfo,
        *,
        start: Start | None,
        device: torch.device,
        ranks: Ranks = SINGLE,
    ) -> Run:
        """Returns the training as the latest checkpoint has it, or at its beginning.

        A checkpoint whose content does not fit, though its digest is right, is named in a warning,
        and the one before it is taken.
        """
        checkpoints, who, before = folder / CHECKPOINTS, identity(recipe, info), None
        while True:
            # one process reads: all continue from the same epoch, and need not see the same disk
            read = partial(load_latest, checkpoints, who, before=before)
            latest = ranks.broadcast_from_rank0(read)
            if start is not None:
                model = copy.deepcopy(start.model)
            else:
                pretrained = recipe.model.pretrained and latest is None
                model = build_initial_model(
                    recipe, classes=len(info.data.classes), seed=info.seed, pretrained=pretrained
                )
            model = with_shared_statistics(place(model, device), device, ranks)
            optimizer = build_optimizer(recipe, model, seed=info.seed)
            run = cls(recipe, folder, info, model, optimizer, device, ranks)
            if latest is None:
                return run
            before, state = latest
            problem = ranks.run_on_all(partial(run._continue_from, before, state))
            if not ranks.all_reduce_sum(problem is not None)[0]:
                return run
            if ranks.is_first:
                path = checkpoint_path(checkpoints, before)
                warnings.warn(
                    f"{path} is not used: {problem or 'another process refuses it'}", stacklevel=2
                )

    def _continue_from(self, epoch: int, state: dict[str, Any]) -> str | None:
        """Takes the state of a checkpoint; returns what is wrong with it, if anything is."""
        seconds = state.get("seconds")
        if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
            return f"it has {seconds!r:.80} for the seconds that the training took"
        try:
            load_state_(self.model, self.optimizer, self.device, state=state.get("training"))
        except ValueError as error:
            return str(error)
        self.done, self.seconds = epoch, seconds
        return None

    def held_masks(self, start: Start | None) -> AbstractContextManager[object]:
        """Holds the masks of `start`, if it has any, for a `with` block."""
        if start is None or start.masks is None:
            return nullcontext()
        weights = dict(self.model.named_parameters())
        masks = {
            name: torch.empty_like(weights[name], dtype=torch.bool).copy_(mask)
            for name, mask in start.masks.items()
        }
        return hold_masks(self.optimizer, weights, masks)

    def finish(self, loop: Loop, eval_interval: int, checkpoint_interval: int) -> None:
        """Runs what is left of the epochs; leaves the model and what it came to."""
        epochs, found = self.recipe.train.epochs, None
        loop.tell(self.done)
        with self._log() as log:
            for epoch in range(self.done, epochs):
                last = epoch + 1 == epochs
                record = loop.run(epoch, test=last or (epoch + 1) % eval_interval == 0)
                if log is not None:
                    log.write(record)
                self.done = record.epoch
                if record.accuracy is not None:
                    found = Score(record.accuracy, record.metric, record.others)
                self.seconds += record.seconds
                if last or record.epoch % checkpoint_interval == 0:
                    self._save_after(log)
                loop.tell(record.epoch, record)
        if found is None:  # it was killed after the last checkpoint
            found = loop.score()
        if self.ranks.is_first:
            save_model(self.model, self.folder / MODEL)
            finished = Finished(found.value, self.seconds, self.ranks.world_size, found.others)
            write_info(self.folder, replace(self.info, finished=finished))

    def _log(self) -> AbstractContextManager[RunLog | None]:
        return RunLog(self.folder, first=self.done + 1) if self.ranks.is_first else nullcontext()

    def _save_after(self, log: RunLog | None) -> None:
        """Writes a checkpoint once the records that led to it are on the disk."""
        if log is not None:
            log.sync()
        self._save()

    def _save(self) -> None:
        if not self.ranks.is_first:
            return
        training = state_of(self.model, self.optimizer, self.device)
        state = {"training": training, "seconds": self.seconds}
        who = identity(self.recipe, self.info)
        save_checkpoint(self.folder / CHECKPOINTS, self.done, state, identity=who)
