"""Training with a recipe, which can be stopped at any moment and continued exactly.

`train` opens the folder of the run and hands over to a `Trainer`: from the latest checkpoint,
epoch by epoch, to the end. A step is `Step.run`, which calls `CrAM.step` (optim/cram.py).
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram import hold_masks, sparsity
from torchcram.baselines import Baseline
from torchcram.batches import split_rows
from torchcram.experiments.evaluation.compressed_models import (
    compressed_models,
    score_model,
)
from torchcram.experiments.io.files import locked
from torchcram.experiments.io.weights import digest, load_model_, save_model, state_on_cpu
from torchcram.experiments.machine import machine_name, versions
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe.adapters import (
    add_adapters_,
    hold_adapted_masks,
    merged_model,
    require_peft,
)
from torchcram.experiments.recipe.build import (
    build_batches,
    build_initial_model,
    build_optimizer,
    cram_weights,
    to_device,
)
from torchcram.experiments.tasks import Score
from torchcram.experiments.training.checkpoint import (
    checkpoint_path,
    forked_rng,
    frozen_tensors,
    load_latest,
    load_state_,
    save_checkpoint,
    state_of,
)
from torchcram.experiments.training.data_parallel import (
    average_statistics_,
    data_parallel,
    ignore_grad_stride_warnings,
    seed_epoch,
    with_shared_statistics,
)
from torchcram.experiments.training.log import EpochRecord, MaskChange, RunLog
from torchcram.experiments.training.run_folder import (
    CHECKPOINTS,
    MODEL,
    DataInfo,
    Finished,
    RunInfo,
    identity,
    open_run,
    read_run,
    write_info,
)
from torchcram.experiments.training.schedule import lr_at, set_lr_
from torchcram.experiments.training.shards import (
    check_sharded,
    gather_into_,
    gathered,
    shard_,
)
from torchcram.experiments.training.steps import (
    WHOLE_BATCH,
    EagerStep,
    MakeStep,
    Objective,
    Shares,
    Step,
)
from torchcram.experiments.training.stop_policy import EarlyStopping, StopPolicy
from torchcram.experiments.training.weight_average import WeightAverage
from torchcram.trained import copy_marks
from torchcram.weights import copy_coverage_warning

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram import Masks
    from torchcram.experiments.recipe.schema import Recipe
    from torchcram.experiments.tasks import Batches

Progress = Callable[[float, int, "EpochRecord | None"], None]
"""Function of the epochs done, also fractions, of all epochs, and of the last epoch's record."""

CPU = torch.device("cpu")
MISSED_SPARSITY = 0.02  # difference from the target that a warning names
SAME_SPARSITY = 0.001  # difference from the target that results do not name
OFTEN = 0.2  # least number of seconds between two calls of progress within an epoch
PATIENCE = 15.0  # seconds; workers that decode images notice after 5 that they are orphans


@dataclass(frozen=True, eq=False)
class Start:
    """Where a training starts, instead of the initial weights of its seed.

    Attributes:
        model: Model whose copy is trained.
        masks: Masks that every step holds, by parameter name; None for none.
        teacher: Model whose outputs are learnt from, where the recipe has `train.distillation`.
    """

    model: nn.Module
    masks: Masks | None = None
    teacher: nn.Module | None = None

    @property
    def digest(self) -> str:
        """Digest of the weights, the masks and the teacher."""
        masks = {f"mask of {name}": mask for name, mask in (self.masks or {}).items()}
        taught = {} if self.teacher is None else self.teacher.state_dict()
        teacher = {f"teacher's {name}": value for name, value in taught.items()}
        return digest({**self.model.state_dict(), **masks, **teacher})


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished training.

    Attributes:
        recipe: Recipe that it was trained with.
        info: Contents of `run.json`.
        finished: Score and time.
        model: Trained, dense model.
    """

    recipe: Recipe
    info: RunInfo
    finished: Finished
    model: nn.Module


def train(
    recipe: Recipe,
    folder: Path,
    *,
    data: Any,  # noqa: ANN401
    seed: int,
    device: torch.device,
    start: Start | None = None,
    eval_interval: int = 1,
    checkpoint_interval: int = 1,
    make_step: MakeStep = EagerStep,
    progress: Progress | None = None,
    ranks: Ranks = SINGLE,
    sharded: bool = False,
) -> Trained:
    """Trains a model, or continues where an earlier call on the same folder stopped.

    However it is stopped, the checkpoint of the last whole epoch is on disk. On a CPU the final
    weights are, bit for bit, those of a training that was never stopped. If the training in the
    folder is finished, it returns at once. Global random generators are restored.

    Several processes call it together, and it returns the same to all of them. Each takes its shard
    of every batch, and rank 0 reads and writes the folder. Another number of processes, or a single
    one, may continue the run.

    Args:
        recipe: Recipe to train with.
        folder: Folder of the run, as described in run_folder.py.
        data: Dataset to train and test on.
        seed: Seed of the initial weights, the batches and the choice of operators.
        device: Device that everything is computed on.
        start: Model to start from, masks to hold, and model to learn from. Where the recipe has
            `train.distillation`, the teacher is the model that the training starts from, unless
            `start` has another one.
        eval_interval: Number of epochs between two tests; the last epoch is always tested.
        checkpoint_interval: Number of epochs between two checkpoints; the last always has one.
        make_step: Function that makes the `Step`: eager, or as CUDA graphs.
        progress: Function that is called on rank 0 after every epoch, and now and then in between.
        ranks: Processes that train together.
        sharded: Whether the parameters are sharded over the processes (FSDP2), instead of a whole
            copy in each of them (DDP). Either may continue what the other has begun.

    Raises:
        ValueError: If the folder holds another run, if the model does not take the data, if ranks
            have different arguments, or if the recipe has `train.distillation` and the training
            starts from an untrained model.
        FloatingPointError: If the loss is not finite.
    """
    for name, every in (("eval", eval_interval), ("checkpoint", checkpoint_interval)):
        if every < 1:
            raise ValueError(f"{name}_interval={every!r}: at least 1 is allowed")
    if recipe.lora is not None:
        require_peft()
    if sharded:
        check_sharded(recipe, ranks, holds_masks=start is not None and start.masks is not None)
    start = _with_teacher(start, recipe, classes=len(data.classes), seed=seed)
    teacher = _teacher(start, recipe, device)
    requested = RunInfo(
        seed=seed,
        data=DataInfo.of(data),
        start=None if start is None else start.digest,
        machine=machine_name(device),
        versions=versions(),
    )
    intervals = {"eval_interval": eval_interval, "checkpoint_interval": checkpoint_interval}
    ranks.require_same(
        {**identity(recipe, requested), **intervals, "device": device.type, "sharded": sharded}
    )
    with ExitStack() as stack:
        stack.enter_context(forked_rng(device, seed))
        info, finished = ranks.broadcast_from_rank0(
            lambda: _open(folder, recipe, requested, stack, ranks)
        )
        if not finished:
            policy = (
                StopPolicy(eval_interval, checkpoint_interval)
                if recipe.train.early_stopping is None
                else EarlyStopping()
            )
            trainer = ranks.run_on_all(
                lambda: Trainer(
                    recipe,
                    folder,
                    info,
                    data,
                    start=start,
                    teacher=teacher,
                    device=device,
                    ranks=ranks,
                    sharded=sharded,
                )
            )
            task = recipe.build_task()
            ranks.run_on_all(lambda: task.check_model(trainer.model, data, device=device))
            with trainer.held_masks(start), ignore_grad_stride_warnings():
                trainer.fit(policy, make_step, progress if ranks.is_first else None)
    if ranks.world_size == 1:
        return load_trained(folder, device)
    return _load_on_all(folder, device, ranks)


def load_trained(folder: Path, device: torch.device) -> Trained:
    """Returns the finished training of a folder, the model on `device` in eval mode.

    Raises:
        ValueError: If the folder holds no run, or an unfinished one; the message names it.
    """
    recipe, info = read_run(folder)
    if info.finished is None or not (folder / MODEL).exists():
        raise ValueError(f"{folder}: the training is not finished; train again to continue it")
    model = build_initial_model(recipe, classes=len(info.data.classes), seed=0, pretrained=False)
    load_model_(model, folder / MODEL)
    return Trained(recipe, info, info.finished, to_device(model, device).eval())


def _load_on_all(folder: Path, device: torch.device, ranks: Ranks) -> Trained:
    """Returns the finished training of a folder that only rank 0 has to see."""

    def load() -> tuple[Recipe, RunInfo, Finished, dict[str, Tensor]]:
        trained = load_trained(folder, CPU)
        # not the model itself: its hooks may be functions that cannot be sent
        return trained.recipe, trained.info, trained.finished, state_on_cpu(trained.model)

    recipe, info, finished, state = ranks.broadcast_from_rank0(load)
    model = build_initial_model(recipe, classes=len(info.data.classes), seed=0, pretrained=False)
    model.load_state_dict(state)
    return Trained(recipe, info, finished, to_device(model, device).eval())


class Trainer:
    """A training that continues from its latest checkpoint.

    Args:
        recipe: Recipe to train with.
        folder: Folder of the run.
        info: Description of the run that the folder holds.
        data: Dataset to train and test on.
        start: Model to start from and masks to hold; None for the initial weights of the seed.
        teacher: Model on `device`, in eval mode, to learn from where the recipe has distillation.
        device: Device that everything is computed on.
        ranks: Processes that train together.
        sharded: Whether the parameters are sharded over the processes.

    Attributes:
        model: Model that is trained.
        optimizer: `CrAM` or a plain optimizer.
        average: Average of the weights, where the recipe has `train.ema`; otherwise None.
        done: Number of epochs done.
        seconds: Time that these epochs took.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        info: RunInfo,
        data: Any,  # noqa: ANN401
        *,
        start: Start | None,
        teacher: nn.Module | None = None,
        device: torch.device,
        ranks: Ranks = SINGLE,
        sharded: bool = False,
    ) -> None:
        self._sharded = sharded
        self._gathered: nn.Module | None = None
        self.recipe, self.folder, self.info, self.data = recipe, folder, info, data
        self.teacher, self.device, self.ranks = teacher, device, ranks
        self.done, self.seconds = 0, 0.0
        self._resume(start)

    # the training

    def fit(self, policy: StopPolicy, make_step: MakeStep, progress: Progress | None) -> None:
        """Trains until the policy ends it; writes the model and its score to the folder."""
        recipe, data = policy.begin(self)
        epochs = Epochs(self, recipe, data, make_step, progress)
        epochs.report(self.done)
        with self._open_log() as log:
            while not policy.is_over(self.done):
                record = epochs.run(self.done, test=policy.tests_after(self.done + 1))
                if log is not None:
                    log.write(record)
                self.done, self.seconds = record.epoch, self.seconds + record.seconds
                policy.note(record)
                if policy.saves_after(self.done):
                    if log is not None:
                        log.sync()  # records must be on disk before their checkpoint
                    self.save_checkpoint()
                    policy.note_checkpoint()
                epochs.report(record.epoch, record)
        reached = self._finish_method()
        score = policy.finish(epochs.score) if self.recipe.method is None else epochs.score()
        with self.whole_model() as model:
            if self.ranks.is_first:
                save_model(model, self.folder / MODEL)
        if self.ranks.is_first:
            finished = Finished(
                score.value,
                self.seconds,
                self.ranks.world_size,
                score.others,
                policy.stopped_after(self.done),
                reached,
            )
            write_info(self.folder, replace(self.info, finished=finished))
        policy.clean_up()

    def held_masks(self, start: Start | None) -> AbstractContextManager[object]:
        """Holds the masks of `start`, if it has any, for a `with` block."""
        if start is None or start.masks is None:
            return nullcontext()
        with merged_model(self.model):
            weights = dict(self.model.named_parameters())
        masks = {
            name: torch.empty_like(weights[name], dtype=torch.bool).copy_(mask)
            for name, mask in start.masks.items()
        }
        if self.recipe.lora is not None:
            return hold_adapted_masks(self.model, self.optimizer, masks)
        return hold_masks(self.optimizer, weights, masks)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """Gives the model to test and save for a `with` block, that all ranks enter together.

        It is the average of the weights where there is one; adapters are merged, shards gathered.
        """
        if self._whole is None:
            with merged_model(self.model):
                yield self.eval_model
            return
        if self._gathered is not None:  # inside another such block
            yield self._gathered
            return
        gather_into_(self._whole, self.model)
        on_cpu = self.device.type == "cpu"
        self._gathered = self._whole if on_cpu else copy.deepcopy(self._whole).to(self.device)
        try:
            yield self._gathered
        finally:
            self._gathered = None

    # checkpoints

    def save_checkpoint(self) -> None:
        """Writes a checkpoint, on rank 0."""
        if not self.ranks.is_first and not self._sharded:
            return
        training = state_of(self.model, self.optimizer, self.device, average=self.average)
        if self._sharded:
            training = gathered(training, keep=self.ranks.is_first)
        if not self.ranks.is_first:
            return
        state = {"training": training, "seconds": self.seconds}
        if self._frozen is not None:
            state["frozen"] = self._frozen
        save_checkpoint(
            self.folder / CHECKPOINTS,
            self.done,
            state,
            identity=identity(self.recipe, self.info),
        )

    def _resume(self, start: Start | None) -> None:
        """Loads the latest checkpoint, or builds the initial state if there is none.

        A checkpoint whose digest is right but whose content does not fit is named in a warning, and
        the one before it is used.
        """
        checkpoints, before = self.folder / CHECKPOINTS, None
        expected = identity(self.recipe, self.info)
        while True:
            # only rank 0 reads: all continue from the same epoch and need not share a disk
            read = partial(load_latest, checkpoints, expected, before=before)
            latest = self.ranks.broadcast_from_rank0(read)
            # checkpoints of adapters do not have the weights that they belong to
            self._build(start, pretrained=latest is None or self.recipe.lora is not None)
            if latest is None:
                return
            before, state = latest
            problem = self.ranks.run_on_all(partial(self._load_state, before, state))
            if not self.ranks.all_reduce_sum(problem is not None)[0]:
                return
            if self.ranks.is_first:
                path = checkpoint_path(checkpoints, before)
                reason = problem or "it does not fit on another rank"
                warnings.warn(f"{path} is not used: {reason}", stacklevel=2)

    def _build(self, start: Start | None, *, pretrained: bool) -> None:
        """Builds the model and the optimizer in their state before the first epoch."""
        recipe, info = self.recipe, self.info
        if start is not None:
            model = copy.deepcopy(start.model)
        else:
            model = build_initial_model(
                recipe,
                classes=len(info.data.classes),
                seed=info.seed,
                pretrained=recipe.model.pretrained and pretrained,
            )
        self._whole = copy.deepcopy(model) if self._sharded else None
        model = model.to(self.device) if self._sharded else to_device(model, self.device)
        self.model = with_shared_statistics(model, self.device, self.ranks)
        if self._sharded:
            shard_(self.model, self.device, self.ranks)
        add_adapters_(recipe, self.model, seed=info.seed)
        self._frozen = None if recipe.lora is None else digest(frozen_tensors(self.model))
        decay = recipe.train.ema
        self.average = None if decay is None else WeightAverage(self.model, decay)
        # only methods need to know beforehand how many steps there are
        steps = None if recipe.method is None else len(self.batches)
        self.optimizer = build_optimizer(recipe, self.model, seed=info.seed, steps_per_epoch=steps)

    @property
    def eval_model(self) -> nn.Module:
        """Model that is tested and saved: the average of the weights, or the model itself."""
        return self.model if self.average is None else self.average.module

    @cached_property
    def batches(self) -> Batches:
        """Batches of the whole training split."""
        return self.build_batches(self.recipe, self.data, train=True)

    def build_batches(self, recipe: Recipe, data: Any, *, train: bool) -> Batches:  # noqa: ANN401
        """Returns training or test batches for this rank."""
        return build_batches(
            recipe, data, train=train, device=self.device, seed=self.info.seed, ranks=self.ranks
        )

    def _finish_method(self) -> float | None:
        """Prunes the model to exactly the target of its method, if it has one.

        Returns:
            Sparsity that training itself reached; None where that is the target's.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, Baseline):
            return None
        reached = optimizer.reached_sparsity()
        optimizer.finish()
        final = sparsity(optimizer.weights)
        missed = abs(reached - final) if optimizer.trains_to_target else 0.0
        if missed > MISSED_SPARSITY and self.ranks.is_first:
            last = "pruned" if reached < final else "brought back"
            warnings.warn(
                f"{self.recipe.name}: training reached a sparsity of {reached:.1%} instead of "
                f"{final:.1%}; the difference was {last} at the end, without training. Tune the "
                "penalty, the weight decay or the schedule of the method",
                stacklevel=2,
            )
        return reached if missed > SAME_SPARSITY else None

    def _load_state(self, epoch: int, state: dict[str, Any]) -> str | None:
        """Loads the state of a checkpoint; returns the problem if it does not fit."""
        seconds = state.get("seconds")
        if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
            return f"its seconds are {seconds!r:.80}, not a finite number"
        if self._frozen is not None and state.get("frozen") != self._frozen:
            raise ValueError(
                f"{self.folder}: its adapters were trained on other weights than those that "
                f"{self.recipe.model.name!r} has now; allowed: the same weights"
            )
        try:
            load_state_(
                self.model,
                self.optimizer,
                self.device,
                state=state.get("training"),
                average=self.average,
            )
        except ValueError as error:
            return str(error)
        self.done, self.seconds = epoch, seconds
        return None

    def _open_log(self) -> AbstractContextManager[RunLog | None]:
        if not self.ranks.is_first:
            return nullcontext()
        return RunLog(self.folder, first=self.done + 1)


class Epochs:
    """Runs the epochs of a training: steps, learning rate, losses, tests.

    Args:
        trainer: Training with the state to continue from.
        recipe: Recipe with the number of epochs and the schedule; with early stopping, of rounds.
        data: Dataset to train and test on.
        make_step: Function that makes the `Step`.
        progress: Function that is called after every epoch, and now and then in between.
    """

    def __init__(
        self,
        trainer: Trainer,
        recipe: Recipe,
        data: Any,  # noqa: ANN401
        make_step: MakeStep,
        progress: Progress | None,
    ) -> None:
        self._trainer = trainer
        device, ranks, seed = trainer.device, trainer.ranks, trainer.info.seed
        self._recipe, self._model, self._device, self._ranks = recipe, trainer.model, device, ranks
        self._optimizer, self._seed, self._data = trainer.optimizer, seed, data
        self._average = trainer.average
        if data is trainer.data:
            self._batches = trainer.batches
        else:
            self._batches = trainer.build_batches(recipe, data, train=True)
        self._test = trainer.build_batches(recipe, data, train=False)
        batch_size = min(recipe.train.batch_size, len(data.train))
        self._images = len(self._batches) * batch_size
        self._share = ranks.shard.share(batch_size)
        model = data_parallel(trainer.model, device, ranks, batch_size=batch_size)
        task = recipe.build_task()
        self._unit = task.unit
        _check_accumulation(recipe, batch_size, ranks)
        shares = _shares(recipe, ranks.shard.rows(batch_size))
        objective = Objective(
            task.loss, task.class_dim, shares, trainer.teacher, task.count_targets
        )
        self._make_step = partial(
            make_step,
            model,
            trainer.optimizer,
            self._batches,
            recipe.train,
            device,
            objective=objective,
        )
        operators = _operators(recipe)
        with trainer.whole_model() as whole:
            model = whole if trainer.average is None else trainer.model
            self._mask_change = MaskChange(cram_weights(recipe, model), operators)
        if self._average is not None:  # warnings of the model are not repeated for its average
            copy_marks(self._model, self._average.module)
            copy_coverage_warning(self._model, self._average.module)
        self._progress = progress or (lambda *_: None)
        self._reported = -math.inf  # time of the last call of progress

    @cached_property
    def _step(self) -> Step:
        return self._make_step()  # a training that is over, or has no epochs, captures nothing

    def run(self, epoch: int, *, test: bool) -> EpochRecord:
        """Trains for one epoch.

        Args:
            epoch: Number of the epoch, from 0.
            test: Whether to test the model after it.

        Raises:
            FloatingPointError: If the loss is not finite.
        """
        step = self._step  # the time that it takes to make it is not that of the epoch
        begin = time.perf_counter()
        try:
            lr = self._train(step, epoch)
            loss, compressed_loss = self._losses(step)
            if not math.isfinite(loss) or not math.isfinite(compressed_loss or 0):
                raise FloatingPointError(
                    f"the training loss is {loss} at w, {compressed_loss} at w~"
                )
        except FloatingPointError as error:
            raise FloatingPointError(
                f"epoch {epoch + 1}: {error}; a smaller learning rate or rho may help, in another "
                f"folder than {self._trainer.folder}, which holds this run"
            ) from error
        trained = time.perf_counter()
        average_statistics_(self._model, self._ranks)
        if self._average is not None:
            average_statistics_(self._average.module, self._ranks)
        with self._trainer.whole_model() as whole:
            score = self.score() if test else None
            return EpochRecord(
                epoch=epoch + 1,
                loss=loss,
                compressed_loss=compressed_loss,
                accuracy=None if score is None else score.value,
                lr=lr,
                mask_change=self._mask_change.update(),
                images_per_second=self._images / (trained - begin),
                seconds=time.perf_counter() - begin,
                processes=self._ranks.world_size,
                metric=self._recipe.metric,
                unit=self._unit,
                compressed_accuracy=self._score_watched(whole) if test else None,
                others=None if score is None else score.others,
            )

    def score(self) -> Score:
        """Returns the score on the test split, of the model that a method would leave."""
        optimizer = self._optimizer
        pruned = optimizer.pruned() if isinstance(optimizer, Baseline) else nullcontext()
        with pruned, self._trainer.whole_model() as whole:
            return score_model(
                whole,
                self._recipe,
                self._data,
                self._test,
                device=self._device,
                ranks=self._ranks,
            )

    def report(self, done: float, record: EpochRecord | None = None) -> None:
        """Calls progress; within an epoch at most every `OFTEN` seconds."""
        now = time.perf_counter()
        if record is not None or done == 0 or now - self._reported >= OFTEN:
            self._progress(done, self._recipe.train.epochs, record)
            self._reported = now

    def _train(self, step: Step, epoch: int) -> float:
        """Takes the steps of an epoch; returns the last learning rate."""
        recipe, steps, lr = self._recipe, len(self._batches), 0.0
        total = recipe.train.epochs * steps
        self._model.train()
        seed_epoch(self._ranks, self._seed, epoch)
        step.start_epoch(epoch)
        for number in range(steps):
            position, length = epoch * steps + number, total
            if isinstance(self._optimizer, Baseline):  # it may train in several rounds
                position, length = self._optimizer.lr_position(position, total)
            lr = lr_at(
                position, steps, recipe.schedule, lr=recipe.optimizer.lr, epochs=length // steps
            )
            set_lr_(self._optimizer, lr)
            step.run()
            if self._average is not None:
                self._average.update_parameters(self._model)
            self.report(epoch + (number + 1) / steps)
        return lr

    def _losses(self, step: Step) -> tuple[float, float | None]:
        """Waits for the device; returns the mean losses over all ranks, at w and at w~."""
        at_w, at_compressed = step.losses()
        shares = [self._share * loss for loss in (at_w, at_compressed) if loss is not None]
        at_w, *others = self._ranks.all_reduce_sum(*shares)
        return at_w, others[0] if others else None

    def _score_watched(self, whole: nn.Module) -> float | None:
        """Returns the score of the model compressed to the target that the recipe watches."""
        if self._recipe.compress.watch is None:
            return None
        (small,) = compressed_models(
            whole,
            self._recipe,
            self._data,
            [self._recipe.compress.watch],
            device=self._device,
            seed=self._seed,
            score_before=False,
            test=self._test,
            ranks=self._ranks,
        )
        return small.after[0].value


def _with_teacher(start: Start | None, recipe: Recipe, *, classes: int, seed: int) -> Start | None:
    """Returns a start that has a teacher, if the recipe needs one: the model it starts from."""
    if recipe.train.distillation is None or (start is not None and start.teacher is not None):
        return start
    if start is None:
        if not recipe.model.pretrained or not recipe.build_task().has_pretrained_head:
            raise ValueError(
                f"{recipe.name}: train.distillation needs a trained model as the teacher, which "
                "fine-tuning, --from RUN and pretrained language models that generate have; "
                "allowed here: null"
            )
        start = Start(build_initial_model(recipe, classes=classes, seed=seed))
    return replace(start, teacher=start.model)


def _teacher(start: Start | None, recipe: Recipe, device: torch.device) -> nn.Module | None:
    """Returns a copy of the teacher on `device`, in eval mode and without gradients, if needed."""
    if recipe.train.distillation is None or start is None or start.teacher is None:
        return None
    return to_device(copy.deepcopy(start.teacher), device).eval().requires_grad_(False)


def _open(
    folder: Path, recipe: Recipe, requested: RunInfo, stack: ExitStack, ranks: Ranks
) -> tuple[RunInfo, bool]:
    """Locks and opens the folder; returns the description of its run, and whether it is finished.

    After a restart of several processes, workers of the earlier ones may still hold the lock.
    """
    stack.enter_context(locked(folder, patience=0 if ranks.world_size == 1 else PATIENCE))
    info = open_run(folder, recipe, requested)
    return info, info.finished is not None and (folder / MODEL).exists()


def _shares(recipe: Recipe, rows: int) -> Shares:
    """Returns the shares of a batch that the passes at w and at w~ take.

    Raises:
        ValueError: If a pass would have none of the rows of a batch on this rank.
    """
    shares = WHOLE_BATCH if recipe.cram is None else recipe.cram.shares
    split_rows(rows, *shares)
    return shares


def _check_accumulation(recipe: Recipe, batch_size: int, ranks: Ranks) -> None:
    """Raises ValueError if a rank would have more micro-batches in a pass than samples."""
    count, least = recipe.train.accumulation, recipe.least_samples(batch_size // ranks.world_size)
    if count > least:
        raise ValueError(
            f"{recipe.name}: train.accumulation is {count}; allowed: at most {least}, the samples "
            f"that each of {ranks.world_size} processes has in the smallest pass over a batch of "
            f"{batch_size}"
        )


def _operators(recipe: Recipe) -> tuple[str, ...]:
    """Returns the operators that a training is for; none in plain training."""
    if recipe.method is not None:
        return (recipe.method.target,)
    return recipe.cram.operators if recipe.cram is not None else ()
