"""From the name of a text dataset to its tokens, which are kept in a file beside the data."""

from __future__ import annotations

import hashlib
import json
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram.experiments.data.images.packed import PackedError, Report, cache_folder, writable
from torchcram.experiments.data.text import files
from torchcram.experiments.data.text.datasets import Gold, Texts, TextSet
from torchcram.experiments.data.text.glue import read_tsv
from torchcram.experiments.data.text.squad import read_squad
from torchcram.experiments.data.text.tokens import tokenise_questions, tokenise_sentences
from torchcram.experiments.io.files import remove_leftovers, taking_turns
from torchcram.experiments.models.text import load_tokenizer
from torchcram.experiments.tasks.text_formats import TASKS
from torchcram.files import let_read, written_aside

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.experiments.recipe import Recipe


FORMAT = "torchcram tokens 2"
KEY = "torchcram"  # of the file's metadata
TENSORS = ("tokens", "kinds", "ends", "labels", "examples", "offsets")
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Wanted:
    """What tells one tokenised data set from another.

    Attributes:
        name: of the data set.
        task: of it.
        length: of a sequence, at most.
        stride: of windows on a paragraph.
        tokenizer: a digest of all that it does.
        source: a fingerprint of the files.
    """

    name: str
    task: str
    length: int
    stride: int
    tokenizer: str
    source: str

    @property
    def file(self) -> str:
        """What the file is called; other files of the same data have other names."""
        return f"{self.name}.{self.length}-{self.stride}.{self.tokenizer[:8]}.tokens.safetensors"


def contents(*splits: Texts) -> str:
    """Returns a short text that differs for other sequences, labels, places or right answers."""
    digest = hashlib.sha256()
    for split in splits:
        for tensor in (getattr(split, key) for key in TENSORS):
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(_written(split.gold))
    return digest.hexdigest()[:16]


def write_tokens(data: TextSet, path: Path, wanted: Wanted) -> None:
    """Writes the file aside, then moves it into place: it is never there by half."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, split in zip(SPLITS, (data.train, data.test), strict=True):
        tensors |= {f"{name}.{key}": getattr(split, key).contiguous() for key in TENSORS}
        if split.gold is not None:
            text = bytearray(_written(split.gold))
            tensors[f"{name}.gold"] = torch.frombuffer(text, dtype=torch.uint8)
    said = {"format": FORMAT, **asdict(wanted), "contents": data.contents, "notes": data.notes}
    with written_aside(path) as aside:
        save_file(tensors, aside, {KEY: json.dumps(said)})
        let_read(aside)


def read_tokens(path: Path, wanted: Wanted) -> TextSet:
    """Reads a file; a truncated, stale or foreign one is a PackedError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {})[KEY])
            for key, value in {"format": FORMAT, **asdict(wanted)}.items():
                if said[key] != value:
                    raise ValueError(f"its {key} is {said[key]!r}, needed is {value!r}")
            names = set(file.keys())
            train, test = (
                Texts(
                    **{key: file.get_tensor(f"{split}.{key}") for key in TENSORS},
                    gold=_gold(file.get_tensor(f"{split}.gold"))
                    if f"{split}.gold" in names
                    else None,
                )
                for split in SPLITS
            )
        notes = tuple(map(str, said["notes"]))
        return TextSet(wanted.name, wanted.task, train, test, str(said["contents"]), notes)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise PackedError(f"{path} is not the tokenised {wanted.name!r}: {error}") from error


def _written(gold: Gold | None) -> bytes:
    return json.dumps(gold and asdict(gold)).encode()


def _gold(text: Tensor) -> Gold:
    said = json.loads(text.numpy().tobytes())
    return Gold(
        tuple(said["contexts"]), tuple(said["context_of"]), tuple(map(tuple, said["answers"]))
    )


def load_text(recipe: Recipe, folder: Path, *, report: Report | None = None) -> TextSet:
    """Loads the data of a recipe, tokenised for its model.

    It is tokenised once, into one file beside the data, or in the user's cache folder where that is
    read-only.

    Args:
        recipe: its sections `data`, `text` and `model` count.
        folder: where the data lies.
        report: called with a line before something that takes long, and on what was left out,
            also when the tokens are there already.

    Raises:
        ValueError: if the files are not there, not what they should be, or hold nothing.
    """
    text, name = recipe.text, recipe.data.name
    if text is None:
        raise ValueError(f"{recipe.name} has no section `text`: it is about images")
    found = files.find(name, text.task, folder)
    tokenizer = load_tokenizer(recipe.model.name)
    wanted = Wanted(
        name=name,
        task=text.task,
        length=text.length,
        stride=text.stride,
        tokenizer=tokenizer_digest(tokenizer),
        source=found.fingerprint(),
    )
    return _cached(found, wanted, tokenizer, report or (lambda _: None))


def tokenizer_digest(tokenizer: Any) -> str:  # noqa: ANN401
    """Returns what differs for tokenizers that do something else."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def _cached(found: files.Found, wanted: Wanted, tokenizer: Any, report: Report) -> TextSet:  # noqa: ANN401
    places = [found.folder / wanted.file, cache_folder() / wanted.file]
    for path in places:
        if path.is_file():
            try:
                return _told(read_tokens(path, wanted), report)
            except PackedError as error:
                warnings.warn(f"{error}; it is made anew", stacklevel=3)
    path = places[0] if writable(found.folder) else places[1]
    with taking_turns(path.parent):
        with suppress(PackedError):
            # another process made it meanwhile
            return _told(read_tokens(path, wanted), report)
        report(f"tokenising {wanted.name} into {path}")
        remove_leftovers(path.parent, wanted.file)
        data = tokenise(found, wanted, tokenizer)
        for note in data.notes:
            report(f"{wanted.name}: {note}")
        write_tokens(data, path, wanted)
    return read_tokens(path, wanted)


def _told(data: TextSet, report: Report) -> TextSet:
    """Tells what was left out; how much there is, the first note of a split, only once."""
    seen = set()
    for note in data.notes:
        split = note.split(":")[0]
        if split in seen:
            report(f"{data.name}: {note}")
        seen.add(split)
    return data


def tokenise(found: files.Found, wanted: Wanted, tokenizer: Any) -> TextSet:  # noqa: ANN401
    """Reads the files and tokenises what they hold.

    Args:
        found: where they are.
        wanted: task, length and stride.
        tokenizer: a fast one of Transformers.

    Raises:
        ValueError: if a file is not what it should be, or holds nothing.
    """
    notes: list[str] = []
    splits = []
    for place, split in enumerate(files.read(found, wanted.task)):
        which = files.SPLITS[place]
        splits.append(_split(split, wanted, tokenizer, train=place == 0))
        notes += [f"{which}: {note}" for note in splits[-1][1]]
    (train, _), (test, _) = splits
    return TextSet(wanted.name, wanted.task, train, test, contents(train, test), tuple(notes))


def _split(
    split: files.Split,
    wanted: Wanted,
    tokenizer: Any,  # noqa: ANN401
    *,
    train: bool,
) -> tuple[Texts, list[str]]:
    """Returns a split and what there is to say of it."""
    sentences = TASKS[wanted.task].sentences
    if sentences is not None:
        labelled = read_tsv(split.content, split.where, sentences=sentences)
        texts, cut = tokenise_sentences(labelled, tokenizer, length=wanted.length)
        said = {
            "lines skipped, of other columns or labels": labelled.skipped,
            f"sentences cut to {wanted.length} tokens": cut,
        }
    else:
        asked = read_squad(split.content, split.where, placed=train)
        texts, uncovered = tokenise_questions(
            asked, tokenizer, length=wanted.length, stride=wanted.stride
        )
        said = {
            "questions skipped, as the answer is not at its offset": asked.misplaced,
            "questions skipped, as they have no answer": asked.unanswered,
            "questions whose answer is in no window": uncovered if train else 0,
        }
    notes = [f"{len(texts)} sequences of {texts.count} {TASKS[wanted.task].unit}"]
    return texts, notes + [f"{count} {what}" for what, count in said.items() if count]
