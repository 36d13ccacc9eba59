"""From the name of a text dataset to its tokens, which are kept in a file beside the data."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram.experiments.data.images.packed import PackedError, Report, cache_folder, writable
from torchcram.experiments.data.text import files
from torchcram.experiments.data.text.datasets import References, Texts, TextSet
from torchcram.experiments.data.text.formats import TEXT_FORMATS
from torchcram.experiments.data.text.glue import read_tsv
from torchcram.experiments.data.text.squad import read_squad
from torchcram.experiments.data.text.tokens import tokenise_questions, tokenise_sentences
from torchcram.experiments.io.files import remove_leftovers, taking_turns
from torchcram.files import let_read, written_aside

if TYPE_CHECKING:
    from torch import Tensor


FORMAT = "torchcram tokens 3"
KEY = "torchcram"  # of the file's metadata
TENSORS = ("tokens", "kinds", "ends", "labels", "examples", "offsets")
SPLITS = ("train", "test")


@dataclass(frozen=True)
class CacheKey:
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
        digest.update(_written(split.references))
    return digest.hexdigest()[:16]


def write_tokens(data: TextSet, path: Path, key: CacheKey) -> None:
    """Writes the file aside, then moves it into place: it is never there by half."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, split in zip(SPLITS, (data.train, data.test), strict=True):
        tensors |= {f"{name}.{field}": getattr(split, field).contiguous() for field in TENSORS}
        if split.references is not None:
            text = bytearray(_written(split.references))
            tensors[f"{name}.gold"] = torch.frombuffer(text, dtype=torch.uint8)
    described = {"format": FORMAT, **asdict(key), "contents": data.contents, "notes": data.notes}
    with written_aside(path) as aside:
        save_file(tensors, aside, {KEY: json.dumps(described)})
        let_read(aside)


def read_tokens(path: Path, key: CacheKey) -> TextSet:
    """Reads a file; a truncated, stale or foreign one is a PackedError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {})[KEY])
            for field, value in {"format": FORMAT, **asdict(key)}.items():
                if described[field] != value:
                    raise ValueError(f"its {field} is {described[field]!r}, needed is {value!r}")
            names = set(file.keys())
            train, test = (
                Texts(
                    **{name: file.get_tensor(f"{split}.{name}") for name in TENSORS},
                    references=_references(file.get_tensor(f"{split}.gold"))
                    if f"{split}.gold" in names
                    else None,
                )
                for split in SPLITS
            )
        notes = tuple(map(str, described["notes"]))
        return TextSet(key.name, key.task, train, test, str(described["contents"]), notes)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise PackedError(f"{path} is not the tokenised {key.name!r}: {error}") from error


def _written(references: References | None) -> bytes:
    return json.dumps(references and asdict(references)).encode()


def _references(text: Tensor) -> References:
    described = json.loads(text.numpy().tobytes())
    return References(
        tuple(described["contexts"]),
        tuple(described["context_of"]),
        tuple(map(tuple, described["answers"])),
    )


def load_text(
    name: str,
    folder: Path,
    *,
    task: str,
    length: int,
    stride: int,
    tokenizer: Callable[[], Any],
    report: Report | None = None,
) -> TextSet:
    """Loads a dataset, tokenised.

    It is tokenised once, into one file beside the data, or in the user's cache folder where that is
    read-only.

    Args:
        name: Name of the dataset.
        folder: Folder that the data lies in.
        task: Format of the dataset, one of `TEXT_FORMATS`.
        length: Greatest length of a sequence in tokens.
        stride: Number of tokens by which windows on a long paragraph overlap.
        tokenizer: Function that loads a fast tokenizer of Transformers, called once the files of
            the dataset are there.
        report: Function that is called with a line of text before something that takes long, and
            for what was left out, also when the tokens are there already.

    Raises:
        ValueError: If the files are missing, malformed or empty.
    """
    location = files.find(name, task, folder)
    loaded = tokenizer()
    key = CacheKey(
        name=name,
        task=task,
        length=length,
        stride=stride,
        tokenizer=tokenizer_digest(loaded),
        source=location.fingerprint(),
    )
    return _cached(location, key, loaded, report or (lambda _: None))


def tokenizer_digest(tokenizer: Any) -> str:  # noqa: ANN401
    """Returns what differs for tokenizers that do something else."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def _cached(location: files.Location, key: CacheKey, tokenizer: Any, report: Report) -> TextSet:  # noqa: ANN401
    places = [location.folder / key.file, cache_folder() / key.file]
    for path in places:
        if path.is_file():
            try:
                return _told(read_tokens(path, key), report)
            except PackedError as error:
                warnings.warn(f"{error}; it is made anew", stacklevel=3)
    path = places[0] if writable(location.folder) else places[1]
    with taking_turns(path.parent):
        with suppress(PackedError):
            # another process made it meanwhile
            return _told(read_tokens(path, key), report)
        report(f"tokenising {key.name} into {path}")
        remove_leftovers(path.parent, key.file)
        data = tokenise(location, key, tokenizer)
        for note in data.notes:
            report(f"{key.name}: {note}")
        write_tokens(data, path, key)
    return read_tokens(path, key)


def _told(data: TextSet, report: Report) -> TextSet:
    """Tells what was left out; how much there is, the first note of a split, only once."""
    seen = set()
    for note in data.notes:
        split = note.split(":")[0]
        if split in seen:
            report(f"{data.name}: {note}")
        seen.add(split)
    return data


def tokenise(location: files.Location, key: CacheKey, tokenizer: Any) -> TextSet:  # noqa: ANN401
    """Reads the files and tokenises what they hold.

    Args:
        location: Files of the dataset.
        key: Format, length and stride.
        tokenizer: Fast tokenizer of Transformers.

    Raises:
        ValueError: If a file is malformed or empty.
    """
    notes: list[str] = []
    splits = []
    for place, split in enumerate(files.read(location, key.task)):
        which = files.SPLITS[place]
        splits.append(_split(split, key, tokenizer, train=place == 0))
        notes += [f"{which}: {note}" for note in splits[-1][1]]
    (train, _), (test, _) = splits
    return TextSet(key.name, key.task, train, test, contents(train, test), tuple(notes))


def _split(
    split: files.Split,
    key: CacheKey,
    tokenizer: Any,  # noqa: ANN401
    *,
    train: bool,
) -> tuple[Texts, list[str]]:
    """Returns a split and what there is to say of it."""
    sentences = TEXT_FORMATS[key.task].sentences
    if sentences is not None:
        labelled = read_tsv(split.content, split.where, sentences=sentences)
        texts, cut = tokenise_sentences(labelled, tokenizer, length=key.length)
        described = {
            "lines skipped, of other columns or labels": labelled.skipped,
            f"sentences cut to {key.length} tokens": cut,
        }
    else:
        asked = read_squad(split.content, split.where, placed=train)
        texts, uncovered = tokenise_questions(
            asked, tokenizer, length=key.length, stride=key.stride
        )
        described = {
            "questions skipped, as the answer is not at its offset": asked.misplaced,
            "questions skipped, as they have no answer": asked.unanswered,
            "questions whose answer is in no window": uncovered if train else 0,
        }
    notes = [f"{len(texts)} sequences of {texts.count} {TEXT_FORMATS[key.task].unit}"]
    return texts, notes + [f"{count} {what}" for what, count in described.items() if count]
