"""Base class of the tasks about text: data tokenised for one model of Transformers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torchcram.experiments.io.cache import Report
from torchcram.experiments.io.dataclass_io import require
from torchcram.experiments.models.text import load_tokenizer, save_folder
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.base import FinetuneDefaults, Task

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchcram.experiments.data.text.batches import TextBatches
    from torchcram.experiments.data.text.blocks import BlockBatches
    from torchcram.weights import Weights

FINETUNE_EPOCHS = 2


@dataclass(frozen=True)
class TokenizedTask(Task):
    """A task about text, with a model of Transformers that the text is tokenised for.

    Attributes:
        batch_type: Class of the batches of a split.
    """

    is_transformers: ClassVar[bool] = True
    batch_type: ClassVar[type[TextBatches | BlockBatches]]

    @abstractmethod
    def read(
        self,
        folder: Path,
        *,
        tokenizer: Callable[[], Any],
        report: Report | None,
    ) -> Any:  # noqa: ANN401  # a `Dataset` of the task's own kind
        """Reads the dataset, tokenised.

        Args:
            folder: Folder that the data lies in.
            tokenizer: Function that loads the tokenizer of the model, where it is needed.
            report: Function that is called with a line of text before something that takes long.
        """

    def load(
        self,
        folder: Path | None,
        *,
        download: bool = False,  # noqa: ARG002
        report: Report | None = None,
    ) -> Any:  # noqa: ANN401
        """Loads the text, tokenised for the model."""
        if folder is None:
            raise ValueError(f"dataset {self.data.name!r} needs the folder that the data lies in")
        return self.read(folder, tokenizer=partial(load_tokenizer, self.model.name), report=report)

    def batches(
        self,
        data: Any,  # noqa: ANN401
        *,
        train: bool,
        batch_size: int,
        device: torch.device,
        seed: int,
        ranks: Ranks = SINGLE,
    ) -> TextBatches | BlockBatches:
        """Returns the batches of the training split or of the test split."""
        return self.batch_type(
            data.train if train else data.test,
            batch_size=batch_size,
            device=device,
            seed=seed,
            train=train,
            shard=ranks.shard,
        )

    def check_recipe(self) -> None:
        """Raises `BadValue` for settings of images."""
        data = self.data
        require(data.augment == "none", "data.augment", data.augment, "none")
        require(data.image_size is None, "data.image_size", data.image_size, "null")
        require(not data.color, "data.color", data.color, "false")

    def hold_out(self, data: Any, fraction: float = 0.1, seed: int = 0) -> Any:  # noqa: ANN401
        """Returns the dataset with whole paragraphs or blocks of the training split to test on."""
        return data.hold_out(fraction, seed)

    def divide_epochs(self, data: Any, parts: int) -> Any:  # noqa: ANN401
        """Returns the dataset with training epochs divided into parts."""
        return data.in_parts(parts)

    def finetuning(self, epochs: int, lr: float) -> FinetuneDefaults:
        """Returns how to fine-tune: at most two epochs with early stopping, from the same lr."""
        return FinetuneDefaults(min(FINETUNE_EPOCHS, epochs), lr, early_stopping=True)

    def require_transfer(self) -> None:
        """Raises ValueError, as the head of a language model belongs to its task or vocabulary."""
        raise ValueError("language models are not transferred; allowed: recipes about images")

    def require_same_data(self, tasks: Sequence[Task]) -> None:
        """Raises ValueError if text would have to be tokenised for more than one model."""
        models = sorted({task.model.name for task in tasks})
        if len(models) > 1:
            raise ValueError(
                f"the texts are tokenised for one model, and there are {', '.join(models)}"
            )

    def save_pretrained(
        self,
        model: nn.Module,
        folder: Path,
        *,
        operator: str | None = None,
        weights: Weights | None = None,
    ) -> None:
        """Writes the model and its tokenizer as `from_pretrained` of Transformers loads them."""
        save_folder(model, folder, self.model.name, operator=operator, weights=weights)
