"""Log of a run, with one record per epoch."""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import GlobalTopK, Sparsifier, parse_operator
from torchcram.experiments.io import json_text
from torchcram.experiments.io.files import write_atomically
from torchcram.experiments.tasks import ACCURACY

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from torch.utils.tensorboard import SummaryWriter

    from torchcram import Masks, Weights


DEFAULT = GlobalTopK(0.9)  # operator of `MaskChange` if the training has no fitting one


class MaskChange:
    """Measures the fraction of mask entries that changed since the epoch before.

    The mask is that of one fixed operator at w, whichever operators the steps used: the first of
    `operators` that only prunes to one sparsity, or else global:0.9. The fraction shows how far
    the choice of weights has settled, and can be compared between runs with and without CrAM.

    Args:
        weights: Weights that the operator is applied to.
        operators: Operators of the training, as text.
    """

    def __init__(self, weights: Weights, operators: Sequence[str]) -> None:
        parsed = [parse_operator(text) for text in operators]
        pruning = [item for item in parsed if isinstance(item, Sparsifier) and not item.is_range]
        self.operator: Sparsifier = pruning[0] if pruning else DEFAULT
        self._weights = weights
        self._masks = self._select()

    def update(self) -> float:
        """Selects new masks; returns the change since the last call, or since the beginning."""
        before, self._masks = self._masks, self._select()
        changed = [(before[name] != mask).sum() for name, mask in self._masks.items()]
        return int(torch.stack(changed).sum()) / sum(mask.numel() for mask in before.values())

    @torch.no_grad()
    def _select(self) -> Masks:
        return self.operator.select(self._weights)


LOG, TENSORBOARD = "log.jsonl", "tensorboard"


@dataclass(frozen=True)
class EpochRecord:
    """Losses, scores and speed of one epoch.

    Attributes:
        epoch: Number of the epoch, from 1.
        loss: Mean training loss at w.
        compressed_loss: Mean training loss at w~; None if no step went there.
        accuracy: Accuracy on the test split, or the metric of the task, from 0 to 1; None if the
            model was not tested.
        lr: Learning rate of the last step.
        mask_change: Fraction of mask entries that changed, see `MaskChange`.
        images_per_second: Speed of the training alone, without tests.
        seconds: Time of the whole epoch, without its checkpoint.
        processes: Number of processes that trained together.
        metric: Name of the metric that `accuracy` holds.
        unit: Plural of what `images_per_second` counts.
        compressed_accuracy: Accuracy of the model compressed by `compress.watch` of the recipe;
            None if the recipe has none or the model was not tested.
        others: Further metrics of the dense model, by name.
    """

    epoch: int
    loss: float
    compressed_loss: float | None
    accuracy: float | None
    lr: float
    mask_change: float
    images_per_second: float
    seconds: float
    processes: int = field(default=1, metadata=json_text.UNLESS_DEFAULT)
    metric: str = field(default=ACCURACY, metadata=json_text.UNLESS_DEFAULT)
    unit: str = field(default="images", metadata=json_text.UNLESS_DEFAULT)
    compressed_accuracy: float | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    others: dict[str, float] | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)


class RunLog:
    """Appends records to `log.jsonl` and to TensorBoard's files in a run folder.

    Args:
        folder: Folder of the run.
        first: Number of the epoch whose record comes next. Records of it and of later epochs, left
            by a process that was killed before its checkpoint, are dropped, and so is a line that
            was cut off.
    """

    def __init__(self, folder: Path, *, first: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LOG
        kept = [record for record in read_log(folder) if record.epoch < first]
        content = b"".join(json_text.dump(record, indent=None) for record in kept)
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)
        self._file = path.open("ab")
        self._board = _tensorboard(folder / TENSORBOARD, first)

    def write(self, record: EpochRecord) -> None:
        """Appends a record, which then survives the end of the process."""
        self._file.write(json_text.dump(record, indent=None))
        self._file.flush()
        if self._board is None:
            return
        values = asdict(record)
        values |= values.pop("others") or {}
        for name, value in values.items():
            if name not in ("epoch", "processes", "metric", "unit") and value is not None:
                self._board.add_scalar(name, value, record.epoch)
        self._board.flush()

    def sync(self) -> None:
        """Flushes all records to the disk, where they survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read_log(folder: Path) -> list[EpochRecord]:
    """Returns the records of a run folder, or none if there is no log yet.

    A last line that was cut off is left out; any other line that is not a record is named in a
    warning.
    """
    path = folder / LOG
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            warnings.warn(f"{path}, line {number}, is not a record and is left out", stacklevel=2)
    return records


def _record(line: bytes) -> EpochRecord | None:
    try:
        return json_text.parse(EpochRecord, line, LOG) if line.endswith(b"\n") else None
    except ValueError:
        return None


def _tensorboard(folder: Path, first: int) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _warn_no_tensorboard()
        return None
    # purge_step: TensorBoard hides what earlier files of the folder say about these epochs
    return SummaryWriter(str(folder), purge_step=first)


@functools.cache
def _warn_no_tensorboard() -> None:
    warnings.warn(
        f"tensorboard is not installed: the log is only in {LOG} (pip install tensorboard)",
        stacklevel=4,
    )
