"""Schema of a recipe: its sections, as frozen dataclasses that refuse impossible values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchcram.batches import split_rows
from torchcram.experiments.data.config import DataConfig, TextConfig
from torchcram.experiments.io.dataclass_io import (
    UNLESS_DEFAULT,
    BadValue,
    build,
    plain,
    require,
    require_absent,
    require_one_of,
    require_pattern,
    shown,
)
from torchcram.experiments.models.config import ModelConfig
from torchcram.experiments.models.text import is_text_model
from torchcram.experiments.recipe.checks import (
    read_operator,
    read_operators,
    require_arguments,
    require_torch_name,
)
from torchcram.experiments.recipe.methods import MethodConfig
from torchcram.experiments.recipe.torch_names import (
    OPTIMIZERS as TORCH_OPTIMIZERS,
)
from torchcram.experiments.recipe.torch_names import (
    SCHEDULERS,
    arguments_of,
    has_weight_decay,
    learning_rates,
    make_optimizer,
)
from torchcram.experiments.tasks import Task, TaskConfig, build_task
from torchcram.optim.rules import RULES
from torchcram.pruners import parse_pruner

PRECISIONS = ("fp32", "bf16")
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "constant", "linear")
INTERVALS = ("epoch", "step")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # a file name that is neither hidden nor ".."
_NAME = re.compile(f"{_PART}/{_PART}/{_PART}")


@dataclass(frozen=True)
class StopConfig:
    """Early stopping: training ends once the held-out score stops improving; only for texts.

    Attributes:
        held_out: Fraction of the training split that is held out for these tests.
        tests: Number of tests in an epoch, at equal distances; at most one after every batch.
        patience: Number of tests in a row without improvement after which training ends.
    """

    held_out: float = 0.1
    tests: int = 4
    patience: int = 3

    def __post_init__(self) -> None:
        require(0 < self.held_out < 1, "held_out", self.held_out, "between 0 and 1")
        require(self.tests >= 1, "tests", self.tests, "at least 1")
        require(self.patience >= 1, "patience", self.patience, "at least 1")


@dataclass(frozen=True)
class DistillConfig:
    """Distillation: a dense model is the teacher.

    In fine-tuning it is the model before compression. In training it is the model that the training
    starts from: that of `--from`, or a pretrained language model that generates.

    Attributes:
        weight: Weight of the distillation loss; that of the labels is 1 - weight.
        temperature: Temperature that the scores of both models are divided by.
    """

    weight: float = 0.9
    temperature: float = 2.0

    def __post_init__(self) -> None:
        require(0 < self.weight <= 1, "weight", self.weight, "above 0 and at most 1")
        require(self.temperature > 0, "temperature", self.temperature, "above 0")


@dataclass(frozen=True)
class TrainConfig:
    """Length of the training, batches and loss.

    Attributes:
        epochs: Number of epochs; 0 compresses the model that the training would start from.
        batch_size: Number of samples in a batch, over all processes.
        precision: Precision of the passes: "fp32", or "bf16" for autocast on CUDA.
        label_smoothing: Label smoothing of the loss, from 0 to below 1.
        early_stopping: Early stopping; None trains for all epochs on the whole training split.
        distillation: Distillation; None trains on the labels alone.
        accumulation: Number of micro-batches that every pass computes its samples in; their
            gradients add up to that of the whole batch.
        ema: Decay of an exponential moving average of the weights, which then is the model of the
            run; None takes the weights themselves.
    """

    epochs: int
    batch_size: int
    precision: str = "bf16"
    label_smoothing: float = 0.0
    early_stopping: StopConfig | None = field(default=None, metadata=UNLESS_DEFAULT)
    distillation: DistillConfig | None = field(default=None, metadata=UNLESS_DEFAULT)
    accumulation: int = field(default=1, metadata=UNLESS_DEFAULT)
    ema: float | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        least = 0 if self.early_stopping is None else 1
        allowed = f"at least {least}" + " with train.early_stopping" * least
        require(self.epochs >= least, "epochs", self.epochs, allowed)
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(self.accumulation >= 1, "accumulation", self.accumulation, "at least 1")
        require_one_of("precision", self.precision, PRECISIONS)
        smoothing = self.label_smoothing
        require(0 <= smoothing < 1, "label_smoothing", smoothing, "from 0 to below 1")
        possible = self.ema is None or 0 < self.ema < 1
        require(possible, "ema", self.ema, "between 0 and 1, such as 0.999, or null")


@dataclass(frozen=True)
class OptimizerConfig:
    """The base optimizer.

    Attributes:
        name: Name of the optimizer: "sgd", "adamw", or a class of torch.optim such as "RMSprop".
        lr: Learning rate at its peak.
        momentum: Momentum of "sgd".
        weight_decay: Weight decay.
        nesterov: Whether the momentum of "sgd" is Nesterov's.
        args: Further arguments of a class of torch.optim.
    """

    name: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False
    args: dict[str, Any] | None = field(default=None, hash=False, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require_torch_name("name", self.name, OPTIMIZERS, TORCH_OPTIMIZERS)
        require(self.lr >= 0, "lr", self.lr, "at least 0")
        require(0 <= self.momentum < 1, "momentum", self.momentum, "from 0 to below 1")
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "at least 0")
        possible = not self.nesterov or (self.name == "sgd" and self.momentum > 0)
        require(possible, "nesterov", self.nesterov, "false, except with sgd and a momentum")
        if self.name in OPTIMIZERS:
            require(self.args is None, "args", self.args, f"null, as optimizer.name is {self.name}")
            return
        if not has_weight_decay(self.name):
            decay = self.weight_decay
            require(decay == 0, "weight_decay", decay, f"0, as {self.name} has none")
        args = self.args or {}
        with require_arguments("args", args, arguments_of(TORCH_OPTIMIZERS[self.name])):
            make_optimizer(
                self.name,
                [nn.Parameter(torch.zeros(1, 1))],
                lr=self.lr,
                weight_decay=self.weight_decay,
                args=args,
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """Schedule of the learning rate: linear warm-up, then a decay to 0 or a constant.

    Attributes:
        name: Name of the schedule: "cosine", "linear", "constant", or a class of
            torch.optim.lr_scheduler such as "StepLR".
        warmup_epochs: Number of warm-up epochs at the beginning.
        args: Arguments of a class of torch.optim.lr_scheduler.
        interval: Unit that such a class counts in: "epoch" or "step".
    """

    name: str = "cosine"
    warmup_epochs: int = 5
    args: dict[str, Any] | None = field(default=None, hash=False, metadata=UNLESS_DEFAULT)
    interval: str = field(default="epoch", metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require_torch_name("name", self.name, SCHEDULES, SCHEDULERS)
        require(self.warmup_epochs >= 0, "warmup_epochs", self.warmup_epochs, "at least 0")
        require_one_of("interval", self.interval, INTERVALS)
        if self.name in SCHEDULES:
            allowed = f"null, as schedule.name is {self.name}"
            require(self.args is None, "args", self.args, allowed)
            allowed = f"epoch, as schedule.name is {self.name}"
            require(self.interval == "epoch", "interval", self.interval, allowed)
            return
        args = self.args or {}
        with require_arguments("args", args, arguments_of(SCHEDULERS[self.name])):
            learning_rates(self.name, args, lr=1.0, count=1)


@dataclass(frozen=True)
class CramConfig:
    """Arguments of `CrAM`, and of `compressible_weights` for the weights that it compresses.

    Attributes:
        rule: Name of the update rule.
        operators: Operators as text, also ranges; every step draws one of them.
        rho: Factor of the ascent w + rho g, and its length where g is normalized; null takes that
            of the rule, which is 0 for CrAM and CrAM+.
        sparse_gradients: Whether the gradient at w~ is masked.
        normalize: Whether gradients are normalized; None leaves that to the rule.
        mask_interval: Number of uses of an operator between two selections of its masks.
        base_step_probability: Probability that a step is a plain step of the base optimizer.
        dense_ends: Whether the first and the last compressible layer stay dense.
        only: Regular expression that the names of the weights must match; null matches all.
        skip: Regular expression of the names of weights that stay dense.
        dense_share: Share of every batch that the pass at w takes, the first samples of it.
        compressed_share: Share of every batch that the passes at w~ take, the last samples of it;
            0.5 and 0.5 make a step as cheap as a plain one.
    """

    rule: str = "CrAM+"
    operators: tuple[str, ...] = ()
    rho: float | None = None
    sparse_gradients: bool = True
    normalize: bool | None = None
    mask_interval: int = 1
    base_step_probability: float = 0.0
    dense_ends: bool = False
    only: str | None = None
    skip: str | None = None
    dense_share: float = field(default=1.0, metadata=UNLESS_DEFAULT)
    compressed_share: float = field(default=1.0, metadata=UNLESS_DEFAULT)

    @property
    def shares(self) -> tuple[float, float]:
        """Shares of a batch that the passes at w and at w~ take."""
        return self.dense_share, self.compressed_share

    def __post_init__(self) -> None:
        require_one_of("rule", self.rule, RULES)
        for key in ("dense_share", "compressed_share"):
            share = getattr(self, key)
            require(0 < share <= 1, key, share, "above 0 and at most 1")
        read = read_operators("operators", self.operators)
        object.__setattr__(self, "operators", tuple(map(str, read)))
        if RULES[self.rule].compresses:
            allowed = f"at least one operator, such as global:0.9, for {self.rule}"
            require(bool(self.operators), "operators", list(self.operators), allowed)
        else:
            allowed = f"[], as {self.rule} does not compress"
            require(not self.operators, "operators", list(self.operators), allowed)
        require(self.rho is None or self.rho >= 0, "rho", self.rho, "at least 0, or null")
        require(self.mask_interval >= 1, "mask_interval", self.mask_interval, "at least 1")
        probability = self.base_step_probability
        require(0 <= probability <= 1, "base_step_probability", probability, "from 0 to 1")
        for key in ("only", "skip"):
            require_pattern(key, getattr(self, key))


@dataclass(frozen=True)
class LoraConfig:
    """LoRA: adapters are trained in place of the weights, and merged into them after training.

    Attributes:
        rank: Rank of every adapter B A.
        alpha: Scale of an adapter, which is multiplied by alpha / rank.
        dropout: Dropout of the inputs of adapters.
        targets: Regular expression for the names of the weights that get an adapter; null stands
            for all that the task compresses by default.
        also_train: Regular expression for the names of parameters that are trained as they are,
            such as those of a new head; null for none.
    """

    rank: int = 8
    alpha: int = 16
    dropout: float = 0.0
    targets: str | None = None
    also_train: str | None = None

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", self.rank, "at least 1")
        require(self.alpha >= 1, "alpha", self.alpha, "at least 1")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "from 0 to below 1")
        for key in ("targets", "also_train"):
            require_pattern(key, getattr(self, key))


@dataclass(frozen=True)
class CompressConfig:
    """One-shot compression of the trained model.

    Attributes:
        to: Targets: operators as text, no ranges, and pruners such as obs@uniform:0.7.
        calibration_samples: Number of training samples for batch-norm tuning and for pruners that
            look at activations. Pruners that look at gradients have a number of their own.
        dense_ends: Whether the first and the last compressible layer stay dense.
        only: Regular expression that the names of the weights must match; null matches all.
        watch: Operator as text; during training, the model is also tested compressed by it.
    """

    to: tuple[str, ...]
    calibration_samples: int = 1000
    dense_ends: bool = False
    only: str | None = field(default=None, metadata=UNLESS_DEFAULT)
    watch: str | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require_pattern("only", self.only)
        if self.watch is not None:
            watched = read_operator("watch", self.watch)
            require(not watched.is_range, "watch", self.watch, "one sparsity, or null")
            object.__setattr__(self, "watch", str(watched))
        read = read_operators("to", self.to, parse_pruner)
        object.__setattr__(self, "to", tuple(map(str, read)))
        require(bool(read), "to", list(self.to), "at least one operator, such as global:0.9")
        for index, operator in enumerate(read):
            key, text = f"to[{index}]", self.to[index]
            require(not operator.is_range, key, text, "one sparsity; a range is to train over")
            require(operator not in read[:index], key, text, "every operator once")
        samples = self.calibration_samples
        require(samples >= 1, "calibration_samples", samples, "at least 1")


@dataclass(frozen=True)
class Recipe:
    """A training and the compressions after it.

    Attributes:
        name: Name of the recipe, "<task>/<model>/<method>".
        title: Name of the method in tables.
        data: Dataset and augmentation.
        model: Model.
        train: Length of the training, batches and loss.
        optimizer: Base optimizer.
        schedule: Schedule of the learning rate.
        compress: Compressions of the trained model.
        cram: Arguments of `CrAM`; None takes plain steps of the base optimizer.
        text: Tokenization, for tasks with texts.
        task: Task that is registered by its name; None derives the task from the other sections.
        method: Method to train with in place of CrAM; the model is then pruned after the training.
        lora: Adapters to train in place of the weights; None trains the weights.
    """

    name: str
    title: str
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    compress: CompressConfig
    cram: CramConfig | None = None
    text: TextConfig | None = field(default=None, metadata=UNLESS_DEFAULT)
    task: TaskConfig | None = field(default=None, metadata=UNLESS_DEFAULT)
    method: MethodConfig | None = field(default=None, metadata=UNLESS_DEFAULT)
    lora: LoraConfig | None = field(default=None, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        named = _NAME.fullmatch(self.name) is not None
        require(named, "name", self.name, "<task>/<model>/<method> of letters, digits and ._-")
        require(bool(self.title.strip()), "title", self.title, "a text that is not blank")
        epochs, warmup = self.train.epochs, self.schedule.warmup_epochs
        allowed = f"at most train.epochs, which is {epochs}"
        require(warmup <= epochs, "schedule.warmup_epochs", warmup, allowed)
        self._check_schedule()
        self._check_shares()
        self._check_accumulation()
        self._check_method()
        self._check_lora()
        self._check_task()

    def _check_shares(self) -> None:
        """Refuses shares of a batch that leave a pass without a sample."""
        if self.cram is None:
            return
        try:
            split_rows(self.train.batch_size, *self.cram.shares)
        except ValueError:
            allowed = f"shares with a sample each in a train.batch_size of {self.train.batch_size}"
            problem = f"is {self.cram.dense_share}, with {self.cram.compressed_share} at w~"
            raise BadValue("cram.dense_share", problem, allowed) from None

    def _check_accumulation(self) -> None:
        """Refuses more micro-batches than a pass has samples."""
        count, least = self.train.accumulation, self.least_samples(self.train.batch_size)
        allowed = f"at most {least}, the number of samples in the smallest pass over a batch"
        require(count <= least, "train.accumulation", count, allowed)

    def least_samples(self, batch_size: int) -> int:
        """Returns the number of samples in the smallest pass over a batch of `batch_size`."""
        if self.cram is None:
            return batch_size
        parts = split_rows(batch_size, *self.cram.shares)
        return int(min(rows.stop - rows.start for rows in parts))  # len() takes no huge ranges

    def _check_method(self) -> None:
        """Refuses a method together with CrAM, early stopping or an average of the weights."""
        if self.method is None:
            return
        require_absent(self.cram, "cram", "null, as there is a section method")
        epochs, allowed = self.train.epochs, f"at least 1, as {self.method.name} trains the model"
        require(epochs >= 1, "train.epochs", epochs, allowed)
        allowed = f"null, as {self.method.name} has a schedule of its own"
        require_absent(self.train.early_stopping, "train.early_stopping", allowed)
        allowed = f"null, as {self.method.name} prunes the weights, but not their average"
        require(self.train.ema is None, "train.ema", self.train.ema, allowed)

    def _check_lora(self) -> None:
        """Refuses adapters where something else decides what is trained."""
        if self.lora is None:
            return
        if self.method is not None:
            allowed = f"null, as {self.method.name} trains the weights themselves"
            require_absent(self.lora, "lora", allowed)
        freeze, also = self.model.freeze, self.lora.also_train
        allowed = "null, as lora freezes all weights but those of lora.also_train"
        require(freeze is None, "model.freeze", freeze, allowed)
        ema = self.train.ema
        allowed = "null, as the average of adapters is not that of the weights"
        require(ema is None, "train.ema", ema, allowed)
        allowed = "a regular expression for the head, which is not pretrained for the task"
        require(self.text is None or also is not None, "lora.also_train", also, allowed)

    def _check_schedule(self) -> None:
        """Refuses a scheduler of torch that ends before the training or counts other epochs."""
        schedule, epochs = self.schedule, self.train.epochs - self.schedule.warmup_epochs
        if schedule.name not in SCHEDULERS or schedule.interval != "epoch":
            return
        allowed = "step, as train.early_stopping tests several times in an epoch"
        stops = self.train.early_stopping is not None
        require(not stops, "schedule.interval", schedule.interval, allowed)
        try:
            learning_rates(schedule.name, schedule.args or {}, lr=self.optimizer.lr, count=epochs)
        except ValueError as error:
            problem = f"is {shown(schedule.args)}: {error}"
            allowed = f"arguments for {epochs} epochs"
            raise BadValue("schedule.args", problem, allowed) from None

    def _check_task(self) -> None:
        """Refuses sections that do not fit the task."""
        if self.task is not None:
            require_absent(self.text, "text", "null, as there is a section task")
        else:
            about = "images, as there is no section text"
            if self.text is not None:
                about = "language, as there is a section text"
            fits = is_text_model(self.model.name) == (self.text is not None)
            require(fits, "model.name", self.model.name, f"a model for {about}")
        self.build_task().check_recipe()

    @property
    def passes(self) -> float:
        """Cost of the training in passes over the training set; see `training_passes`."""
        return training_passes(self.to_dict(), self.train.epochs)

    def build_task(self) -> Task:
        """Returns the task, which knows the kind of data, model and metric."""
        return build_task(self.model, self.data, text=self.text, task=self.task)

    @property
    def metric(self) -> str:
        """Name of the metric that its models are scored by."""
        return self.build_task().metric

    @property
    def task_name(self) -> str:
        """First part of the name: what is learnt."""
        return self.name.split("/")[0]

    @property
    def architecture(self) -> str:
        """Second part of the name: the model."""
        return self.name.split("/")[1]

    @property
    def method_name(self) -> str:
        """Last part of the name: how it is trained."""
        return self.name.split("/")[2]

    def to_dict(self) -> dict[str, Any]:
        """Returns all keys and values as plain data, as in YAML and JSON."""
        data: dict[str, Any] = plain(self)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """Builds a recipe from plain data; keys that have a default may be left out.

        Args:
            data: Sections of the recipe, as `to_dict` returns them.
            where: Origin of the data, such as a file name, for messages.

        Raises:
            ValueError: If a key or a value is not allowed; the message names `where`, the key, what
                was given and what is allowed.
        """
        try:
            return build(cls, _cram_as_section(data), where)
        except BadValue as error:
            raise ValueError(f"{where}: {error}") from None


def _cram_as_section(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Turns `method: {name: cram, args: ...}` into the section `cram`."""
    method = data.get("method") if isinstance(data, Mapping) else None
    if not isinstance(method, Mapping) or method.get("name") != "cram":
        return data
    if data.get("cram") is not None or set(method) - {"name", "args"}:
        raise BadValue("method", "is cram", "args alone beside the name, and no section cram")
    others = {key: value for key, value in data.items() if key != "method"}
    return {**others, "cram": method.get("args", {})}


def training_passes(recipe: Mapping[str, Any], epochs: float) -> float:
    """Returns the cost of a training: the number of passes over the training set.

    A pass is a forward and a backward pass over every sample. A plain step takes one over its
    batch. A step of CrAM takes one at w over the dense share of the batch, and one over the
    compressed share for every perturbed point: two for C-SAM, one for all other rules. With
    `base_step_probability` it stops after the pass at w; the number is then the expected one. What
    early stopping holds out is not trained on and does not count. Forward passes alone, as those
    of a teacher and of tests, do not count either.

    Args:
        recipe: Recipe as plain data; keys with a default may be left out.
        epochs: Number of epochs that were trained, which may be a fraction.
    """
    stop = (recipe.get("train") or {}).get("early_stopping")
    if stop is not None:
        epochs *= 1 - stop.get("held_out", StopConfig.held_out)
    cram = recipe.get("cram")
    if cram is None:
        return epochs
    rule = RULES[cram.get("rule", CramConfig.rule)]
    further = len(rule.passes) * cram.get("compressed_share", CramConfig.compressed_share)
    plain_steps = cram.get("base_step_probability", CramConfig.base_step_probability)
    per_epoch: float = cram.get("dense_share", CramConfig.dense_share) + (1 - plain_steps) * further
    return epochs * per_epoch
